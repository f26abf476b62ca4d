"""The asyncio side of the server: chooses an engine for each request and streams its output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gimbal_jax.exceptions import DuplicateRequest, GenerationFailed, NotServing, QueueFull
from gimbal_jax.scheduler.dispatch import Choose, choose_engine
from gimbal_jax.scheduler.dispatch_decision import Decision
from gimbal_jax.scheduler.dispatcher import Dispatcher, Ticket
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.core.core import Server
from gimbal_jax.serving.engine.pages import PageNews
from gimbal_jax.serving.engine.request import Grammar, Output, Request, SamplingParams
from gimbal_jax.serving.frontend.counters import Counters, TokenRate
from gimbal_jax.serving.frontend.prefix_index import PageLog, PrefixIndex
from gimbal_jax.serving.frontend.record import NO_ORIGIN, Origin, RequestRecord


@dataclass(eq=False)
class _Stream:
    """News of one live sequence that its consumer has not taken yet: at most its max_tokens tokens."""

    request_id: str
    prompt_tokens: int
    priority: int
    origin: Origin
    may_stop: bool
    arrival: float
    core_id: str = ""
    """The core's id of it; empty until it is dispatched."""
    ticket: Ticket | None = None
    """The dispatcher's ticket of the request; None until it is dispatched."""
    engine: int | None = None
    rule: str = ""
    output_tokens: int = 0
    cached_tokens: int | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    news: list[Output] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: str | None = None
    """How the core ended it; None while the core still works on it."""
    error: str = ""
    ended: float | None = None
    recorded: bool = False
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
    if len(news) == 1:
        last.request_id = request_id
        return last
    return Output(
        request_id,
        token_ids=tuple(itertools.chain.from_iterable(output.token_ids for output in news)),
        logprobs=tuple(itertools.chain.from_iterable(output.logprobs for output in news)),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        prompt_logprobs=news[0].prompt_logprobs,
        cached_tokens=news[0].cached_tokens,
        error=last.error,
    )


