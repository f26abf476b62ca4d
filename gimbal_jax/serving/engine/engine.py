"""The host side of one data-parallel engine: its wait queue, its running sequences and their KV pages.

The engine thread calls ``add`` and ``cancel``, then ``schedule``, hands the plan to the devices, and calls ``commit``
with the results, possibly after the next ``schedule``. The engine knows nothing of devices, clocks and threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gimbal_jax.config import MAX_STOP_IDS, EngineConfig, QueueConfig
from gimbal_jax.scheduler.late import Capacity
from gimbal_jax.scheduler.queue import QueueItem, queue_key
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.engine.limits import check_limits, max_sequence_tokens
from gimbal_jax.serving.engine.pages import CacheEvents, PagePool
from gimbal_jax.serving.engine.plan import NOT_FINITE, Chunk, DecodeRows, Plan, StepResult, wanted_logprobs
from gimbal_jax.serving.engine.prefix import known_pages, looks_up, publish_pages
from gimbal_jax.serving.engine.queue import QueueHead, WaitQueue
from gimbal_jax.serving.engine.request import FinishReason, Request, TokenDelta, TokenLogprobs
from gimbal_jax.serving.engine.running_batch import RunningBatch
from gimbal_jax.serving.engine.sequence import NO_ROW, Sequence


class Owners(NamedTuple):
    """The stays that a plan's rows belonged to when it was scheduled (see ``RunningBatch.owner_R``)."""

    owner_D: np.ndarray
    """int64 stay of each decode row."""
    owner_C: list[int]
    """Stay of each prefill chunk's row."""


