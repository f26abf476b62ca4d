"""The engines of one process and the thread that runs them. ``EngineCore.tick`` shows how the parts work together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.exceptions import Interrupted, NotServing
from gimbal_jax.scheduler.dispatch_decision import Decision
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.core.central_queue import CentralQueue, admission_error
from gimbal_jax.serving.core.inbox import Inbox
from gimbal_jax.serving.core.status import State, Status, engine_status
from gimbal_jax.serving.engine.engine import Engine, Owners
from gimbal_jax.serving.engine.meters import Histogram, PhaseTimer
from gimbal_jax.serving.engine.pages import CacheEvents
from gimbal_jax.serving.engine.plan import Plan
from gimbal_jax.serving.engine.request import Request, TokenDelta, reason_of
from gimbal_jax.serving.engine.runner import Pending, Runner
from gimbal_jax.serving.engine.status import StepStatus
from gimbal_jax.serving.placement.rebalance import Rebalancer

STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of the buckets of a step's seconds."""
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the buckets of a step's tokens, those of vLLM's ``iteration_tokens_total``."""


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
    """Results of one tick: process ``bound`` first, then ``pages``, then ``outputs``. At least one is not empty."""

    now: float
    """Time of the tick, on the core's clock."""
    bound: Sequence[tuple[str, Decision]] = ()
    """(request id, decision) for requests that were submitted without an engine."""
    pages: Sequence[CacheEvents] = ()
    """Changes of the prefix caches, at most one for each engine."""
    outputs: Sequence[TokenDelta] = ()
    """New tokens and ends of requests."""


