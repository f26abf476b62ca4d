"""The host side of one DP engine: its queue, its running sequences and their KV pages.

The engine thread calls ``add`` and ``cancel``, then ``schedule``, hands the plan to the devices, and calls ``commit``
with their results, perhaps after the next ``schedule``. Nothing here knows about devices, clocks or threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gimbal_jax.config import MAX_STOP_IDS, EngineConfig, QueueConfig
from gimbal_jax.scheduler.late import Capacity
from gimbal_jax.scheduler.queue import QueueItem, queue_key
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.engine.limits import check_limits, max_sequence_tokens
from gimbal_jax.serving.engine.pages import PageNews, PagePool
from gimbal_jax.serving.engine.plan import NOT_FINITE, ON_DEVICE, Chunk, DecodeRows, Plan, StepResult, wanted_logprobs
from gimbal_jax.serving.engine.prefix import known_pages, looks_up, publish_pages
from gimbal_jax.serving.engine.queue import QueueHead, Waiting
from gimbal_jax.serving.engine.request import FinishReason, Request, RequestId, TokenDelta, TokenLogprobs
from gimbal_jax.serving.engine.rows import Rows
from gimbal_jax.serving.engine.sequence import NO_ROW, Sequence


class Owners(NamedTuple):
    """The stays that a plan's rows belonged to when it was scheduled (see ``Rows.owner_R``)."""

    owner_D: np.ndarray
    """int64, for each decode row."""
    owner_C: list[int]
    """For each prefill chunk."""


