"""The host side of one DP engine: its queue, its running sequences and their KV pages.

The engine thread calls ``add`` and ``cancel``, then ``schedule``, the device step, and ``commit``.
Nothing here knows about devices, clocks or threads.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.scheduler.late import Room
from gimbal_jax.scheduler.queue import Job, key_until, queue_key
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.pages import PageAllocator
from gimbal_jax.serving.plan import Chunk, NextToken, Plan
from gimbal_jax.serving.request import FinishReason, Output, Request, TokenLogprobs
from gimbal_jax.serving.status import QueueHead


def max_sequence_tokens(config: EngineConfig) -> int:
    """Most tokens of one sequence, prompt and output together; a prompt must be shorter."""
    return min(config.max_model_len, config.num_pages * config.page_size)


def check_limits(config: EngineConfig) -> None:
    """ValueError if an engine with these limits could not make progress."""
    for name in ("max_model_len", "page_size", "num_pages", "max_rows", "token_budget", "tile", "max_queue"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)}")
    least = max(config.max_rows, config.tile)
    if config.token_budget < least:
        raise ValueError(f"token_budget must be at least max_rows and tile ({least}), not {config.token_budget}")


@dataclass(eq=False, slots=True)
class Sequence:
    """One request with its state. ``tokens[:length]`` is its prompt and output so far."""

    request: Request
    tokens: np.ndarray
    length: int
    prefill_end: int
    """Tokens to compute before it decodes: its length when it last joined the queue."""
    min_length: int
    """Stop tokens do not end it before."""
    pages: np.ndarray
    joined: int
    """Prefill tokens that its queue had processed when it joined; see ``Job.waited_tokens``."""
    num_pages: int = 0
    """``pages[:num_pages]`` are its own; the rest is room."""
    computed: int = 0
    """Tokens whose keys and values are in the pages."""
    key: tuple[float, ...] = ()
    key_until: float = -math.inf
    """While it waits: its sort key in the queue, and when that is no longer sure to hold."""
    started: float | None = None
    """When it first got a row."""
    allowed: np.ndarray | None = None
    """Tokens that its grammar allows next; None without one."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt tokens from the second on, as far as they are known."""

    @property
    def prefill_left(self) -> int:
        return max(0, self.prefill_end - self.computed)

    @property
    def age(self) -> tuple[int, float, int]:
        """Order of arrival among requests of one priority; what comes last is preempted first."""
        return self.request.priority, self.request.arrival, self.request.sequence


