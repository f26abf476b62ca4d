"""The asyncio side of the server: chooses an engine for each request and streams its output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.scheduler.dispatch import Choose, Decision, choose_engine
from gimbal_jax.scheduler.dispatcher import Dispatcher
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.request import Output, Request, SamplingParams
from gimbal_jax.serving.status import State, Status


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
    """Ended requests by finish reason, "cancelled" (the client left) or "refused"."""
    rules: Counter[str] = field(default_factory=Counter)
    """Dispatch decisions by rule."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    """Sum over ``first_tokens`` requests of the time from arrival to the first token."""


@dataclass(eq=False)
class _Stream:
    """News of one live request that its consumer has not taken yet: at most its max_tokens tokens."""

    request_id: str
    arrival: float
    news: list[Output] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    outcome: str | None = None
    """How the core ended it; None while the core still works on it."""
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
        error=last.error,
    )


class Frontend:
    """Dispatches requests and routes their outputs. Made and used on one event loop.

    ``clock`` must be the core's own: ages of traces are differences between the two.
    ``dispatch_policy`` may be your own.
    """

    def __init__(self, core: Core, clock: Callable[[], float], dispatch_policy: Choose = choose_engine) -> None:
        config = core.config
        self.core = core
        self.clock = clock
        self.counters = Counters()
        self.dispatcher = Dispatcher(
            config.mesh.dp, config.dispatch, config.engine.token_budget, choose=dispatch_policy
        )
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()
        self._loop = asyncio.get_running_loop()
        self._serial = itertools.count()
        self._observed: tuple[Trace, ...] = ()
        self._refusal: str | None = None
        # The core's id of a request is new each time, so that late news of an
        # aborted request cannot reach a later one that the client calls the same.
        self._core_ids: dict[str, str] = {}
        self._streams: dict[str, _Stream] = {}
        core.on_outputs = self._deliver
        core.on_bound = self._deliver_bound

    @property
    def active(self) -> int:
        """Number of live requests."""
        return len(self._streams)

    async def generate(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        engine: int | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Output]:
        """Yield news of a validated request until one has a finish_reason.

        ``engine`` pins the request; lower ``priority`` runs first. Leaving the iteration early, by ``aclose`` or
        by cancelling the task, cancels the request in the core. Raises QueueFull,
        NotServing, DuplicateRequest or GenerationFailed.
        """
        if self._refusal is not None:
            raise NotServing(self._refusal)
        if request_id in self._core_ids:
            raise DuplicateRequest(f"request_id {request_id!r} belongs to a request that is still running")
        arrival = self.clock()
        traces = self.core.traces
        if traces is not self._observed:
            self._observed = traces
            self.dispatcher.observe(traces)
        decision, sequence = self.dispatcher.dispatch(request_id, len(prompt), arrival, engine)

        core_id = f"{request_id}/{next(self._serial)}"
        stream = self._streams[core_id] = _Stream(request_id, arrival)
        self._core_ids[request_id] = core_id
        self.idle.clear()
        outcome = "refused"
        try:
            self.core.submit(Request(core_id, prompt, sampling, arrival, decision.engine, sequence, priority))
            outcome = "cancelled"
            if decision.engine is not None:
                self.counters.rules[decision.rule] += 1
            self.counters.prompt_tokens += len(prompt)
            while True:
                output = await stream.next()
                if output.finish_reason == "error":
                    raise GenerationFailed(output.error)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if stream.outcome is None:
                self.dispatcher.finished(request_id)
                if outcome != "refused":
                    self.core.cancel(core_id)
            self.counters.outcomes[stream.outcome or outcome] += 1
            del self._streams[core_id], self._core_ids[request_id]
            if not self._streams:
                self.idle.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End live requests with finish_reason "abort"; unknown ids are ignored."""
        for core_id in [self._core_ids[id] for id in request_ids if id in self._core_ids]:
            self.core.cancel(core_id)
            self._route([Output(core_id, (), finish_reason="abort")])

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
            if core_id in self._streams:  # not cancelled meanwhile
                self.dispatcher.record(self._streams[core_id].request_id, now, decision)

    def _route(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.outcome is not None:
                continue
            self.counters.generated_tokens += len(output.token_ids)
            if output.token_ids and not stream.started:
                stream.started = True
                self.counters.first_tokens += 1
                self.counters.first_token_seconds += self.clock() - stream.arrival
            if output.finish_reason is not None:
                self._end(stream, output.finish_reason)
            stream.news.append(output)
            stream.arrived.set()

    def _end(self, stream: _Stream, outcome: str) -> None:
        stream.outcome = outcome
        self.dispatcher.finished(stream.request_id)