class Engine:
    """Queue, running sequences and pages of engine ``index``. Not thread-safe: the engine thread owns it.

    ``schedule`` takes for granted that its plan is carried out, so that the next one can follow before the results of
    the last are known. Every request ends: the first running sequence by ``age`` always gets its page, a preempted one
    keeps its output, and one that is let in has the pages for its whole prefill and the token after it.
    """

    def __init__(self, index: int, config: EngineConfig, queue: QueueConfig) -> None:
        check_limits(config)
        self.index = index
        self.tokens_computed = 0
        """Tokens that went through the model since start, recomputed ones included."""
        self.prefill_tokens = 0
        """Those of them that were prefill."""
        self.preemptions = 0
        self.prefix_queries = 0
        """Prompt tokens that were looked up in the prefix cache when their sequence first got a row."""
        self.prefix_hits = 0
        """Those of them that it held."""
        self._config = config
        self._queue = queue
        self._pool = PagePool(config.num_pages)
        self._rows = Rows(config)
        self._waiting = Waiting(queue)
        self._running: dict[RequestId, Sequence] = {}
        self._constrained: dict[RequestId, Sequence] = {}
        """Those that run and have a grammar."""
        self._seen = 0

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def waiting(self) -> int:
        """Requests that wait, preempted ones included."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def free_pages(self) -> int:
        """Those that no sequence uses, what the prefix cache keeps in them included."""
        return self._pool.available

    @property
    def cached_pages(self) -> int:
        """Pages that hold a known beginning, in use or not."""
        return self._pool.named

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the next ``schedule`` would have to leave out a sequence whose grammar has to see its last token."""
        rows = self._rows
        return any(rows.known_R[one.row] < rows.length_R[one.row] for one in self._constrained.values())

    def add(self, request: Request, waited_tokens: int = 0) -> None:
        """Queue a request that waited ``waited_tokens`` elsewhere (see ``QueueItem``).

        How many may wait is the server's business: preempted ones must always fit.
        """
        prompt_tokens, limit, names = len(request.prompt), max_sequence_tokens(self._config), request.page_hashes
        assert 0 < prompt_tokens < limit and request.sampling.max_tokens > 0, "the frontend refuses such requests"
        assert len(request.sampling.stop_token_ids) <= MAX_STOP_IDS, "the frontend refuses such requests"
        assert request.id not in self._waiting and request.id not in self._running, "request ids are unique"
        assert len(names) in (0, prompt_tokens // self._config.page_size), "page_hashes are of all full pages, or none"
        joined = self.prefill_tokens - waited_tokens
        sequence = Sequence(request, joined, list(names) if self._config.prefix_cache else [])
        if request.grammar is not None:
            sequence.allowed = request.grammar.allowed()
        self._wait(sequence)
        self._seen = max(self._seen, request.sequence)

    def cancel(self, request_id: RequestId) -> bool:
        """Forget a request and free its pages; False if it is not here (any more)."""
        sequence = self._waiting.pop(request_id) or self._running.get(request_id)
        if sequence is None:
            return False
        if sequence.row != NO_ROW:
            self._leave(sequence)
        return True

    def fail_all(self, reason: str) -> list[TokenDelta]:
        """End every request with an error."""
        ids = [sequence.request.id for sequence in self._rows.running] + self._waiting.ids()
        return [self._fail(request_id, reason) for request_id in ids]

    def schedule(self, now: float) -> Plan:
        """Choose this step's work: a token for every sequence that decodes, then prefill in queue order.

        Takes the pages that the work needs, preempting where none is free: the youngest of the lowest priority first.
        Tokens that are not known yet are ON_DEVICE; not so where ``waits_for_tokens``.
        """
        preemptions = self.preemptions
        decode = self._schedule_decode()
        # Pages are short after a preemption: letting a sequence in would only cause the next one.
        admit = self.preemptions == preemptions
        prefill, tiles = self._schedule_prefill(now, len(decode), admit)
        return Plan(decode, prefill, tiles, wanted_logprobs(decode, prefill))

    def owners(self, plan: Plan) -> Owners:
        """Return whose the rows of a plan are; call it before the next request is cancelled or scheduled."""
        owner_R = self._rows.owner_R
        return Owners(owner_R[plan.decode.row_D], [int(owner_R[chunk.row]) for chunk in plan.prefill])

    def commit(self, plan: Plan, owners: Owners, result: StepResult) -> list[TokenDelta]:
        """Process the results of a plan, in the order of ``schedule``; ended sequences free their pages.

        Plans without tokens may be skipped. Results for rows that changed their owner since ``schedule`` are ignored:
        the request was cancelled, has ended, or was preempted and will choose the same token again.
        """
        if not plan.tokens:
            return []
        self.tokens_computed += plan.tokens
        self.prefill_tokens += plan.tokens - len(plan.decode)
        outputs = self._commit_decode(plan.decode, owners.owner_D, result)
        rows = self._rows
        for chunk, owner, token in zip(plan.prefill, owners.owner_C, result.token_C.tolist(), strict=True):
            sequence = rows.sequence_R[chunk.row]
            if sequence is None or rows.owner_R[chunk.row] != owner:
                continue
            output = self._commit_chunk(sequence, chunk, token, result)
            if output is not None:
                outputs.append(output)
        for row in rows.publishable():
            self._publish(row)
        return outputs

    def capacity(self) -> Capacity:
        """What ``schedule`` could let in now beside what it has, if nothing happens in between."""
        decoding_R = self._rows.decoding_R
        free_pages = self._pool.available - int((decoding_R & self._rows.lacking_R).sum())
        # A step that preempts lets nothing in, and who was preempted comes first.
        closed = free_pages < 0 or self._waiting
        return Capacity(
            decode_rows=int(decoding_R.sum()),
            free_rows=0 if closed else self._rows.free,
            free_pages=max(0, free_pages),
            prefills=tuple(self._queue_item(sequence) for sequence in self._rows.prefilling),
        )

    def cached_tokens(self, request: Request) -> int:
        """Tokens of its beginning that the prefix cache holds and it need not compute, in whole pages."""
        return self._config.page_size * len(self._known_pages(request, request.page_hashes, len(request.prompt)))

    def kept_pages(self, request: Request) -> int:
        """Pages of ``cached_tokens`` that no sequence uses, so that ``free_pages`` counts them."""
        return self._pool.unused(self._known_pages(request, request.page_hashes, len(request.prompt)))

    def trace(self, now: float, expert_pressure: float) -> Trace:
        """What the dispatcher gets to know about this engine (paper 4.1)."""
        rows = self._rows
        return Trace(
            engine=self.index,
            time=now,
            seen=self._seen,
            running_prefill_tokens=int(np.maximum(rows.prefill_end_R - rows.computed_R, 0).sum()),
            waiting_prefill_tokens=self._waiting.prefill_tokens,
            kv_use=1 - self._pool.available / self._config.num_pages,
            expert_pressure=expert_pressure,
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            kv_tokens=int(rows.computed_R.sum()),
            waiting_tokens=self._waiting.tokens,
        )

    def queue_head(self, now: float) -> QueueHead | None:
        """The waiting request that would run first."""
        for first in self._waiting.first(1, self.prefill_tokens, now):
            return QueueHead(first.request.label, now - first.request.arrival, first.length - first.cached)
        return None

    def flush_cache(self) -> None:
        """Keep no page that no sequence uses."""
        self._pool.flush()

    def take_news(self) -> PageNews | None:
        """What changed in the prefix cache since the last call; None if nothing did."""
        return self._pool.take_news(self.index)

    def _schedule_decode(self) -> DecodeRows:
        rows = self._rows
        row_D = rows.row_A[rows.decoding_R[rows.row_A]]
        lacking_D = row_D[rows.lacking_R[row_D]]
        if len(lacking_D) <= self._pool.available:
            if len(lacking_D):
                rows.add_page_each(lacking_D, self._pool.allocate(len(lacking_D)) or [])
        else:
            for row in lacking_D.tolist():  # oldest first
                sequence = rows.sequence_R[row]
                if sequence is not None:  # not preempted meanwhile
                    self._take_page(sequence)
            row_D = row_D[rows.owner_R[row_D] != 0]
        decode = rows.decode(row_D)
        for row in rows.publishable():
            self._publish(row)
        end_D = decode.start_D + 1
        adjusted_D = rows.adjusts_R[row_D] | (end_D < rows.min_length_R[row_D])
        if adjusted_D.any():
            adjustments = []
            for at in np.flatnonzero(adjusted_D).tolist():
                row, end = int(row_D[at]), int(end_D[at])
                sequence = rows.sequence_R[row]
                assert sequence is not None
                before, too_short = rows.tokens_RN[row, : end - 1], end < int(rows.min_length_R[row])
                adjustment = sequence.adjustment(before, too_short)
                if adjustment is not None:
                    adjustments.append((at, adjustment))
            decode = replace(decode, adjustments=tuple(adjustments))
        return decode

    def _schedule_prefill(self, now: float, decode_rows: int, admit: bool) -> tuple[tuple[Chunk, ...], int]:
        """The prefill chunks and the tiles that they take."""
        tile = self._config.tile
        tokens_left = self._config.token_budget - decode_rows
        tiles_left = all_tiles = self._config.token_budget // tile
        candidates = [(queue_key(self._queue, self._queue_item(one), now), one) for one in self._rows.prefilling]
        if admit and self._waiting and self._rows.free:
            # Each takes a row and a tile, so that no more of them can start.
            most = min(self._rows.free, tiles_left)
            candidates += [(one.key, one) for one in self._waiting.first(most, self.prefill_tokens, now)]
        candidates.sort(key=lambda candidate: candidate[0])
        chunks = []
        for _, sequence in candidates:
            if tokens_left == 0 or tiles_left == 0:
                break
            if sequence.row == NO_ROW:
                # Nothing overtakes the first one that does not fit, so that a long prompt is not starved.
                admit = admit and self._admit(sequence, now)
                if not admit:
                    continue
            chunk = self._chunk(sequence, min(tokens_left, tiles_left * tile))
            chunks.append(chunk)
            tokens_left -= len(chunk.tokens)
            tiles_left -= -(-len(chunk.tokens) // tile)
        return tuple(chunks), all_tiles - tiles_left

    def _chunk(self, sequence: Sequence, most: int) -> Chunk:
        """The next tokens of a prefill; the next token is chosen if they are its last ones."""
        rows, row, request = self._rows, sequence.row, sequence.request
        start, length = int(rows.computed_R[row]), int(rows.length_R[row])
        end = min(start + most, length)
        chunk = Chunk(row, rows.tokens_RN[row, start:end].copy(), start, rows.pages(row).copy(), sampling=None)
        wanted, prompt_tokens = request.sampling.prompt_logprobs, len(request.prompt)
        if wanted is not None and start + 1 < prompt_tokens == length:
            chunk.targets = rows.tokens_RN[row, start + 1 : min(end + 1, prompt_tokens)].copy()
            chunk.target_logprobs = wanted
        rows.computed_R[row] = end
        if end == length:
            chunk.sampling = request.sampling
            too_short = end < int(rows.min_length_R[row])
            if sequence.adjusts or too_short:
                chunk.adjustment = sequence.adjustment(rows.tokens_RN[row, : end - 1], too_short)
            rows.last_R[row] = ON_DEVICE
            rows.length_R[row] = end + 1
        if end >= rows.publish_at_R[row]:
            self._publish(row)
        return chunk

    def _queue_item(self, sequence: Sequence) -> QueueItem:
        """Of one that runs."""
        request, rows, row = sequence.request, self._rows, sequence.row
        prefill_left = int(rows.prefill_end_R[row] - rows.computed_R[row])
        return QueueItem(request.arrival, prefill_left, self.prefill_tokens - sequence.joined, request.priority)

    def _known_pages(self, request: Request, names: list[bytes] | tuple[bytes, ...], length: int) -> list[int]:
        return known_pages(self._pool, request, names, length, self._config.page_size) if names else []

    def _wait(self, sequence: Sequence) -> None:
        known = self._known_pages(sequence.request, sequence.page_names, sequence.length)
        sequence.cached = self._config.page_size * len(known)
        self._waiting.add(sequence)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Start a waiting sequence if a row, and pages for its whole prefill and one more token, are free."""
        request, length = sequence.request, sequence.length
        if not self._rows.free:
            return False
        known = self._known_pages(request, sequence.page_names, length)
        missing = self._pages_for(length + 1) - len(known)
        if missing > self._pool.available - self._pool.unused(known):
            return False
        self._pool.take(known)
        pages = known + (self._pool.allocate(missing) or [])
        computed = self._config.page_size * len(known)
        if sequence.started is None:
            sequence.started, sequence.found = now, computed
            if sequence.page_names and looks_up(request):
                self.prefix_queries += length
                self.prefix_hits += computed
        self._waiting.pop(request.id)
        limit = min(max_sequence_tokens(self._config), len(request.prompt) + request.sampling.max_tokens)
        self._rows.enter(sequence, pages, computed, limit)
        self._running[request.id] = sequence
        if request.grammar is not None:
            self._constrained[request.id] = sequence
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Take its row and its pages from a sequence that runs."""
        del self._running[sequence.request.id]
        self._constrained.pop(sequence.request.id, None)
        self._pool.release(self._rows.leave(sequence))

    def _take_page(self, sequence: Sequence) -> None:
        """Get a decoding sequence its next page, from the youngest if none is free; that may be itself."""
        while (pages := self._pool.allocate(1)) is None:
            youngest = self._rows.youngest
            self._preempt(youngest)
            if youngest is sequence:
                return
        self._rows.add_pages(sequence.row, pages)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its prompt and output, as far as it is known, are computed again later."""
        self._leave(sequence)
        self._wait(sequence)
        self.preemptions += 1

    def _publish(self, row: int) -> None:
        publish_pages(self._pool, self._rows, row, self._config.page_size)

    def _commit_decode(self, decode: DecodeRows, owner_D: np.ndarray, result: StepResult) -> list[TokenDelta]:
        rows = self._rows
        row_D, at_D, token_D = decode.row_D, decode.start_D + 1, result.token_D
        own_D = rows.owner_R[row_D] == owner_D
        if not own_D.all():
            row_D, at_D, token_D = row_D[own_D], at_D[own_D], token_D[own_D]
        rows.learn(row_D, at_D, token_D)
        ends_D = (
            (rows.stop_RK[row_D] == token_D[:, None]).any(axis=1)
            | (at_D + 1 == rows.limit_R[row_D])
            | (token_D == NOT_FINITE)
        )
        special = np.flatnonzero(ends_D | rows.reports_R[row_D]).tolist()
        ids, row_list, token_list = rows.request_id_R, row_D.tolist(), token_D.tolist()
        outputs = [TokenDelta(ids[row], (token,)) for row, token in zip(row_list, token_list, strict=True)]
        for place in special:
            row, token = row_list[place], token_list[place]
            sequence = rows.sequence_R[row]
            assert sequence is not None
            outputs[place] = self._append(sequence, int(at_D[place]), token, result.logprobs.get(row))
        return outputs

    def _commit_chunk(self, sequence: Sequence, chunk: Chunk, token: int, result: StepResult) -> TokenDelta | None:
        """What a step gave for a prefill chunk; None if there is nothing to tell yet."""
        if token == NOT_FINITE:
            return self._not_finite(sequence)
        if chunk.targets is not None:
            # Recomputed tokens bring those again that are known.
            found = result.prompt_logprobs[chunk.row]
            sequence.prompt_logprobs += found[len(sequence.prompt_logprobs) - chunk.start :]
        if chunk.sampling is None:
            return None
        at = chunk.start + len(chunk.tokens)
        self._rows.learn(np.array([chunk.row]), np.array([at]), np.array([token]))
        output = self._append(sequence, at, token, result.logprobs.get(chunk.row))
        if at == len(sequence.request.prompt):
            output.started, output.cached_tokens = sequence.started, sequence.found
            output.prompt_logprobs = tuple(sequence.prompt_logprobs)
        return output

    def _append(self, sequence: Sequence, at: int, token_id: int, logprobs: TokenLogprobs | None) -> TokenDelta:
        """The news of a token that was chosen for place ``at``; ends the sequence if that was the last one."""
        request, row = sequence.request, sequence.row
        if token_id == NOT_FINITE:
            return self._not_finite(sequence)
        # Before min_tokens stop tokens are suppressed, unless the vocabulary has no other.
        if token_id in request.sampling.stop_token_ids and at >= self._rows.min_length_R[row]:
            self.cancel(request.id)
            return TokenDelta(request.id, (), finish_reason="stop", stop=token_id)
        finish: FinishReason | None = None
        if at + 1 == self._rows.limit_R[row]:
            self.cancel(request.id)
            finish = "length"
        elif request.grammar is not None:
            try:
                request.grammar.accept(token_id)
                sequence.allowed = request.grammar.allowed()
            except Exception as error:  # one request's grammar must not end the others
                return self._fail(request.id, f"its grammar failed: {error}")
        return TokenDelta(request.id, (token_id,), () if logprobs is None else (logprobs,), finish)

    def _not_finite(self, sequence: Sequence) -> TokenDelta:
        self._pool.forget(self._rows.pages(sequence.row).tolist())
        return self._fail(sequence.request.id, "its logits are not finite")

    def _fail(self, request_id: RequestId, reason: str) -> TokenDelta:
        self.cancel(request_id)
        return TokenDelta(request_id, (), finish_reason="error", error=reason)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._config.page_size)