class Engine:
    """Queue, running sequences and pages of engine ``index``. Not thread-safe: the engine thread owns it.

    Every request ends: the first running sequence by ``age`` always gets its page, a preempted one keeps its output,
    and one that is let in has the pages for its whole prefill and the token after it.
    """

    def __init__(self, index: int, config: EngineConfig, queue: QueueConfig) -> None:
        check_limits(config)
        self.index = index
        self.tokens_computed = 0
        """Tokens that went through the model since start, recomputed ones included."""
        self.prefill_tokens = 0
        """Those of them that were prefill."""
        self.preemptions = 0
        self._config = config
        self._queue = queue
        self._pages = PageAllocator(config.num_pages)
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        """By rising age: decode goes through it once a step, and preempts from its end."""
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
        return self._pages.available

    def add(self, request: Request, waited_tokens: int = 0) -> None:
        """Queue a request that waited ``waited_tokens`` elsewhere (see ``Job``).

        How many may wait is the server's business: preempted ones must always fit.
        """
        prompt_tokens, limit = len(request.prompt), max_sequence_tokens(self._config)
        assert 0 < prompt_tokens < limit and request.sampling.max_tokens > 0, "the frontend refuses such requests"
        assert request.id not in self._waiting and request.id not in self._running, "request ids are unique"
        tokens = np.zeros(min(limit, prompt_tokens + request.sampling.max_tokens), np.int32)
        tokens[:prompt_tokens] = request.prompt
        pages = np.zeros(self._pages_for(len(tokens)), np.int32)
        joined = self.prefill_tokens - waited_tokens
        min_length = prompt_tokens + request.sampling.min_tokens
        sequence = Sequence(request, tokens, prompt_tokens, prompt_tokens, min_length, pages, joined)
        if request.grammar is not None:
            sequence.allowed = request.grammar.allowed()
        self._waiting[request.id] = sequence
        self._seen = max(self._seen, request.sequence)

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free its pages; False if it is not here (any more)."""
        sequence = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if sequence is None:
            return False
        self._free_pages_of(sequence)
        return True

    def fail_all(self, reason: str) -> list[Output]:
        """End every request with an error."""
        return [self._fail(request_id, reason) for request_id in [*self._running, *self._waiting]]

    def schedule(self, now: float) -> Plan:
        """Choose this step's work: a token for every sequence that decodes, then prefill in queue order.

        Takes the pages that the work needs, preempting where none is free: the youngest of the lowest priority first.
        """
        preemptions = self.preemptions
        decode = self._schedule_decode()
        # Pages are short after a preemption: letting a sequence in would only cause the next one.
        admit = self.preemptions == preemptions and len(self._running) < self._config.max_rows
        prefill, tiles = self._schedule_prefill(now, len(decode), admit)
        return Plan(decode, prefill, tiles)

    def room(self) -> Room:
        """What ``schedule`` could let in now beside what it has, if nothing happens in between."""
        page_size, prefills, free_pages = self._config.page_size, [], self._pages.available
        for sequence in self._running.values():
            if sequence.computed < sequence.prefill_end:
                prefills.append(self._job(sequence))
            elif sequence.length > sequence.num_pages * page_size:
                free_pages -= 1
        # A step that preempts lets nothing in, and who was preempted comes first.
        closed = free_pages < 0 or self._waiting
        return Room(
            decode_rows=len(self._running) - len(prefills),
            free_rows=0 if closed else self._config.max_rows - len(self._running),
            free_pages=max(0, free_pages),
            prefills=tuple(prefills),
        )

    def commit(self, plan: Plan, results: Iterable[NextToken | None]) -> list[Output]:
        """Take in what the step chose after each of ``plan.chunks``; ended sequences free their pages.

        A request that was cancelled since ``schedule`` is passed over.
        """
        self.tokens_computed += plan.tokens
        self.prefill_tokens += plan.tokens - len(plan.decode)
        outputs = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            sequence = self._running.get(chunk.request_id)
            if sequence is None:
                continue
            sequence.computed = chunk.start + len(chunk.tokens)
            if result is not None and (output := self._take(sequence, chunk, result)) is not None:
                outputs.append(output)
        return outputs

    def trace(self, now: float, expert_pressure: float) -> Trace:
        """What the dispatcher gets to know about this engine (paper 4.1)."""
        running_prefill_tokens = kv_tokens = waiting_prefill_tokens = waiting_tokens = 0
        for sequence in self._running.values():
            running_prefill_tokens += sequence.prefill_left
            kv_tokens += sequence.computed
        for sequence in self._waiting.values():
            waiting_prefill_tokens += sequence.prefill_end
            waiting_tokens += sequence.length
        return Trace(
            engine=self.index,
            time=now,
            seen=self._seen,
            running_prefill_tokens=running_prefill_tokens,
            waiting_prefill_tokens=waiting_prefill_tokens,
            kv_use=1 - self._pages.available / self._config.num_pages,
            expert_pressure=expert_pressure,
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            kv_tokens=kv_tokens,
            waiting_tokens=waiting_tokens,
        )

    def queue_head(self, now: float) -> QueueHead | None:
        """The waiting request that would run first."""
        first = min(self._waiting.values(), key=lambda sequence: self._waiting_key(sequence, now), default=None)
        if first is None:
            return None
        return QueueHead(first.request.id, now - first.request.arrival, first.prefill_left)

    def _schedule_decode(self) -> tuple[Chunk, ...]:
        page_size, chunks = self._config.page_size, []
        for sequence in list(self._running.values()):
            # Oldest first: a sequence preempted here has no row in this plan yet, and gets none, with prefill left.
            if sequence.computed < sequence.prefill_end:
                continue
            if sequence.length > sequence.num_pages * page_size and not self._take_page(sequence):
                continue
            chunks.append(_chunk(sequence, 1))
        return tuple(chunks)

    def _schedule_prefill(self, now: float, decode_rows: int, admit: bool) -> tuple[tuple[Chunk, ...], int]:
        """The prefill chunks and the tiles that they take."""
        tile = self._config.tile
        tokens_left = self._config.token_budget - decode_rows
        tiles_left = all_tiles = self._config.token_budget // tile
        running = [sequence for sequence in self._running.values() if sequence.computed < sequence.prefill_end]
        candidates = [(queue_key(self._queue, self._job(sequence), now), sequence) for sequence in running]
        if admit:
            # Each takes a row and a tile, so that no more of them can start.
            most = min(self._config.max_rows - len(self._running), tiles_left)
            waiting = heapq.nsmallest(
                most, self._waiting.values(), key=lambda sequence: self._waiting_key(sequence, now)
            )
            candidates += [(sequence.key, sequence) for sequence in waiting]
        candidates.sort(key=lambda candidate: candidate[0])
        chunks = []
        for _, sequence in candidates:
            count = min(sequence.prefill_left, tokens_left, tiles_left * tile)
            if count == 0:
                break
            if sequence.request.id in self._waiting:
                # Nothing overtakes the first one that does not fit, so that a long prompt is not starved.
                admit = admit and self._admit(sequence, now)
                if not admit:
                    continue
            chunks.append(_chunk(sequence, count))
            tokens_left -= count
            tiles_left -= -(-count // tile)
        return tuple(chunks), all_tiles - tiles_left

    def _waiting_key(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """Its sort key, worked out anew only where it may have changed: queues can be long."""
        if now >= sequence.key_until:
            job = self._job(sequence)
            sequence.key, sequence.key_until = queue_key(self._queue, job, now), key_until(self._queue, job, now)
        return sequence.key

    def _job(self, sequence: Sequence) -> Job:
        request, prefill_left = sequence.request, sequence.prefill_end - sequence.computed
        return Job(request.arrival, prefill_left, self.prefill_tokens - sequence.joined, request.priority)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Start a waiting sequence if a row, and pages for its whole prefill and one more token, are free."""
        if len(self._running) >= self._config.max_rows:
            return False
        if not self._take_pages(sequence, self._pages_for(sequence.length + 1)):
            return False
        del self._waiting[sequence.request.id]
        if sequence.started is None:
            sequence.started = now
        youngest = next(reversed(self._running.values()), sequence)
        self._running[sequence.request.id] = sequence
        if sequence.age < youngest.age:
            self._running = dict(sorted(self._running.items(), key=lambda item: item[1].age))
        return True

    def _take_page(self, sequence: Sequence) -> bool:
        """Get a decoding sequence its next page, from the youngest if none is free; False if it is that one itself."""
        while not self._take_pages(sequence, self._pages_for(sequence.length)):
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its prompt and output so far are computed again later."""
        del self._running[sequence.request.id]
        self._free_pages_of(sequence)
        sequence.computed = 0
        sequence.prefill_end = sequence.length
        sequence.key_until = -math.inf
        self._waiting[sequence.request.id] = sequence
        self.preemptions += 1

    def _take(self, sequence: Sequence, chunk: Chunk, result: NextToken) -> Output | None:
        """What a step gave for a chunk; None if there is nothing to tell yet."""
        if result.error:
            return self._fail(sequence.request.id, result.error)
        if result.prompt_logprobs:
            # Recomputed tokens bring those again that are known.
            sequence.prompt_logprobs += result.prompt_logprobs[len(sequence.prompt_logprobs) - chunk.start :]
        if result.token_id is None:
            return None
        is_first = sequence.length == len(sequence.request.prompt)
        output = self._append(sequence, result.token_id, result.logprobs)
        if is_first:
            output.started, output.prompt_logprobs = sequence.started, tuple(sequence.prompt_logprobs)
        return output

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> Output:
        """Add a chosen token to its sequence; end the sequence if that was the last one."""
        request, length = sequence.request, sequence.length
        # Before min_tokens stop tokens are suppressed, unless the vocabulary has no other.
        if token_id in request.sampling.stop_token_ids and length >= sequence.min_length:
            self.cancel(request.id)
            return Output(request.id, (), finish_reason="stop", stop_token_id=token_id)
        sequence.tokens[length] = token_id
        sequence.length = length + 1
        finish: FinishReason | None = None
        if length + 1 == len(sequence.tokens):
            self.cancel(request.id)
            finish = "length"
        elif request.grammar is not None:
            try:
                request.grammar.accept(token_id)
                sequence.allowed = request.grammar.allowed()
            except Exception as error:  # one request's grammar must not end the others
                return self._fail(request.id, f"its grammar failed: {error}")
        return Output(request.id, (token_id,), () if logprobs is None else (logprobs,), finish)

    def _fail(self, request_id: str, reason: str) -> Output:
        self.cancel(request_id)
        return Output(request_id, (), finish_reason="error", error=reason)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._config.page_size)

    def _take_pages(self, sequence: Sequence, total: int) -> bool:
        """Let a sequence own ``total`` pages (or the more that it has); False if too few are free."""
        missing = total - sequence.num_pages
        if missing > 0:
            pages = self._pages.allocate(missing)
            if pages is None:
                return False
            sequence.pages[sequence.num_pages : total] = pages
            sequence.num_pages = total
        return True

    def _free_pages_of(self, sequence: Sequence) -> None:
        self._pages.free(sequence.pages[: sequence.num_pages].tolist())
        sequence.num_pages = 0


def _chunk(sequence: Sequence, count: int) -> Chunk:
    """The next ``count`` tokens of a sequence; the next token is chosen if they are its last ones."""
    request, start, end = sequence.request, sequence.computed, sequence.computed + count
    tokens, pages = sequence.tokens[start:end], sequence.pages[: sequence.num_pages]
    if end < sequence.length:
        chunk = Chunk(request.id, tokens, start, pages, sampling=None)
    else:
        suppress = request.sampling.stop_token_ids if end < sequence.min_length else ()
        if sequence.allowed is not None and _holds_only(suppress, sequence.allowed):
            suppress = ()  # its grammar is complete: end tokens are all that it can go on with
        chunk = Chunk(request.id, tokens, start, pages, request.sampling, suppress)
        if request.sampling.penalises:
            chunk.history, chunk.prompt_tokens = sequence.tokens[:end], len(request.prompt)
        chunk.allowed = sequence.allowed
    wanted, prompt_tokens = request.sampling.prompt_logprobs, len(request.prompt)
    if wanted is not None and start + 1 < prompt_tokens == sequence.length:
        chunk.targets, chunk.target_logprobs = sequence.tokens[start + 1 : min(end + 1, prompt_tokens)], wanted
    return chunk


def _holds_only(tokens: Iterable[int], allowed: np.ndarray) -> bool:
    """Whether ``allowed`` (see ``Grammar``) has none but ``tokens``."""
    others = allowed.view(np.uint32).copy()
    for token in tokens:
        others[token // 32] &= ~np.uint32(1 << token % 32)
    return not others.any()
