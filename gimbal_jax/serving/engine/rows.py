"""The sequences that an engine runs, as arrays by row, so that a step costs no Python object per sequence."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from gimbal_jax.config import MAX_STOP_IDS, EngineConfig
from gimbal_jax.serving.engine.plan import ON_DEVICE, SAMPLING_COLUMNS, DecodeRows, pack_sampling
from gimbal_jax.serving.engine.request import RequestId
from gimbal_jax.serving.engine.sequence import NO_ROW, Sequence

NEVER = np.iinfo(np.int32).max
NO_TOKEN = -2
"""Unlike any token, ON_DEVICE and NOT_FINITE."""


class Rows:
    """State by row R. ``tokens_RN[r, :known_R[r]]`` are a sequence's prompt and output, as far as the host knows them.

    A row that no sequence has holds zeros and is no one's.
    """

    def __init__(self, config: EngineConfig) -> None:
        rows, self._page_size = config.max_rows, config.page_size
        self.sequence_R: list[Sequence | None] = [None] * rows
        self.request_id_R: list[RequestId] = [""] * rows
        self.owner_R = np.zeros(rows, np.int64)
        """A number of its own for each stay of a sequence in a row; 0 is no one's."""
        self.tokens_RN = np.zeros((rows, config.max_model_len), np.int32)
        self.page_table_RM = np.zeros((rows, config.pages_per_row), np.int32)
        self.num_pages_R = np.zeros(rows, np.int32)
        self.computed_R = np.zeros(rows, np.int32)
        """Tokens whose keys and values are in the pages when all steps scheduled so far are done."""
        self.known_R = np.zeros(rows, np.int32)
        self.length_R = np.zeros(rows, np.int32)
        """Its tokens, those included that are still to be known."""
        self.last_R = np.zeros(rows, np.int32)
        """Once it decodes: its last token, or ON_DEVICE. Apart from the others, which lie far from one another."""
        self.prefill_end_R = np.zeros(rows, np.int32)
        """Tokens to compute before it decodes: its length when it last joined the queue."""
        self.limit_R = np.zeros(rows, np.int32)
        """Most tokens that it may have."""
        self.min_length_R = np.zeros(rows, np.int32)
        """Stop tokens do not end it before; 0 without any."""
        self.publish_at_R = np.full(rows, NEVER, np.int32)
        """When so many tokens are known and computed, its next page can be shared."""
        self.stop_RK = np.full((rows, MAX_STOP_IDS), NO_TOKEN, np.int32)
        self.adjusts_R = np.zeros(rows, bool)
        """Something but ``min_tokens`` changes its logits."""
        self.reports_R = np.zeros(rows, bool)
        """Its tokens are news to more than its client: to a grammar, or they come with log probabilities."""
        self._sampling_RX = np.zeros((rows, SAMPLING_COLUMNS), np.int32)
        self._free = list(range(rows - 1, -1, -1))
        self._stays = 0
        self._by_age: list[Sequence] = []
        self._row_A: np.ndarray | None = None

    def __len__(self) -> int:
        """Rows that a sequence has."""
        return len(self._by_age)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def youngest(self) -> Sequence:
        return self._by_age[-1]

    @property
    def row_A(self) -> np.ndarray:
        """The rows of the sequences that run, by rising age."""
        if self._row_A is None:  # that has changed
            self._row_A = np.array([sequence.row for sequence in self._by_age], np.intp)
        return self._row_A

    @property
    def prefilling(self) -> list[Sequence]:
        """Those that have prefill left, by rising age."""
        prefilling_R = self.computed_R < self.prefill_end_R
        return [one for one in self._by_age if prefilling_R[one.row]] if prefilling_R.any() else []

    @property
    def running(self) -> tuple[Sequence, ...]:
        """By rising age."""
        return tuple(self._by_age)

    @property
    def decoding_R(self) -> np.ndarray:
        """Rows that want their next token: prefill is over, and their last possible token is not on the way."""
        return (self.computed_R >= self.prefill_end_R) & (self.length_R < self.limit_R)

    @property
    def lacking_R(self) -> np.ndarray:
        """Rows whose next token needs one page more, if they decode."""
        return self.length_R > self.num_pages_R * self._page_size

    def enter(self, sequence: Sequence, pages: list[int], computed: int, limit: int) -> None:
        """Give a sequence a free row. Its first ``computed`` tokens are in the pages already."""
        row = sequence.row = self._free.pop()
        insort(self._by_age, sequence, key=_age)
        self._row_A = None
        request, sampling, length = sequence.request, sequence.request.sampling, sequence.length
        self._stays += 1
        self.sequence_R[row], self.request_id_R[row], self.owner_R[row] = sequence, request.id, self._stays
        prompt_tokens = len(request.prompt)
        self.tokens_RN[row, :prompt_tokens] = request.prompt
        self.tokens_RN[row, prompt_tokens:length] = sequence.output
        self.add_pages(row, pages)
        self.computed_R[row] = computed
        self.known_R[row] = self.length_R[row] = self.prefill_end_R[row] = length
        self.limit_R[row] = limit
        stops = sampling.stop_token_ids
        self.min_length_R[row] = prompt_tokens + sampling.min_tokens if stops else 0
        self.stop_RK[row] = NO_TOKEN
        self.stop_RK[row, : len(stops)] = stops
        self.publish_at_R[row] = computed + self._page_size if sequence.page_names else NEVER
        self.adjusts_R[row] = sequence.adjusts
        self.reports_R[row] = request.grammar is not None or sampling.logprobs is not None
        self._sampling_RX[row] = pack_sampling(sampling)

    def leave(self, sequence: Sequence) -> list[int]:
        """Take its row from a sequence, and the tokens that the host knows into ``sequence.output``; its pages."""
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
        return self.page_table_RM[row, : self.num_pages_R[row]]

    def add_pages(self, row: int, pages: list[int]) -> None:
        owned = self.num_pages_R[row]
        self.page_table_RM[row, owned : owned + len(pages)] = pages
        self.num_pages_R[row] += len(pages)

    def add_page_each(self, row_D: np.ndarray, pages: list[int]) -> None:
        """One page more for each of these rows."""
        self.page_table_RM[row_D, self.num_pages_R[row_D]] = pages
        self.num_pages_R[row_D] += 1

    def decode(self, row_D: np.ndarray) -> DecodeRows:
        """Compute the last token of these rows, and choose the next one; without adjustments."""
        start_D = self.computed_R[row_D]
        widest = int(self.num_pages_R[row_D].max(initial=0))
        rows = DecodeRows(
            row_D=row_D.astype(np.int32),
            token_D=self.last_R[row_D],
            start_D=start_D,
            page_table_DM=self.page_table_RM[:, :widest][row_D],
            sampling_DX=self._sampling_RX[row_D],
        )
        self.computed_R[row_D] = self.length_R[row_D]
        self.last_R[row_D] = ON_DEVICE
        self.length_R[row_D] += 1
        return rows

    def learn(self, row_D: np.ndarray, at_D: np.ndarray, token_D: np.ndarray) -> None:
        """The tokens that were chosen for these places."""
        self.tokens_RN[row_D, at_D] = token_D
        self.known_R[row_D] = end_D = at_D + 1
        self.last_R[row_D] = np.where(end_D == self.length_R[row_D], token_D, ON_DEVICE)

    def publishable(self) -> list[int]:
        """Rows with a page that can be shared now."""
        return np.flatnonzero(np.minimum(self.known_R, self.computed_R) >= self.publish_at_R).tolist()


def _age(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.age