class Frontend:
    """Dispatches requests and routes their outputs. Made and used on one event loop.

    ``clock`` must be the core's own: ages of traces are differences between the two.
    ``dispatch_policy`` may be your own. ``on_ended`` gets the record of every sequence, refused ones too.
    """

    def __init__(
        self,
        core: Server,
        clock: Callable[[], float],
        dispatch_policy: Choose = choose_engine,
        on_ended: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        config = core.config
        self.core = core
        self.clock = clock
        self.counters = Counters(started_tokens_S=[0] * config.mesh.dp, cached_tokens_S=[0] * config.mesh.dp)
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
        self.prefixes, self.page_log = PrefixIndex(config.mesh.dp), PageLog()
        core.on_outputs = self._deliver
        core.on_bound = self._deliver_bound
        core.on_pages = self._deliver_pages

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
        page_hashes: tuple[bytes, ...] = (),
        may_stop: bool = False,
        origin: Origin = NO_ORIGIN,
    ) -> AsyncGenerator[Output]:
        """Yield news of a validated sequence until one has a finish_reason.

        ``engine`` pins it; lower ``priority`` runs first; ``page_hashes`` are the prompt's, where it may share
        its beginning with others (see ``prefix.page_hashes``). Its end is recorded when the core ends it; with
        ``may_stop``, when the consumer has taken its last news, since it may still call ``stop``. Leaving the
        iteration early, by ``aclose`` or by cancelling the task, cancels it in the core. Raises QueueFull,
        NotServing, DuplicateRequest or GenerationFailed.
        """
        stream = _Stream(request_id, len(prompt), priority, origin, may_stop, self.clock())
        outcome = "refused"
        try:
            if self._refusal is not None:
                raise NotServing(self._refusal)
            if request_id in self._core_ids:
                raise _duplicate(request_id)
            traces = self.core.traces
            if traces is not self._observed:
                self._observed = traces
                self.dispatcher.observe(traces)
            cached_tokens_S = self._cached_tokens_S(page_hashes, len(prompt))
            stream.ticket = self.dispatcher.dispatch(request_id, len(prompt), stream.arrival, engine, cached_tokens_S)
            decision, number = stream.ticket.decision, stream.ticket.sequence
            core_id = stream.core_id = self._core_ids[request_id] = f"{request_id}/{next(self._serial)}"
            self._streams[core_id] = stream
            self.idle.clear()
            arrival, chosen = stream.arrival, decision.engine
            self.core.submit(
                Request(core_id, prompt, sampling, arrival, chosen, number, priority, grammar, page_hashes)
            )
            outcome = "cancelled"
            if decision.engine is not None:
                stream.engine, stream.rule = decision.engine, decision.rule
                self.counters.rules[decision.rule] += 1
            self.counters.prompt_tokens += len(prompt)
            while True:
                output = await stream.next()
                if output.finish_reason == "error":
                    raise (NotServing if self.core.state == "failed" else GenerationFailed)(output.error)
                yield output
                if output.finish_reason is not None:
                    return
        except (NotServing, QueueFull, DuplicateRequest, GenerationFailed) as error:
            stream.error = str(error)
            raise
        finally:
            if stream.ticket is not None:
                stream.ticket.release()
            if stream.core_id and stream.outcome is None and outcome != "refused":
                self.core.cancel(stream.core_id)
            self._record_end(stream, stream.outcome or outcome)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End live requests with finish_reason "abort"; unknown ids are ignored."""
        ids = [id for request_id in request_ids for id in self._groups.get(request_id, (request_id,))]
        for core_id in [self._core_ids[id] for id in ids if id in self._core_ids]:
            self.core.cancel(core_id)
            self._route([Output(core_id, (), finish_reason="abort")])

    def stop(self, request_id: str) -> None:
        """End a sequence (``may_stop``) whose text has come to a stop string. Its consumer takes no more news of it."""
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
        for core_id, stream in list(self._streams.items()):
            if stream.outcome is None:
                self.core.cancel(core_id)
                self._end(stream, "abort", reason)
                stream.failure = NotServing(reason)
                stream.arrived.set()
        self.page_log.close()

    def close(self) -> None:
        """Take no more news from the core."""
        self.core.on_outputs = lambda outputs: None
        self.core.on_bound = lambda now, bound: None
        self.core.on_pages = lambda news: None

    def _deliver(self, outputs: list[Output]) -> None:
        # On the engine thread. A closed loop has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._route, outputs)

    def _deliver_bound(self, now: float, bound: list[tuple[str, Decision]]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._record, now, bound)

    def _deliver_pages(self, news: list[PageNews]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._apply, news)

    def _apply(self, news: list[PageNews]) -> None:
        for one in news:
            self.prefixes.apply(one)
        self.page_log.add(self.clock(), news)

    def _cached_tokens_S(self, page_hashes: tuple[bytes, ...], prompt_tokens: int) -> tuple[int, ...]:
        """What each engine will find in its cache of such a prompt: whole pages, its last token never."""
        page_size = self.core.config.engine.page_size
        return self.prefixes.cached_tokens_S(page_hashes[: (prompt_tokens - 1) // page_size], page_size)

    def _record(self, now: float, bound: list[tuple[str, Decision]]) -> None:
        for core_id, decision in bound:
            self.counters.rules[decision.rule] += 1
            stream = self._streams.get(core_id)
            if stream is not None:  # not cancelled meanwhile
                stream.engine, stream.rule = decision.engine, decision.rule
                self.dispatcher.record(stream.request_id, now, decision)

    def _route(self, outputs: list[Output]) -> None:
        now, generated, tokens_S = self.clock(), 0, [0] * self.core.config.mesh.dp
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.outcome is not None:
                continue
            tokens = len(output.token_ids)
            generated += tokens
            stream.output_tokens += tokens
            if stream.engine is not None:
                tokens_S[stream.engine] += tokens
            if output.started is not None:
                stream.queue_s = output.started - stream.arrival
                stream.cached_tokens = output.cached_tokens
            if output.token_ids and stream.first_token_s is None:
                stream.first_token_s = now - stream.arrival
            if output.finish_reason is not None:
                self._end(stream, output.finish_reason, output.error)
            stream.news.append(output)
            stream.arrived.set()
        self.counters.generated_tokens += generated
        for engine, tokens in enumerate(tokens_S):
            self.token_rate.add(engine, tokens, now)

    def _end(self, stream: _Stream, outcome: str, error: str = "") -> None:
        stream.outcome, stream.error = outcome, error
        stream.ended = self.clock()
        if stream.ticket is not None:
            stream.ticket.release()
        if not stream.may_stop:
            self._record_end(stream, outcome)

    def _record_end(self, stream: _Stream, outcome: str) -> None:
        """Forget a sequence that has ended, and tell of it once."""
        if stream.recorded:
            return
        stream.recorded = True
        if stream.core_id:
            del self._streams[stream.core_id], self._core_ids[stream.request_id]
            self._note_idle()
        self.counters.outcomes[outcome] += 1
        if stream.engine is not None and stream.cached_tokens is not None:
            self.counters.started_tokens_S[stream.engine] += stream.prompt_tokens
            self.counters.cached_tokens_S[stream.engine] += stream.cached_tokens
        ended = self.clock() if stream.ended is None else stream.ended
        self._on_ended(
            RequestRecord(
                request_id=stream.request_id,
                origin=stream.origin,
                engine=stream.engine,
                rule=stream.rule,
                priority=stream.priority,
                prompt_tokens=stream.prompt_tokens,
                cached_tokens=stream.cached_tokens,
                output_tokens=stream.output_tokens,
                outcome=outcome,
                error=stream.error,
                arrival=stream.arrival,
                queue_s=stream.queue_s,
                first_token_s=stream.first_token_s,
                total_s=ended - stream.arrival,
            )
        )

    def _note_idle(self) -> None:
        if not self._streams and not self._groups:
            self.idle.set()


def _duplicate(request_id: str) -> DuplicateRequest:
    return DuplicateRequest(f"request_id {request_id!r} belongs to a request that is still running")
