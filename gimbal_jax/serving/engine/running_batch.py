"""The sequences that an engine runs, as arrays by row, so that a step costs no Python object per sequence."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

import numpy as np

from gimbal_jax.config import MAX_STOP_IDS, EngineConfig
from gimbal_jax.serving.engine.plan import (
    NOT_FINITE,
    ON_DEVICE,
    SAMPLING_COLUMNS,
    Adjustment,
    Chunk,
    DecodeRows,
    pack_sampling,
)
from gimbal_jax.serving.engine.sequence import NO_ROW, Sequence

NEVER = np.iinfo(np.int32).max
NO_TOKEN = -2
"""Differs from every token, ON_DEVICE and NOT_FINITE."""

_age = attrgetter("age")


class RunningBatch:
    """State of the running sequences, by row R. Only methods of this class write to the arrays.

    ``next_chunk`` and ``decode`` advance a row when its work is scheduled, ``learn`` when the chosen token is known.
    A row without a sequence holds zeros. All arrays are int32 unless noted.

    ``sequence_R``: sequence of each row; None without one.
    ``request_id_R``: request id of each row; "" without a sequence.
    ``owner_R``: int64 number of the sequence's stay in the row, different for every stay; 0 without a sequence.
    ``tokens_RN``: prompt and output. The host knows the first ``known_R`` tokens of a row.
    ``page_table_RM``: KV pages in order. The first ``num_pages_R`` belong to the sequence.
    ``computed_R``: tokens whose keys and values are in the pages once all scheduled steps are done.
    ``known_R``: tokens that the host knows.
    ``length_R``: tokens of the sequence, including those that the host does not know yet.
    ``last_R``: last token of a decoding sequence, or ON_DEVICE. A copy, because ``tokens_RN`` is slow to gather from.
    ``prefill_end_R``: tokens to compute before it decodes, which is its length when it got the row.
    ``limit_R``: most tokens that the sequence may have.
    ``min_length_R``: tokens before which stop tokens do not end the sequence; 0 without stop tokens.
    ``publish_at_R``: tokens that must be known and computed before the next page can be shared.
    ``stop_RK``: stop tokens; NO_TOKEN for unused entries.
    ``adjusts_R``: bool, whether anything other than ``min_tokens`` changes the logits.
    ``reports_R``: bool, whether tokens go through Python one by one: for a grammar, or with log probabilities.
    """

    def __init__(self, config: EngineConfig) -> None:
        rows, self._page_size = config.max_rows, config.page_size
        self.sequence_R: list[Sequence | None] = [None] * rows
        self.request_id_R: list[str] = [""] * rows
        self.owner_R = np.zeros(rows, np.int64)
        self.tokens_RN = np.zeros((rows, config.max_model_len), np.int32)
        self.page_table_RM = np.zeros((rows, config.pages_per_row), np.int32)
        self.num_pages_R = np.zeros(rows, np.int32)
        self.computed_R = np.zeros(rows, np.int32)
        self.known_R = np.zeros(rows, np.int32)
        self.length_R = np.zeros(rows, np.int32)
        self.last_R = np.zeros(rows, np.int32)
        self.prefill_end_R = np.zeros(rows, np.int32)
        self.limit_R = np.zeros(rows, np.int32)
        self.min_length_R = np.zeros(rows, np.int32)
        self.publish_at_R = np.full(rows, NEVER, np.int32)
        self.stop_RK = np.full((rows, MAX_STOP_IDS), NO_TOKEN, np.int32)
        self.adjusts_R = np.zeros(rows, bool)
        self.reports_R = np.zeros(rows, bool)
        self._sampling_RX = np.zeros((rows, SAMPLING_COLUMNS), np.int32)
        self._free = list(range(rows - 1, -1, -1))
        self._stays = 0
        self._by_age: list[Sequence] = []
        self._row_A: np.ndarray | None = None  # rows by age; None after a change

    def __len__(self) -> int:
        """Return the number of rows that have a sequence."""
        return len(self._by_age)

    @property
    def free(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    @property
    def youngest(self) -> Sequence:
        """The running sequence that is preempted first."""
        return self._by_age[-1]

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences, oldest first."""
        return tuple(self._by_age)

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences that have prefill left, oldest first."""
        prefilling_R = self.computed_R < self.prefill_end_R
        return [one for one in self._by_age if prefilling_R[one.row]] if prefilling_R.any() else []

    @property
    def decoding_R(self) -> np.ndarray:
        """Whether each row wants its next token: prefill is over, and the last possible token is not scheduled yet."""
        return (self.computed_R >= self.prefill_end_R) & (self.length_R < self.limit_R)

    @property
    def decoding_D(self) -> np.ndarray:
        """The rows that want their next token, oldest sequence first."""
        if self._row_A is None:
            self._row_A = np.array([sequence.row for sequence in self._by_age], np.intp)
        return self._row_A[self.decoding_R[self._row_A]]

    @property
    def lacking_R(self) -> np.ndarray:
        """Whether each row needs one page more for its next token, if it decodes."""
        return self.length_R > self.num_pages_R * self._page_size

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the running sequences have in pages."""
        return int(self.computed_R.sum())

    @property
    def prefill_tokens(self) -> int:
        """Prefill tokens that the running sequences have left."""
        return int(np.maximum(self.prefill_end_R - self.computed_R, 0).sum())

    def prefill_left(self, row: int) -> int:
        """Return the prefill tokens that a row has left."""
        return int(self.prefill_end_R[row] - self.computed_R[row])

    def waits_for_token(self, row: int) -> bool:
        """Return whether the host does not know the last token of a row yet."""
        return bool(self.known_R[row] < self.length_R[row])

    def enter(self, sequence: Sequence, pages: list[int], computed: int, limit: int) -> None:
        """Give a sequence a free row. Its first ``computed`` tokens are in the pages already."""
        row = sequence.row = self._free.pop()
        insort(self._by_age, sequence, key=_age)
        self._row_A = None
        request, sampling, length = sequence.request, sequence.request.sampling, sequence.length
        prompt_tokens, stops = len(request.prompt), sampling.stop_token_ids

        # Whose row it is, its tokens and its pages.
        self._stays += 1
        self.sequence_R[row], self.request_id_R[row], self.owner_R[row] = sequence, request.id, self._stays
        self.tokens_RN[row, :prompt_tokens] = request.prompt
        self.tokens_RN[row, prompt_tokens:length] = sequence.output
        self.add_pages(row, pages)

        # How far it has come, and where it ends.
        self.computed_R[row] = computed
        self.known_R[row] = self.length_R[row] = self.prefill_end_R[row] = length
        self.limit_R[row] = limit
        self.min_length_R[row] = prompt_tokens + sampling.min_tokens if stops else 0
        self.stop_RK[row] = NO_TOKEN
        self.stop_RK[row, : len(stops)] = stops
        self.publish_at_R[row] = computed + self._page_size if sequence.page_names else NEVER

        # How its tokens are chosen.
        self.adjusts_R[row] = sequence.adjusts
        self.reports_R[row] = request.grammar is not None or sampling.logprobs is not None
        self._sampling_RX[row] = pack_sampling(sampling)

    def leave(self, sequence: Sequence) -> list[int]:
        """Take the row from a sequence and return its pages. The known output goes into ``sequence.output``."""
        at = bisect_left(self._by_age, _age(sequence), key=_age)
        while self._by_age[at] is not sequence:
            at += 1
        del self._by_age[at]
        self._row_A = None
        row, sequence.row = sequence.row, NO_ROW
        pages = self.pages(row).tolist()
        sequence.output = self.tokens_RN[row, len(sequence.request.prompt) : self.known_R[row]].copy()
        self.sequence_R[row], self.request_id_R[row], self.owner_R[row] = None, "", 0
        self.page_table_RM[row, : len(pages)] = 0
        for numbers_R in (self.num_pages_R, self.computed_R, self.known_R, self.length_R, self.prefill_end_R):
            numbers_R[row] = 0
        self.limit_R[row] = self.min_length_R[row] = 0
        self.publish_at_R[row] = NEVER
        self.adjusts_R[row] = self.reports_R[row] = False
        self._free.append(row)
        return pages

    def pages(self, row: int) -> np.ndarray:
        """Return the pages of a row, in order, as a view."""
        return self.page_table_RM[row, : self.num_pages_R[row]]

    def add_pages(self, row: int, pages: list[int]) -> None:
        """Append pages to a row."""
        owned = self.num_pages_R[row]
        self.page_table_RM[row, owned : owned + len(pages)] = pages
        self.num_pages_R[row] += len(pages)

    def add_page_each(self, row_D: np.ndarray, pages: list[int]) -> None:
        """Append one page to each of these rows."""
        self.page_table_RM[row_D, self.num_pages_R[row_D]] = pages
        self.num_pages_R[row_D] += 1

    def decode(self, row_D: np.ndarray, adjustments: tuple[tuple[int, Adjustment], ...] = ()) -> DecodeRows:
        """Schedule the last token of each of these rows, which chooses the next one."""
        widest = int(self.num_pages_R[row_D].max(initial=0))
        decode = DecodeRows(
            row_D=row_D.astype(np.int32),
            token_D=self.last_R[row_D],
            start_D=self.computed_R[row_D],
            page_table_DM=self.page_table_RM[:, :widest][row_D],
            sampling_DX=self._sampling_RX[row_D],
            adjustments=adjustments,
        )
        self.computed_R[row_D] = self.length_R[row_D]
        self.last_R[row_D] = ON_DEVICE
        self.length_R[row_D] += 1
        return decode

    def next_chunk(self, row: int, most: int) -> Chunk:
        """Schedule the next tokens of a prefill, at most ``most``. If they are its last, a next token is chosen."""
        sequence = self.sequence_R[row]
        assert sequence is not None
        request, start, length = sequence.request, int(self.computed_R[row]), int(self.length_R[row])
        end = min(start + most, length)
        chunk = Chunk(row, self.tokens_RN[row, start:end].copy(), start, self.pages(row).copy(), sampling=None)
        # Log probabilities of the prompt come with its first prefill, not with output that is computed again.
        wanted, prompt_tokens = request.sampling.prompt_logprobs, len(request.prompt)
        if wanted is not None and start + 1 < prompt_tokens == length:
            chunk.targets = self.tokens_RN[row, start + 1 : min(end + 1, prompt_tokens)].copy()
            chunk.target_logprobs = wanted
        self.computed_R[row] = end
        if end == length:
            chunk.sampling = request.sampling
            self.last_R[row] = ON_DEVICE
            self.length_R[row] = end + 1
        return chunk

    def learn(self, row_D: np.ndarray, at_D: np.ndarray, token_D: np.ndarray) -> None:
        """Store the tokens that were chosen for these positions."""
        self.tokens_RN[row_D, at_D] = token_D
        self.known_R[row_D] = end_D = at_D + 1
        self.last_R[row_D] = np.where(end_D == self.length_R[row_D], token_D, ON_DEVICE)

    def special_D(self, row_D: np.ndarray, at_D: np.ndarray, token_D: np.ndarray) -> np.ndarray:
        """Return which of these chosen tokens need more than to be sent: they may end a sequence, or are reported."""
        return (
            (self.stop_RK[row_D] == token_D[:, None]).any(axis=1)
            | (at_D + 1 == self.limit_R[row_D])
            | (token_D == NOT_FINITE)
            | self.reports_R[row_D]
        )

    def adjustments(self, row_D: np.ndarray) -> tuple[tuple[int, Adjustment], ...]:
        """Return (index into D, adjustment) for rows that are about to decode and whose logits change."""
        adjusted_D = self.adjusts_R[row_D] | (self.length_R[row_D] < self.min_length_R[row_D])
        if not adjusted_D.any():
            return ()
        places = np.flatnonzero(adjusted_D).tolist()
        rows, lengths = row_D[places].tolist(), self.length_R[row_D[places]].tolist()
        found = [(at, self.adjustment(row, length)) for at, row, length in zip(places, rows, lengths, strict=True)]
        return tuple((at, adjustment) for at, adjustment in found if adjustment is not None)

    def adjustment(self, row: int, length: int) -> Adjustment | None:
        """Return how the logits of the token after the first ``length`` tokens of a row change; None if they do not."""
        sequence = self.sequence_R[row]
        assert sequence is not None
        return sequence.adjustment(self.tokens_RN[row, : length - 1], length < int(self.min_length_R[row]))

    def published(self, row: int, end: int) -> None:
        """Note that pages of a row were published; the next one is full at ``end`` tokens."""
        self.publish_at_R[row] = end

    def publishable(self) -> list[int]:
        """Return the rows with a page that can be shared now."""
        return np.flatnonzero(np.minimum(self.known_R, self.computed_R) >= self.publish_at_R).tolist()
