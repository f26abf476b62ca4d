"""The engines of one process and the thread that runs them. ``tick`` is the table of contents."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.exceptions import Interrupted, NotServing, QueueFull
from gimbal_jax.scheduler.dispatch_decision import Decision
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.core.central_queue import CentralQueue, not_taken_in
from gimbal_jax.serving.core.status import State, Status, engine_status
from gimbal_jax.serving.engine.engine import Engine, Owners
from gimbal_jax.serving.engine.meters import Histogram, StepProfile
from gimbal_jax.serving.engine.pages import PageNews
from gimbal_jax.serving.engine.plan import Plan
from gimbal_jax.serving.engine.request import Request, RequestId, TokenDelta, reason_of
from gimbal_jax.serving.engine.runner import Pending, Runner
from gimbal_jax.serving.engine.status import StepStatus
from gimbal_jax.serving.placement.rebalance import Rebalancer

STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Buckets for metrics; those of tokens are vLLM's of ``iteration_tokens_total``."""


@dataclass(frozen=True, eq=False, slots=True)
class StepInFlight:
    """A step whose results have not been fetched."""

    plans: list[Plan]
    """One for each engine."""
    owners: list[Owners]
    """Whose the rows of each plan are."""
    enqueued: float
    """Time when it was enqueued, on the core's clock."""
    pending: Pending
    """Waits for the results."""


@dataclass(frozen=True, eq=False, slots=True)
class TickNews:
    """What the engines did in one tick, in the order in which it is to be processed; at least one part is not empty."""

    now: float
    """Time of the tick, on the core's clock."""
    bound: Sequence[tuple[RequestId, Decision]] = ()
    """(request id, decision) for requests that were submitted without an engine."""
    pages: Sequence[PageNews] = ()
    """Changes of the prefix caches, at most one for each engine."""
    outputs: Sequence[TokenDelta] = ()


