"""The asyncio side of the server: chooses an engine for each request and streams its output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.scheduler.dispatch import Choose, Decision, choose_engine
from gimbal_jax.scheduler.dispatcher import Dispatcher
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.request import Grammar, Output, Request, SamplingParams
from gimbal_jax.serving.request_record import Origin, RequestRecord
from gimbal_jax.serving.status import State, Status
from gimbal_jax.serving.token_rate import TokenRate

NO_ORIGIN = Origin()
"""Of requests that no call brought."""


class NotServing(Exception):
    """The server takes no requests now: it warms up, drains, or has stopped."""


class QueueFull(Exception):
    """As many requests wait for an engine as may wait."""


class DuplicateRequest(Exception):
    """A request of the same id is still running."""


class GenerationFailed(Exception):
    """The engine ended the request with an error."""


class Core(Protocol):
    """What the frontend needs of the engines. Every member may be used from any thread."""

    on_outputs: Callable[[list[Output]], None]
    """Called on the engine thread, at most once per tick, with all news of the tick."""
    on_bound: Callable[[float, list[tuple[str, Decision]]], None]
    """Called there before, with the time and what it decided for requests that came without an engine."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def config(self) -> ServerConfig: ...

    @property
    def state(self) -> State: ...

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Latest published traces, replaced whole; empty before the first."""

    @property
    def central_queue(self) -> int:
        """Requests that have no engine yet."""

    def submit(self, request: Request) -> None:
        """Queue a request; raises QueueFull or NotServing."""

    def cancel(self, request_id: str) -> None:
        """End a request and free its pages within a step; unknown ids are ignored."""

    def status(self) -> Status: ...

    def rebalance(self) -> None:
        """Ask for a placement decision at the next tick."""


@dataclass
class Counters:
    """What happened since start, for metrics. Written on the event loop only."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Ended sequences by finish reason, "cancelled" (the client left) or "refused"."""
    rules: Counter[str] = field(default_factory=Counter)
    """Dispatch decisions by rule."""
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(eq=False)
class _Stream:
    """News of one live sequence that its consumer has not taken yet: at most its max_tokens tokens."""

    request_id: str
    arrival: float
    engine: int | None = None
    rule: str = ""
    output_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    news: list[Output] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: str | None = None
    """How the core ended it; None while the core still works on it."""
    ended: float | None = None
    failure: Exception | None = None

    async def next(self) -> Output:
        """All news since the last call, as one Output."""
        await self.arrived.wait()
        if self.failure is not None:
            raise self.failure
        news, self.news = self.news, []
        self.arrived.clear()
        return _merge(self.request_id, news)


def _merge(request_id: str, news: list[Output]) -> Output:
    last = news[-1]
    return Output(
        request_id,
        token_ids=tuple(itertools.chain.from_iterable(output.token_ids for output in news)),
        logprobs=tuple(itertools.chain.from_iterable(output.logprobs for output in news)),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        prompt_logprobs=news[0].prompt_logprobs,
        error=last.error,
    )