class Engine:
    """Wait queue, running sequences and pages of engine ``index``. Not thread-safe; the engine thread owns it.

    ``schedule`` assumes that its plan will be carried out, so the next plan can follow before the results of the last
    are known. Every request ends, for three reasons. The first running sequence by ``age`` always gets its page. A
    preempted sequence keeps its output. An admitted sequence has the pages of its whole prefill and of one more token.

    ``tokens_computed``: tokens that went through the model since start, recomputed ones included.
    ``prefill_tokens``: prefill tokens among them.
    ``preemptions``: sequences that lost their row for lack of pages.
    ``prefix_queries``: prompt tokens that were looked up in the prefix cache when their sequence first got a row.
    ``prefix_hits``: tokens among them that it held.
    """

    def __init__(self, index: int, config: EngineConfig, queue: QueueConfig) -> None:
        check_limits(config)
        self.index = index
        self.tokens_computed = 0
        self.prefill_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._config = config
        self._queue_config = queue
        self._pool = PagePool(config.num_pages)
        self._batch = RunningBatch(config)
        self._waiting = WaitQueue(queue)
        self._running: dict[str, Sequence] = {}
        self._constrained: dict[str, Sequence] = {}  # running sequences that have a grammar
        self._seen = 0

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
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
        """Pages that no sequence uses. Pages that only the prefix cache keeps are among them."""
        return self._pool.available

    @property
    def cached_pages(self) -> int:
        """Pages that hold a known prefix, in use or not."""
        return self._pool.named

    @property
    def waits_for_tokens(self) -> bool:
        """Whether ``schedule`` would have to leave out a sequence because its grammar has not seen its last token."""
        return any(self._batch.waits_for_token(sequence.row) for sequence in self._constrained.values())

    def add(self, request: Request, waited_tokens: int = 0) -> None:
        """Queue a request. ``waited_tokens``: prefill tokens that were processed while it waited elsewhere.

        The core limits how many requests may wait; the engine accepts all, because preempted requests must fit.
        """
        prompt_tokens, limit, names = len(request.prompt), max_sequence_tokens(self._config), request.page_hashes
        assert 0 < prompt_tokens < limit and request.sampling.max_tokens > 0, "the frontend rejects such requests"
        assert len(request.sampling.stop_token_ids) <= MAX_STOP_IDS, "the frontend rejects such requests"
        assert request.id not in self._waiting and request.id not in self._running, "request ids are unique"
        assert len(names) in (0, prompt_tokens // self._config.page_size), "page_hashes are of all full pages, or none"
        joined = self.prefill_tokens - waited_tokens
        sequence = Sequence(request, joined, list(names) if self._config.prefix_cache else [])
        if request.grammar is not None:
            sequence.allowed = request.grammar.allowed()
        self._enqueue(sequence)
        self._seen = max(self._seen, request.sequence)

    def cancel(self, request_id: str) -> bool:
        """Remove a request and free its pages. Returns False if the request is not here, or no longer."""
        sequence = self._waiting.pop(request_id) or self._running.get(request_id)
        if sequence is None:
            return False
        if sequence.row != NO_ROW:
            self._leave(sequence)
        return True

    def fail_all(self, reason: str) -> list[TokenDelta]:
        """End every request with an error."""
        ids = [sequence.request.id for sequence in self._batch.running] + self._waiting.ids()
        return [self._fail(request_id, reason) for request_id in ids]

    def schedule(self, now: float) -> Plan:
        """Choose the work of a step: one token for every sequence that decodes, then prefill in queue order.

        Takes the pages that the work needs. If none is free, it preempts the youngest sequence of the lowest priority.
        Tokens that the host does not know yet are ON_DEVICE; call it only when ``waits_for_tokens`` is false.
        """
        preemptions = self.preemptions
        decode = self._schedule_decode()
        # A preemption means that pages are short. Admitting a sequence would only cause the next preemption.
        admit = self.preemptions == preemptions
        prefill, tiles = self._schedule_prefill(now, len(decode), admit)
        return Plan(decode, prefill, tiles, wanted_logprobs(decode, prefill))

    def owners(self, plan: Plan) -> Owners:
        """Return the owners of a plan's rows. Call it before the next call of ``cancel`` or ``schedule``."""
        owner_R = self._batch.owner_R
        return Owners(owner_R[plan.decode.row_D], [int(owner_R[chunk.row]) for chunk in plan.prefill])

    def commit(self, plan: Plan, owners: Owners, result: StepResult) -> list[TokenDelta]:
        """Process the results of a plan, in the order of ``schedule``. Sequences that end free their pages.

        Plans without tokens may be skipped. Results are ignored for rows whose owner has changed since ``schedule``:
        the request was cancelled, has ended, or was preempted and will choose the same token again.
        """
        if not plan.tokens:
            return []
        self.tokens_computed += plan.tokens
        self.prefill_tokens += plan.tokens - len(plan.decode)
        outputs = self._commit_decode(plan.decode, owners.owner_D, result)
        batch = self._batch
        for chunk, owner, token in zip(plan.prefill, owners.owner_C, result.token_C.tolist(), strict=True):
            sequence = batch.sequence_R[chunk.row]
            if sequence is None or batch.owner_R[chunk.row] != owner:
                continue
            output = self._commit_chunk(sequence, chunk, token, result)
            if output is not None:
                outputs.append(output)
        self._publish_rows(batch.publishable())
        return outputs

    def capacity(self) -> Capacity:
        """Return what ``schedule`` could admit now in addition to the requests that the engine has."""
        decoding_R = self._batch.decoding_R
        free_pages = self._pool.available - int((decoding_R & self._batch.lacking_R).sum())
        # A step that preempts admits no sequence, and waiting sequences come before new ones.
        closed = free_pages < 0 or self._waiting
        return Capacity(
            decode_rows=int(decoding_R.sum()),
            free_rows=0 if closed else self._batch.free,
            free_pages=max(0, free_pages),
            prefills=tuple(self._queue_item(sequence) for sequence in self._batch.prefilling),
        )

    def cached_tokens(self, request: Request) -> int:
        """Return the tokens of a request's prefix that the cache holds and that need no computing, in whole pages."""
        return self._config.page_size * len(self._known_pages(request, request.page_hashes, len(request.prompt)))

    def kept_pages(self, request: Request) -> int:
        """Return how many pages of ``cached_tokens`` no sequence uses, so that ``free_pages`` counts them."""
        return self._pool.unused(self._known_pages(request, request.page_hashes, len(request.prompt)))

    def trace(self, now: float, expert_pressure: float) -> Trace:
        """Return what the dispatcher learns of this engine (paper 4.1)."""
        return Trace(
            engine=self.index,
            time=now,
            seen=self._seen,
            running_prefill_tokens=self._batch.prefill_tokens,
            waiting_prefill_tokens=self._waiting.prefill_tokens,
            kv_use=1 - self._pool.available / self._config.num_pages,
            expert_pressure=expert_pressure,
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            kv_tokens=self._batch.kv_tokens,
            waiting_tokens=self._waiting.tokens,
        )

    def queue_head(self, now: float) -> QueueHead | None:
        """Return the waiting request that would run first; None if none waits."""
        for first in self._waiting.first(1, self.prefill_tokens, now):
            return QueueHead(first.request.label, now - first.request.arrival, first.length - first.cached)
        return None

    def flush_cache(self) -> None:
        """Evict all cached pages that no sequence uses."""
        self._pool.flush()

    def drain_cache_events(self) -> CacheEvents | None:
        """Return what changed in the prefix cache since the last call; None if nothing did."""
        return self._pool.drain_cache_events(self.index)

    def _schedule_decode(self) -> DecodeRows:
        row_D = self._take_pages(self._batch.decoding_D)
        decode = self._batch.decode(row_D, self._batch.adjustments(row_D))
        self._publish_rows(self._batch.publishable())
        return decode

    def _take_pages(self, row_D: np.ndarray) -> np.ndarray:
        """Give these rows, oldest first, the page that their next token needs. Returns the rows not preempted."""
        batch = self._batch
        lacking_D = row_D[batch.lacking_R[row_D]]
        if len(lacking_D) <= self._pool.available:
            if len(lacking_D):
                batch.add_page_each(lacking_D, self._pool.allocate(len(lacking_D)) or [])
            return row_D
        # Pages are short: one row after the other takes its page from the youngest sequence.
        for row in lacking_D.tolist():
            sequence = batch.sequence_R[row]
            if sequence is not None:  # not preempted meanwhile
                self._take_page(sequence)
        return row_D[batch.owner_R[row_D] != 0]

    def _take_page(self, sequence: Sequence) -> None:
        """Give a decoding sequence its next page, from the youngest if none is free; that may be itself."""
        while (pages := self._pool.allocate(1)) is None:
            youngest = self._batch.youngest
            self._preempt(youngest)
            if youngest is sequence:
                return
        self._batch.add_pages(sequence.row, pages)

    def _schedule_prefill(self, now: float, decode_rows: int, admit: bool) -> tuple[tuple[Chunk, ...], int]:
        """Return the prefill chunks of a step and the tiles that they take."""
        tile = self._config.tile
        tokens_left = self._config.token_budget - decode_rows
        tiles_left = all_tiles = self._config.token_budget // tile

        # Started prefills and waiting sequences compete in one order.
        candidates = [
            (queue_key(self._queue_config, self._queue_item(sequence), now), sequence)
            for sequence in self._batch.prefilling
        ]
        if admit and self._waiting and self._batch.free:
            # Each admitted sequence takes a row and a tile, so no more than this can start.
            most = min(self._batch.free, tiles_left)
            candidates += [(one.key, one) for one in self._waiting.first(most, self.prefill_tokens, now)]
        candidates.sort(key=lambda candidate: candidate[0])

        # Fill the step in that order.
        chunks = []
        for _, sequence in candidates:
            if tokens_left == 0 or tiles_left == 0:
                break
            if sequence.row == NO_ROW:
                # Nothing overtakes the first sequence that does not fit, so that a long prompt does not starve.
                admit = admit and self._admit(sequence, now)
                if not admit:
                    continue
            chunk = self._next_chunk(sequence.row, min(tokens_left, tiles_left * tile))
            chunks.append(chunk)
            tokens_left -= len(chunk.tokens)
            tiles_left -= -(-len(chunk.tokens) // tile)
        return tuple(chunks), all_tiles - tiles_left

    def _next_chunk(self, row: int, most: int) -> Chunk:
        batch = self._batch
        chunk = batch.next_chunk(row, most)
        end = chunk.start + len(chunk.tokens)
        if chunk.sampling is not None:
            chunk.adjustment = batch.adjustment(row, end)
        # Publish before the next chunk is made: sequences of one step share pages.
        if end >= batch.publish_at_R[row]:
            self._publish_rows([row])
        return chunk

    def _queue_item(self, sequence: Sequence) -> QueueItem:
        """Return what the order of the queue depends on, for a running sequence."""
        return sequence.queue_item(self._batch.prefill_left(sequence.row), self.prefill_tokens)

    def _known_pages(self, request: Request, names: list[bytes] | tuple[bytes, ...], length: int) -> list[int]:
        return known_pages(self._pool, request, names, length, self._config.page_size) if names else []

    def _enqueue(self, sequence: Sequence) -> None:
        known = self._known_pages(sequence.request, sequence.page_names, sequence.length)
        sequence.cached = self._config.page_size * len(known)
        self._waiting.add(sequence)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Start a waiting sequence if a row is free, and pages for its whole prefill and one more token."""
        request, length = sequence.request, sequence.length
        if not self._batch.free:
            return False
        known = self._known_pages(request, sequence.page_names, length)
        missing = -(-(length + 1) // self._config.page_size) - len(known)
        if missing > self._pool.available - self._pool.unused(known):
            return False
        self._pool.take(known)
        pages = known + (self._pool.allocate(missing) or [])
        computed = self._config.page_size * len(known)

        # The stream reports its first start and the cached tokens found there.
        if sequence.started is None:
            sequence.started, sequence.found = now, computed
            if sequence.page_names and looks_up(request):
                self.prefix_queries += length
                self.prefix_hits += computed

        # Move it from the queue to the batch.
        self._waiting.pop(request.id)
        limit = min(max_sequence_tokens(self._config), len(request.prompt) + request.sampling.max_tokens)
        self._batch.enter(sequence, pages, computed, limit)
        self._running[request.id] = sequence
        if request.grammar is not None:
            self._constrained[request.id] = sequence
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Take the row and the pages from a running sequence."""
        del self._running[sequence.request.id]
        self._constrained.pop(sequence.request.id, None)
        self._pool.release(self._batch.leave(sequence))

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue. Its prompt and known output will be computed again."""
        self._leave(sequence)
        self._enqueue(sequence)
        self.preemptions += 1

    def _publish_rows(self, rows: list[int]) -> None:
        for row in rows:
            publish_pages(self._pool, self._batch, row, self._config.page_size)

    def _commit_decode(self, decode: DecodeRows, owner_D: np.ndarray, result: StepResult) -> list[TokenDelta]:
        # Keep the rows that still have their owner.
        batch = self._batch
        row_D, at_D, token_D = decode.row_D, decode.start_D + 1, result.token_D
        own_D = batch.owner_R[row_D] == owner_D
        if not own_D.all():
            row_D, at_D, token_D = row_D[own_D], at_D[own_D], token_D[own_D]
        batch.learn(row_D, at_D, token_D)

        # Most tokens only go to their client. Python looks at the others one by one.
        special = np.flatnonzero(batch.special_D(row_D, at_D, token_D)).tolist()
        ids, row_list, token_list = batch.request_id_R, row_D.tolist(), token_D.tolist()
        outputs = [TokenDelta(ids[row], (token,)) for row, token in zip(row_list, token_list, strict=True)]
        for place in special:
            row, token = row_list[place], token_list[place]
            sequence = batch.sequence_R[row]
            assert sequence is not None
            outputs[place] = self._append(sequence, int(at_D[place]), token, result.logprobs.get(row))
        return outputs

    def _commit_chunk(self, sequence: Sequence, chunk: Chunk, token: int, result: StepResult) -> TokenDelta | None:
        """Process the result of a prefill chunk. Returns None if there is nothing to report yet."""
        if token == NOT_FINITE:
            return self._not_finite(sequence)
        if chunk.targets is not None:
            # After a preemption, tokens are computed again whose log probabilities are known.
            found = result.prompt_logprobs[chunk.row]
            sequence.prompt_logprobs += found[len(sequence.prompt_logprobs) - chunk.start :]
        if chunk.sampling is None:
            return None
        at = chunk.start + len(chunk.tokens)
        self._batch.learn(np.array([chunk.row]), np.array([at]), np.array([token]))
        output = self._append(sequence, at, token, result.logprobs.get(chunk.row))
        if at == len(sequence.request.prompt):
            output.started, output.cached_tokens = sequence.started, sequence.found
            output.prompt_logprobs = tuple(sequence.prompt_logprobs)
        return output

    def _append(self, sequence: Sequence, at: int, token_id: int, logprobs: TokenLogprobs | None) -> TokenDelta:
        """Return the delta of a token that was chosen for position ``at``. Ends the sequence if it was the last one."""
        request, row = sequence.request, sequence.row
        if token_id == NOT_FINITE:
            return self._not_finite(sequence)
        # Stop tokens are suppressed before min_tokens, unless the vocabulary has no other tokens.
        if token_id in request.sampling.stop_token_ids and at >= self._batch.min_length_R[row]:
            self.cancel(request.id)
            return TokenDelta(request.id, (), finish_reason="stop", stop=token_id)
        finish: FinishReason | None = None
        if at + 1 == self._batch.limit_R[row]:
            self.cancel(request.id)
            finish = "length"
        elif request.grammar is not None:
            try:
                request.grammar.accept(token_id)
                sequence.allowed = request.grammar.allowed()
            except Exception as error:  # an error in one request's grammar must not end the others
                return self._fail(request.id, f"its grammar failed: {error}")
        return TokenDelta(request.id, (token_id,), () if logprobs is None else (logprobs,), finish)

    def _not_finite(self, sequence: Sequence) -> TokenDelta:
        self._pool.forget(self._batch.pages(sequence.row).tolist())
        return self._fail(sequence.request.id, "its logits are not finite")

    def _fail(self, request_id: str, reason: str) -> TokenDelta:
        self.cancel(request_id)
        return TokenDelta(request_id, (), finish_reason="error", error=reason)
