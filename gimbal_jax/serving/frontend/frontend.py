"""The asyncio side of the server: dispatches requests to engines and routes their tokens to streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from gimbal_jax.exceptions import DuplicateRequest, GenerationFailed, NotServing
from gimbal_jax.scheduler.dispatch import Choose, choose_engine
from gimbal_jax.scheduler.dispatch_decision import Decision
from gimbal_jax.scheduler.dispatcher import Dispatcher
from gimbal_jax.serving.core.admission import admit
from gimbal_jax.serving.core.core import EngineCore, TickNews
from gimbal_jax.serving.engine.request import Grammar, Request, SamplingParams, TokenDelta
from gimbal_jax.serving.frontend.counters import Counters, TokenRate
from gimbal_jax.serving.frontend.prefix_index import PageLog, PrefixIndex
from gimbal_jax.serving.frontend.record import NO_ORIGIN, Origin, RequestRecord
from gimbal_jax.serving.frontend.stream import Stream
from gimbal_jax.serving.text.stops import OutputText


class Frontend:
    """Dispatches requests, and routes the news of the core to their streams. Made and used on one event loop.

    Attributes:
        core: The engines.
        clock: The core's clock in seconds; ages of traces are differences of its times.
        dispatcher: Dispatch decisions and their memory.
        counters: Counts since the start.
        token_rate: Tokens per second of each engine.
        prefixes: The pages that each prefix cache holds.
        page_log: The last changes of the prefix caches.
        idle: Event that is set while no sequence runs and no consumer reads a request.
    """

    def __init__(
        self,
        core: EngineCore,
        clock: Callable[[], float],
        dispatch_policy: Choose = choose_engine,
        on_ended: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """``dispatch_policy`` may be a rule of your own. ``on_ended`` gets the record of every sequence that ended."""
        config = core.config
        engines = config.mesh.dp
        self.core = core
        self.clock = clock
        self.dispatcher = Dispatcher(engines, config.dispatch, config.engine.token_budget, choose=dispatch_policy)
        self.counters = Counters(started_tokens_S=[0] * engines, cached_tokens_S=[0] * engines)
        self.token_rate = TokenRate(engines)
        self.prefixes = PrefixIndex(engines)
        self.page_log = PageLog()
        self.idle = asyncio.Event()
        self.idle.set()
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        # Ids are never used again, so late news of a cancelled sequence reach no other.
        self._ids = itertools.count()
        self._streams: dict[str, Stream] = {}
        self._groups: dict[str, Sequence[str]] = {}
        self._rejection: str | None = None
        self._unsubscribe = core.subscribe(self._on_tick)

    @property
    def active(self) -> int:
        """Number of sequences that run or wait."""
        return len(self._streams)

    @contextlib.contextmanager
    def group(self, request_id: str, sequence_ids: Sequence[str]) -> Iterator[None]:
        """Hold a request id, of which ``abort`` ends all sequences. Raises DuplicateRequest if it is held already."""
        if request_id in self._groups:
            self.counters.outcomes["refused"] += 1
            raise DuplicateRequest(f"request_id {request_id!r} belongs to a request that is still running")
        self._groups[request_id] = sequence_ids
        self.idle.clear()
        try:
            yield
        finally:
            del self._groups[request_id]
            self._note_idle()

    def generate(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        engine: int | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
        page_hashes: tuple[bytes, ...] = (),
        text: OutputText | None = None,
        arrived: asyncio.Event | None = None,
        origin: Origin = NO_ORIGIN,
    ) -> Stream:
        """Admit a validated sequence and return its stream; use it in a ``with`` block, whose end cancels it.

        engine: engine that the client chose; None leaves the choice to the dispatcher.
        priority: lower runs first.
        page_hashes: hashes of the prompt's full pages (``prefix.page_hashes``); empty if it must not share pages.
        text: text of the output, whose stop strings end the sequence; None for deltas without text.
        arrived: event to set when the stream has deltas; by default an event of its own.

        Raises NotServing or QueueFull. The iteration raises NotServing if the server ends, and GenerationFailed if the
        engine fails the sequence.
        """
        record = RequestRecord(request_id, origin, priority, len(prompt), arrival=self.clock())
        request = Request(
            id=str(next(self._ids)),
            label=request_id,
            prompt=prompt,
            sampling=sampling,
            arrival=record.arrival,
            engine=engine,
            priority=priority,
            grammar=grammar,
            page_hashes=page_hashes,
        )
        try:
            if self._rejection is not None:
                raise NotServing(self._rejection)
            ticket = admit(self.core, self.dispatcher, request, self._cached_tokens_S(request))
        except Exception as error:
            self._hand_out(record, "refused", str(error))
            raise
        stream = Stream(request.id, record, ticket, text, arrived or asyncio.Event(), self._leave)
        self._streams[request.id] = stream
        self.idle.clear()
        self.counters.prompt_tokens += len(prompt)
        if ticket.decision.engine is not None:
            self._bind(record, ticket.decision)
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with finish_reason "abort". Unknown ids are ignored."""
        labels = {label for request_id in request_ids for label in self._groups.get(request_id, (request_id,))}
        for stream in [stream for stream in self._streams.values() if stream.record.request_id in labels]:
            self.core.cancel(stream.id)
            self._route([TokenDelta(stream.id, (), finish_reason="abort")])

    def reject_new(self, reason: str) -> None:
        """Reject new requests with NotServing from now on. Running ones continue."""
        self._rejection = reason

    def end_all(self, reason: str) -> None:
        """End all sequences with NotServing, and the log of pages."""
        for stream in list(self._streams.values()):
            self.core.cancel(stream.id)
            stream.fail(NotServing(reason))
            self._end(stream, "abort", reason)
        self.page_log.close()

    def close(self) -> None:
        """Unsubscribe from the core."""
        self._unsubscribe()

    def _on_tick(self, news: TickNews) -> None:
        """Hand the news of a tick from the engine thread to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no consumer is left
            self._loop.call_soon_threadsafe(self._take, news)

    def _take(self, news: TickNews) -> None:
        """Process the news of a tick: decisions before cached pages, and both before the tokens they precede."""
        for sequence_id, decision in news.bound:
            stream = self._streams.get(sequence_id)
            if stream is None:  # cancelled meanwhile
                self.counters.rules[decision.rule] += 1
            else:
                self._bind(stream.record, decision)
                self.dispatcher.record(stream.record.request_id, news.now, decision)
        if news.pages:
            for changed in news.pages:
                self.prefixes.apply(changed)
            self.page_log.add(self.clock(), news.pages)
        if news.outputs:
            self._route(news.outputs)

    def _bind(self, record: RequestRecord, decision: Decision) -> None:
        """Note the engine of a sequence."""
        record.engine, record.rule = decision.engine, decision.rule
        self.counters.rules[decision.rule] += 1

    def _route(self, deltas: Sequence[TokenDelta]) -> None:
        """Add each delta to its stream, and end the sequences of which it is the last."""
        now = self.clock()
        tokens_S = [0] * self.core.config.mesh.dp
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:  # cancelled or stopped: the core did not know it yet
                continue
            record = stream.record
            tokens = len(delta.token_ids)
            record.output_tokens += tokens
            self.counters.generated_tokens += tokens
            if record.engine is not None:
                tokens_S[record.engine] += tokens
            if delta.started is not None:
                record.queue_s = delta.started - record.arrival
                record.cached_tokens = delta.cached_tokens
            if tokens and record.first_token_s is None:
                record.first_token_s = now - record.arrival
            self._add(stream, delta)
        for engine, tokens in enumerate(tokens_S):
            self.token_rate.add(engine, tokens, now)

    def _add(self, stream: Stream, delta: TokenDelta) -> None:
        """Add a delta to its stream. If it is the last, or its text has a stop string, the sequence ends."""
        is_last = delta.finish_reason is not None
        try:
            stream.add(delta)
        except Exception as error:  # its text cannot be decoded: the other sequences must go on
            self.core.cancel(stream.id)
            stream.fail(error)
            self._end(stream, "cancelled")
            return
        if delta.finish_reason is None:
            return
        if not is_last:  # a stop string, which the core does not know
            self.core.cancel(stream.id)
        if delta.finish_reason == "error":
            kind = NotServing if self.core.state == "failed" else GenerationFailed
            stream.fail(kind(delta.error))
        self._end(stream, delta.finish_reason, delta.error)

    def _leave(self, stream: Stream) -> None:
        """Cancel a sequence whose consumer has left, if it still runs."""
        if stream.id in self._streams:
            self.core.cancel(stream.id)
            self._end(stream, "cancelled")

    def _end(self, stream: Stream, outcome: str, error: str = "") -> None:
        del self._streams[stream.id]
        stream.ticket.release()
        self._hand_out(stream.record, outcome, error)
        self._note_idle()

    def _hand_out(self, record: RequestRecord, outcome: str, error: str) -> None:
        """Complete the record of a sequence that ended, count it, and give it to the listener."""
        record.outcome, record.error = outcome, error
        record.total_s = self.clock() - record.arrival
        self.counters.outcomes[outcome] += 1
        if record.engine is not None and record.cached_tokens is not None:
            self.counters.started_tokens_S[record.engine] += record.prompt_tokens
            self.counters.cached_tokens_S[record.engine] += record.cached_tokens
        if self._on_ended is not None:
            self._on_ended(record)

    def _cached_tokens_S(self, request: Request) -> tuple[int, ...]:
        """Return the prompt tokens that each engine will find in its cache: whole pages, and never the last token."""
        page_size = self.core.config.engine.page_size
        hashes = request.page_hashes[: (len(request.prompt) - 1) // page_size]
        return self.prefixes.cached_tokens_S(hashes, page_size)

    def _note_idle(self) -> None:
        if not self._streams and not self._groups:
            self.idle.set()