class EngineCore:
    """S engines over one runner. Public methods may be called from any thread, ``tick`` from one thread only.

    ``start`` runs an engine thread that ticks. Tests and the simulator call ``open`` and ``tick`` instead.

    ``engines``: the engines; the engine thread owns them.
    ``rebalancer``: the placement loop; the engine thread owns it.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ServerConfig,
        runner: Runner,
        rebalancer: Rebalancer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rebalancer``: the placement loop of ``runner``; by default as configured. ``stop`` closes it."""
        self.model, self.config = model, config
        self.engines = [Engine(s, config.engine, config.queue) for s in range(config.mesh.dp)]
        self.rebalancer = rebalancer or Rebalancer(model, config, runner)
        self._traffic = self.rebalancer.traffic
        self._runner = runner
        self._clock = clock

        # Requests, from the other threads to the engines and back to the subscribers.
        self._inbox = Inbox(config.mesh.dp, config.engine.max_queue, config.dispatch.policy == "late")
        self._central = CentralQueue(self.engines, config.engine, config.queue)
        self._queues: list[CentralQueue | Engine] = [self._central, *self.engines]
        self._subscribers: tuple[Callable[[TickNews], None], ...] = ()
        self._bound: list[tuple[str, Decision]] = []

        # The life of the engine thread. ``_inbox.changed`` guards the state.
        self._state: State = "warming"
        self._error = ""
        self._stopping = False
        self._thread: threading.Thread | None = None

        # Steps, their meters and what is published.
        self._in_flight: deque[StepInFlight] = deque()
        self._step = 0
        self._fetched_at = -float("inf")
        self._timer = PhaseTimer(clock)
        self._step_seconds = Histogram(STEP_SECONDS)
        self._step_tokens = Histogram(STEP_TOKENS)
        self._traces: tuple[Trace, ...] = ()
        self._published = -float("inf")
        self._ticking = threading.Lock()  # arrays change only during a tick, so status() copies them between two ticks

    @property
    def state(self) -> State:
        """Whether the server warms up, serves, drains, has stopped or has failed."""
        return self._state

    @property
    def error(self) -> str:
        """Why the engine thread failed; empty unless it did."""
        return self._error

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Latest published traces, one per engine, replaced as a whole; empty before the first."""
        return self._traces

    @property
    def central_queue(self) -> int:
        """Requests that have no engine yet, as of the last tick."""
        return self._central.waiting

    @property
    def has_work(self) -> bool:
        """Whether the next tick does more than publish traces. A step in flight is work."""
        return bool(
            self._inbox or self._central.waiting or self._in_flight or not all(engine.idle for engine in self.engines)
        )

    def subscribe(self, on_tick: Callable[[TickNews], None]) -> Callable[[], None]:
        """Call ``on_tick`` on the engine thread, at most once a tick and only if there is news.

        Returns the function that ends the subscription.
        """
        self._subscribers = (*self._subscribers, on_tick)

        def unsubscribe() -> None:
            self._subscribers = tuple(one for one in self._subscribers if one is not on_tick)

        return unsubscribe

    def submit(self, request: Request) -> None:
        """Queue a request; raises QueueFull or NotServing."""
        with self._inbox.changed:
            if self._state != "serving":
                raise NotServing(f"the server is {self._state}")
            self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """End a request; its pages are free within a step. Unknown ids are ignored."""
        self._inbox.cancel(request_id)

    def flush_cache(self) -> None:
        """At the next tick, evict the pages of the prefix caches that no sequence uses."""
        self._inbox.flush_cache()

    def rebalance(self) -> None:
        """Ask for a placement decision at the next tick."""
        self.rebalancer.ask()

    def open(self) -> None:
        """Accept requests from now on. The engine thread calls this after warm-up."""
        with self._inbox.changed:
            if self._state == "warming":
                self._state = "serving"

    def check_warming(self) -> None:
        """Raise Interrupted if the server is to stop. A long warm-up calls this between its parts."""
        if self._state != "warming":
            raise Interrupted

    def start(self, prepare: Callable[[], None] | None = None, on_end: Callable[[], object] | None = None) -> None:
        """Run the engine thread: ``prepare`` (warm-up), ticks until ``stop`` or a failure, and last ``on_end``."""
        self._thread = threading.Thread(target=self._run, args=(prepare, on_end), name="engines", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Accept no new requests; the others continue."""
        with self._inbox.changed:
            if self._state in ("warming", "serving"):
                self._state = "draining"

    def abandon(self, reason: str) -> None:
        """Fail for a reason outside the engine thread. ``stop`` will not wait for the thread, which may hang."""
        with self._inbox.changed:
            self._error = f"{reason}: {self._error}" if self._state == "failed" else reason
            self._state = "failed"
            self._thread = None

    def stop(self) -> None:
        """End the engine thread after its current tick and the steps in flight. Requests that are left fail."""
        with self._inbox.changed:
            self._stopping = True
            self._inbox.changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.rebalancer.close()

    def tick(self, now: float) -> None:
        """Run one turn of all engines at time ``now``; see the figure in ARCHITECTURE.md."""
        with self._ticking:
            mark, enqueued = self._timer.mark, False
            self._timer.begin()

            # Ask the devices for expert counts, if this tick will need them.
            trace_due = now - self._published >= self.config.dispatch.trace_period_s
            if trace_due or self.rebalancer.window_due:
                self._traffic.request_counts()

            # Bring requests to their engines. Grammars must have seen all tokens before their next step is planned.
            outputs = self._empty_inbox()
            mark("other")
            while self._in_flight and any(engine.waits_for_tokens for engine in self.engines):
                outputs += self._fetch()
            self._bound, failed = self._central.bind(now)
            outputs += failed

            # Plan and enqueue the next step, then fetch the oldest one. With ``ahead`` 1 the devices are never idle.
            plans = [engine.schedule(now) for engine in self.engines]
            mark("schedule")
            if any(plan.tokens for plan in plans):
                self._enqueue(plans)
                enqueued = True
            if len(self._in_flight) > self._runner.ahead or (self._in_flight and not enqueued):
                outputs += self._fetch()
            self._notify(now, outputs)

            # Placement, traces and queue lengths.
            self.rebalancer.tick(now)
            if trace_due:
                self._publish_traces(now)
            self._inbox.count_waiting([queue.waiting for queue in self._queues])
            mark("other")
            if enqueued:
                self._timer.end()

    def status(self) -> Status:
        """Return the state of the server between two ticks."""
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
                    phases=self._timer.times(),
                ),
                placement=self.rebalancer.status(),
            )

    def _enqueue(self, plans: list[Plan]) -> None:
        began = self._clock()
        pending = self._runner.enqueue(plans, self._timer.mark)
        owners = [engine.owners(plan) for engine, plan in zip(self.engines, plans, strict=True)]
        self._in_flight.append(StepInFlight(plans, owners, began, pending))
        self._step_tokens.observe(sum(plan.tokens for plan in plans))
        self._traffic.step_enqueued()
        self._timer.mark("enqueue")

    def _fetch(self) -> list[TokenDelta]:
        """Wait for the oldest step and commit its results to the engines."""
        step = self._in_flight.popleft()
        results = step.pending()
        now = self._clock()
        # The step began when it was enqueued, or when the devices had finished the step before it.
        self._step_seconds.observe(now - max(step.enqueued, self._fetched_at))
        self._fetched_at = now
        self._timer.mark("wait")
        outputs = []
        for engine, plan, owners, result in zip(self.engines, step.plans, step.owners, results, strict=True):
            outputs += engine.commit(plan, owners, result)
        self._step += 1
        self._traffic.step_fetched()
        self._timer.mark("commit")
        return outputs

    def _notify(self, now: float, outputs: list[TokenDelta]) -> None:
        """Call the subscribers with what has happened since the last call, if anything has."""
        pages = [events for engine in self.engines if (events := engine.drain_cache_events()) is not None]
        bound, self._bound = self._bound, []
        if bound or pages or outputs:
            news = TickNews(now, bound, pages, outputs)
            for on_tick in self._subscribers:
                on_tick(news)
        self._timer.mark("emit")

    def _empty_inbox(self) -> list[TokenDelta]:
        """Queue new requests and cancel others. Returns the ends of requests that could not be admitted."""
        mail, failed = self._inbox.take(), []
        for request in mail.requests:
            try:
                self._queues[self._inbox.queue_of(request)].add(request)
            except Exception as error:  # an error in one request must not end the others
                failed.append(admission_error(request, error))
        for request_id in mail.cancelled:
            any(queue.cancel(request_id) for queue in self._queues)
        if mail.flush:
            for engine in self.engines:
                engine.flush_cache()
        return failed

    def _publish_traces(self, now: float) -> None:
        pressure_S = self._traffic.pressure_S()
        self._traces = tuple(
            engine.trace(now, float(pressure)) for engine, pressure in zip(self.engines, pressure_S, strict=True)
        )
        self._published = now

    def _run(self, prepare: Callable[[], None] | None, on_end: Callable[[], object] | None) -> None:
        """Run as the engine thread."""
        try:
            if prepare is not None:
                prepare()
            self.open()
            while not self._stopping:
                self.tick(self._clock())
                with self._inbox.changed:
                    if not self._stopping and not self.has_work:
                        self._inbox.changed.wait(self.config.dispatch.trace_period_s)
            self._fetch_all()
            self._end("stopped", "the server has stopped")
        except Interrupted:
            self._end("stopped", "the server has stopped")
        except BaseException as error:
            self._end("failed", reason_of(error))
            raise
        finally:
            if on_end is not None:
                on_end()

    def _fetch_all(self) -> None:
        with self._ticking:
            while self._in_flight:
                outputs = self._fetch()
                self._notify(self._fetched_at, outputs)

    def _end(self, state: State, reason: str) -> None:
        """Set the final state and end every request that is left with an error, so that no client waits forever."""
        with self._inbox.changed:
            if self._state != "failed":  # not abandoned
                self._state, self._error = state, reason if state == "failed" else ""
            mail = self._inbox.take()
        left = [TokenDelta(request.id, (), finish_reason="error", error=reason) for request in mail.requests]
        for queue in self._queues:
            left += queue.fail_all(reason)
        self._notify(self._clock(), left)