class Frontend:
    """Dispatches requests and routes their outputs. Made and used on one event loop.

    ``clock`` must be the core's own: ages of traces are differences between the two.
    ``dispatch_policy`` may be your own. ``on_ended`` gets the record of every sequence, refused ones too.
    """

    def __init__(
        self,
        core: Core,
        clock: Callable[[], float],
        dispatch_policy: Choose = choose_engine,
        on_ended: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        config = core.config
        self.core = core
        self.clock = clock
        self.counters = Counters()
        self.dispatcher = Dispatcher(
            config.mesh.dp, config.dispatch, config.engine.token_budget, choose=dispatch_policy
        )
        self.token_rate = TokenRate(config.mesh.dp)
        self.idle = asyncio.Event()
        """Set while no request is live, nor any whose news somebody still reads."""
        self.idle.set()
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._serial = itertools.count()
        self._observed: tuple[Trace, ...] = ()
        self._refusal: str | None = None
        # The core's id of a request is new each time, so that late news of an
        # aborted request cannot reach a later one that the client calls the same.
        self._core_ids: dict[str, str] = {}
        self._groups: dict[str, Sequence[str]] = {}
        self._streams: dict[str, _Stream] = {}
        core.on_outputs = self._deliver
        core.on_bound = self._deliver_bound

    @property
    def active(self) -> int:
        """Number of live sequences."""
        return len(self._streams)

    @contextlib.contextmanager
    def group(self, request_id: str, sequence_ids: Sequence[str]) -> Iterator[None]:
        """While it is open, ``abort`` of the request ends all its sequences. Raises DuplicateRequest."""
        if request_id in self._groups:
            self.counters.outcomes["refused"] += 1
            raise _duplicate(request_id)
        self._groups[request_id] = sequence_ids
        self.idle.clear()
        try:
            yield
        finally:
            del self._groups[request_id]
            self._note_idle()

    async def generate(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        engine: int | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
        origin: Origin = NO_ORIGIN,
    ) -> AsyncGenerator[Output]:
        """Yield news of a validated sequence until one has a finish_reason.

        ``engine`` pins it; lower ``priority`` runs first. Leaving the iteration early, by ``aclose`` or
        by cancelling the task, cancels it in the core. Raises QueueFull,
        NotServing, DuplicateRequest or GenerationFailed.
        """
        stream = _Stream(request_id, self.clock())
        outcome, reason = "refused", ""
        core_id = None
        try:
            if self._refusal is not None:
                raise NotServing(self._refusal)
            if request_id in self._core_ids:
                raise _duplicate(request_id)
            traces = self.core.traces
            if traces is not self._observed:
                self._observed = traces
                self.dispatcher.observe(traces)
            decision, number = self.dispatcher.dispatch(request_id, len(prompt), stream.arrival, engine)
            core_id = self._core_ids[request_id] = f"{request_id}/{next(self._serial)}"
            self._streams[core_id] = stream
            self.idle.clear()
            self.core.submit(
                Request(core_id, prompt, sampling, stream.arrival, decision.engine, number, priority, grammar)
            )
            outcome = "cancelled"
            if decision.engine is not None:
                stream.engine, stream.rule = decision.engine, decision.rule
                self.counters.rules[decision.rule] += 1
            self.counters.prompt_tokens += len(prompt)
            while True:
                output = await stream.next()
                if output.finish_reason == "error":
                    raise GenerationFailed(output.error)
                yield output
                if output.finish_reason is not None:
                    return
        except (NotServing, QueueFull, DuplicateRequest, GenerationFailed) as error:
            reason = str(error)
            raise
        finally:
            if core_id is not None:
                self._forget(core_id, stream, submitted=outcome != "refused")
            outcome = stream.outcome or outcome
            self.counters.outcomes[outcome] += 1
            ended = self.clock() if stream.ended is None else stream.ended
            self._on_ended(
                RequestRecord(
                    request_id=request_id,
                    origin=origin,
                    engine=stream.engine,
                    rule=stream.rule,
                    priority=priority,
                    prompt_tokens=len(prompt),
                    output_tokens=stream.output_tokens,
                    outcome=outcome,
                    error=reason,
                    arrival=stream.arrival,
                    queue_s=stream.queue_s,
                    first_token_s=stream.first_token_s,
                    total_s=ended - stream.arrival,
                )
            )

    def abort(self, request_ids: Iterable[str]) -> None:
        """End live requests with finish_reason "abort"; unknown ids are ignored."""
        ids = [id for request_id in request_ids for id in self._groups.get(request_id, (request_id,))]
        for core_id in [self._core_ids[id] for id in ids if id in self._core_ids]:
            self.core.cancel(core_id)
            self._route([Output(core_id, (), finish_reason="abort")])

    def stop(self, request_id: str) -> None:
        """End a live sequence whose text has come to a stop string. Its consumer takes no more news of it."""
        core_id = self._core_ids[request_id]
        stream = self._streams[core_id]
        if stream.outcome is None:
            self.core.cancel(core_id)
            self._end(stream, "stop")
        stream.outcome = "stop"  # also where it reached its length with the same token

    def refuse(self, reason: str) -> None:
        """From now on new requests get NotServing; live ones go on."""
        self._refusal = reason

    def end_all(self, reason: str) -> None:
        """End every live request with NotServing."""
        for core_id, stream in self._streams.items():
            if stream.outcome is None:
                self.core.cancel(core_id)
                self._end(stream, "abort")
                stream.failure = NotServing(reason)
                stream.arrived.set()

    def close(self) -> None:
        """Take no more news from the core."""
        self.core.on_outputs = lambda outputs: None
        self.core.on_bound = lambda now, bound: None

    def _deliver(self, outputs: list[Output]) -> None:
        # On the engine thread. A closed loop has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._route, outputs)

    def _deliver_bound(self, now: float, bound: list[tuple[str, Decision]]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._record, now, bound)

    def _record(self, now: float, bound: list[tuple[str, Decision]]) -> None:
        for core_id, decision in bound:
            self.counters.rules[decision.rule] += 1
            stream = self._streams.get(core_id)
            if stream is not None:  # not cancelled meanwhile
                stream.engine, stream.rule = decision.engine, decision.rule
                self.dispatcher.record(stream.request_id, now, decision)

    def _route(self, outputs: list[Output]) -> None:
        now = self.clock()
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.outcome is not None:
                continue
            self.counters.generated_tokens += len(output.token_ids)
            stream.output_tokens += len(output.token_ids)
            if stream.engine is not None:
                self.token_rate.add(stream.engine, len(output.token_ids), now)
            if output.started is not None:
                stream.queue_s = output.started - stream.arrival
            if output.token_ids and stream.first_token_s is None:
                stream.first_token_s = now - stream.arrival
            if output.finish_reason is not None:
                self._end(stream, output.finish_reason)
            stream.news.append(output)
            stream.arrived.set()

    def _end(self, stream: _Stream, outcome: str) -> None:
        stream.outcome = outcome
        stream.ended = self.clock()
        self.dispatcher.finished(stream.request_id)

    def _forget(self, core_id: str, stream: _Stream, submitted: bool) -> None:
        if stream.outcome is None:
            self.dispatcher.finished(stream.request_id)
            if submitted:
                self.core.cancel(core_id)
        del self._streams[core_id], self._core_ids[stream.request_id]
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams and not self._groups:
            self.idle.set()


def _duplicate(request_id: str) -> DuplicateRequest:
    return DuplicateRequest(f"request_id {request_id!r} belongs to a request that is still running")