class EngineCore:
    """S engines over one runner. Public methods may be called from any thread; ``tick`` from one only."""

    def __init__(
        self,
        model: ModelConfig,
        config: ServerConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        """``rebalancer`` runs the placement loop of ``runner``; by default as the configuration says. ``stop`` closes
        it.
        """
        self.model, self.config = model, config
        self._listeners: tuple[Callable[[TickNews], None], ...] = ()
        self._bound: list[tuple[RequestId, Decision]] = []
        self.engines = [Engine(s, config.engine, config.queue) for s in range(config.mesh.dp)]
        self._central = CentralQueue(self.engines, config.engine, config.queue)
        self._queues: list[CentralQueue | Engine] = [self._central, *self.engines]
        self.rebalancer = rebalancer or Rebalancer(model, config, runner)
        self._traffic = self.rebalancer.traffic
        self._runner, self._clock = runner, clock
        self._state: State = "warming"
        self._error = ""
        self._traces: tuple[Trace, ...] = ()
        self._published = -float("inf")
        self._step = 0
        self._in_flight: deque[StepInFlight] = deque()
        self._fetched_at = -float("inf")
        self._profile = StepProfile(clock)
        self._step_seconds, self._step_tokens = Histogram(STEP_SECONDS), Histogram(STEP_TOKENS)
        self._wake = threading.Condition()  # guards the five below
        self._inbox: deque[Request] = deque()
        self._cancelled: deque[RequestId] = deque()
        self._waiting = [0] * len(self._queues)  # in each queue, or in the inbox on the way to it
        self._flush = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        # Arrays change between ticks only; status() copies them in between.
        self._ticking = threading.Lock()

    @property
    def state(self) -> State:
        return self._state

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Latest published traces, replaced whole; empty before the first."""
        return self._traces

    @property
    def central_queue(self) -> int:
        """Requests that have no engine yet, as of the last tick."""
        return self._central.waiting

    def subscribe(self, on_tick: Callable[[TickNews], None]) -> Callable[[], None]:
        """Call ``on_tick`` on the engine thread, at most once a tick and only if there is news.

        Returns the function that ends the subscription.
        """
        self._listeners = (*self._listeners, on_tick)

        def unsubscribe() -> None:
            self._listeners = tuple(listener for listener in self._listeners if listener is not on_tick)

        return unsubscribe

    def submit(self, request: Request) -> None:
        """Queue a request; raises QueueFull or NotServing."""
        with self._wake:
            if self._state != "serving":
                raise NotServing(f"the server is {self._state}")
            queue, limit = self._queue_of(request), self.config.engine.max_queue
            if queue == 0 and self._waiting[queue] >= limit * len(self.engines):
                raise QueueFull(f"{self._waiting[queue]} requests wait ({limit} per engine: max_queue)")
            if queue > 0 and self._waiting[queue] >= limit:
                raise QueueFull(f"engine {request.engine}: {limit} requests wait (max_queue)")
            self._waiting[queue] += 1
            self._inbox.append(request)
            self._wake.notify()

    def cancel(self, request_id: RequestId) -> None:
        """End a request; its pages are free within a step. Unknown ids are ignored."""
        with self._wake:
            self._cancelled.append(request_id)
            self._wake.notify()

    def flush_cache(self) -> None:
        """At the next tick, drop the pages of the prefix caches that no sequence uses."""
        with self._wake:
            self._flush = True
            self._wake.notify()

    def rebalance(self) -> None:
        """Ask for a placement decision at the next tick."""
        self.rebalancer.ask()

    @property
    def error(self) -> str:
        """Why the engine failed; empty unless it did."""
        return self._error

    def open(self) -> None:
        """Take requests from now on. The engine thread does this after warm-up; who ticks by hand does it first."""
        with self._wake:
            if self._state == "warming":
                self._state = "serving"

    def check_warming(self) -> None:
        """For a long warm-up to call between its parts: raises Interrupted once the server is to stop."""
        if self._state != "warming":
            raise Interrupted

    def start(self, prepare: Callable[[], None] = lambda: None, on_end: Callable[[], object] = lambda: None) -> None:
        """Run the engine thread: first ``prepare`` (warm-up), then ticks while there is work, at last ``on_end``."""
        self._thread = threading.Thread(target=self._run, args=(prepare, on_end), name="engines", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Take no new requests; go on with the others."""
        with self._wake:
            if self._state in ("warming", "serving"):
                self._state = "draining"

    def abandon(self, reason: str) -> None:
        """Fail from outside, where the engine thread may wait for ever: it is not waited for from now on."""
        with self._wake:
            self._error = f"{reason}: {self._error}" if self._state == "failed" else reason
            self._state = "failed"
            self._thread = None

    def stop(self) -> None:
        """End the engine thread after its current tick and the steps in flight, whatever is left."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self.rebalancer.close()

    def tick(self, now: float) -> None:
        """One turn of all engines at time ``now``; see the figure in ARCHITECTURE.md."""
        with self._ticking:
            lap, enqueued = self._profile.lap, False
            self._profile.begin()
            trace_due = now - self._published >= self.config.dispatch.trace_period_s
            if trace_due or self.rebalancer.window_due:
                self._traffic.request_counts()
            news = self._drain_inbox()
            lap("other")
            while self._in_flight and any(engine.waits_for_tokens for engine in self.engines):
                news += self._fetch()
            self._bound, failed = self._central.bind(now)
            news += failed
            plans = [engine.schedule(now) for engine in self.engines]
            lap("schedule")
            if any(plan.tokens for plan in plans):
                self._enqueue(plans)
                enqueued = True
            if len(self._in_flight) > self._runner.ahead or (self._in_flight and not enqueued):
                news += self._fetch()
            self._notify(now, news)
            self.rebalancer.tick(now)
            if trace_due:
                self._publish(now)
            self._count_waiting()
            lap("other")
            if enqueued:
                self._profile.end()

    def status(self) -> Status:
        """The server at one moment, between two ticks."""
        with self._ticking:
            if self._state != "failed":  # the devices may have lost their counters with the step that failed
                self._traffic.collect()  # complete unless steps are in flight
            return Status(
                state=self._state,
                error=self._error,
                traces=self._traces,
                engines=tuple(engine_status(engine, self._clock()) for engine in self.engines),
                steps=StepStatus(
                    count=self._step,
                    compiles_after_warmup=self._runner.compiles_after_warmup(),
                    seconds=self._step_seconds.record(),
                    tokens=self._step_tokens.record(),
                    phases=self._profile.times(),
                ),
                placement=self.rebalancer.status(),
            )

    def _enqueue(self, plans: list[Plan]) -> None:
        began = self._clock()
        pending = self._runner.enqueue(plans, self._profile.lap)
        owners = [engine.owners(plan) for engine, plan in zip(self.engines, plans, strict=True)]
        self._in_flight.append(StepInFlight(plans, owners, began, pending))
        self._step_tokens.observe(sum(plan.tokens for plan in plans))
        self._traffic.step_enqueued()
        self._profile.lap("enqueue")

    def _fetch(self) -> list[TokenDelta]:
        """Wait for the oldest step and commit its results to the engines."""
        step = self._in_flight.popleft()
        results = step.pending()
        now = self._clock()
        # The step began when it was enqueued, or when the devices had finished the step before it.
        self._step_seconds.observe(now - max(step.enqueued, self._fetched_at))
        self._fetched_at = now
        self._profile.lap("wait")
        news = []
        for engine, plan, owners, result in zip(self.engines, step.plans, step.owners, results, strict=True):
            news += engine.commit(plan, owners, result)
        self._step += 1
        self._traffic.step_fetched()
        self._profile.lap("commit")
        return news

    def _notify(self, now: float, outputs: list[TokenDelta]) -> None:
        """Call the subscribers with what has happened since the last call, if anything has."""
        pages = [changed for engine in self.engines if (changed := engine.take_news()) is not None]
        bound, self._bound = self._bound, []
        if bound or pages or outputs:
            news = TickNews(now, bound, pages, outputs)
            for listener in self._listeners:
                listener(news)
        self._profile.lap("emit")

    def _drain_inbox(self) -> list[TokenDelta]:
        """Hand new requests to their engines, and end cancelled ones; returns how those ended that none could take."""
        with self._wake:
            requests, self._inbox = self._inbox, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            flush, self._flush = self._flush, False
        failed = []
        for request in requests:
            try:
                self._queues[self._queue_of(request)].add(request)
            except Exception as error:  # one request must not end the others
                failed.append(not_taken_in(request, error))
        for request_id in cancelled:
            any(queue.cancel(request_id) for queue in self._queues)
        if flush:
            for engine in self.engines:
                engine.flush_cache()
        return failed

    def _count_waiting(self) -> None:
        with self._wake:
            self._waiting = [queue.waiting for queue in self._queues]
            for request in self._inbox:
                self._waiting[self._queue_of(request)] += 1

    def _queue_of(self, request: Request) -> int:
        """Index into ``_queues`` of where a new request goes; under ``late`` also one that the user gave an engine."""
        if request.engine is None or self.config.dispatch.policy == "late":
            return 0
        return 1 + request.engine

    def _publish(self, now: float) -> None:
        pressure_S = self._traffic.pressure_S()
        self._traces = tuple(
            engine.trace(now, float(pressure)) for engine, pressure in zip(self.engines, pressure_S, strict=True)
        )
        self._published = now

    def _run(self, prepare: Callable[[], None], on_end: Callable[[], object]) -> None:
        try:
            prepare()
            self.open()
            while not self._stopping:
                self.tick(self._clock())
                with self._wake:
                    if not self._stopping and not self.has_work:
                        self._wake.wait(self.config.dispatch.trace_period_s)
            self._fetch_all()
            self._end("stopped", "the server has stopped")
        except Interrupted:
            self._end("stopped", "the server has stopped")
        except BaseException as error:
            self._end("failed", reason_of(error))
            raise
        finally:
            on_end()

    def _fetch_all(self) -> None:
        with self._ticking:
            while self._in_flight:
                outputs = self._fetch()
                self._notify(self._fetched_at, outputs)

    @property
    def has_work(self) -> bool:
        """Whether the next tick has more to do than to publish traces; a step in flight is work."""
        queued = self._inbox or self._cancelled or self._flush or self._central.waiting or self._in_flight
        return bool(queued) or not all(engine.idle for engine in self.engines)

    def _end(self, state: State, reason: str) -> None:
        """Every request that is left ends with an error; none waits for ever."""
        with self._wake:
            if self._state != "failed":  # abandoned
                self._state, self._error = state, reason if state == "failed" else ""
            left = [TokenDelta(r.id, (), finish_reason="error", error=reason) for r in self._inbox]
            self._inbox.clear()
        for queue in self._queues:
            left += queue.fail_all(reason)
        self._notify(self._clock(), left)
