"""The live view: one snapshot for /dashboard and ``gimbal top``, and the page that shows it."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections import deque
from importlib import resources
from typing import Any

from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.monitoring import live_snapshot as parts
from gimbal_jax.version import __version__

FRESH_S = 0.5
"""A snapshot serves every viewer for this long."""
ENDED_REQUESTS = 20_000
"""Requests remembered for latencies: five minutes at 66 a second."""
ROWS = 20
"""Requests shown as rows."""
SAMPLE_S = 1.0
SAMPLES = 400

PAGE = (resources.files("gimbal_jax.serving.monitoring") / "dashboard.html").read_bytes()
"""/dashboard: HTML with its style and script; it fetches /dashboard/data once a second."""


def _policy(page: str) -> str:
    """The Content-Security-Policy under which the page works, and nothing else: its own style and script by hash."""
    hashes = {}
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


PAGE_POLICY = _policy(PAGE.decode())
"""Content-Security-Policy to send with ``PAGE``."""


class LiveView:
    """Remembers ended requests and token counts, and sums up the server for whoever looks."""

    def __init__(self, frontend: Frontend, model: str = "") -> None:
        """``model`` is the name shown. Made when the server starts: its uptime runs from here."""
        self._frontend = frontend
        self._model = model[: parts.TEXT]
        self._start = frontend.clock()
        self._ended: deque[parts.EndedRequest] = deque(maxlen=ENDED_REQUESTS)
        self._rows: deque[dict[str, Any]] = deque(maxlen=ROWS)
        self._samples: deque[parts.TokenSample] = deque([parts.TokenSample(self._start, 0, 0)], maxlen=SAMPLES)
        self._sampling = threading.Lock()
        self._making = threading.Lock()
        self._made: dict[str, Any] | None = None

    def observe(self, record: RequestRecord) -> None:
        """Remember a request that ended. Call it on the event loop."""
        self._ended.append(parts.ended_request(record))
        self._rows.append(parts.request_row(record))
        self._sample()

    def snapshot(self) -> dict[str, Any]:
        """The server as JSON can hold it, at most ``FRESH_S`` old unless the engine thread is slow.

        Any thread but the event loop's may ask: it waits for the end of a step. Only one of them waits: the
        others get the last snapshot, and see its age by ``time``.
        """
        made = self._made
        if made is not None and self._frontend.clock() - made["time"] < FRESH_S:
            return made
        if not self._making.acquire(blocking=made is None):
            assert made is not None
            return made
        try:
            if self._made is None or self._made is made:  # nobody made one while this thread waited
                self._made = self._make()
            return self._made
        finally:
            self._making.release()

    def _sample(self) -> parts.TokenSample:
        """Tokens by now, kept once a second for the history."""
        with self._sampling:
            counters = self._frontend.counters
            sample = parts.TokenSample(self._frontend.clock(), counters.prompt_tokens, counters.generated_tokens)
            if sample.time - self._samples[-1].time >= SAMPLE_S:
                self._samples.append(sample)
            return sample

    def _make(self) -> dict[str, Any]:
        core, dispatcher = self._frontend.core, self._frontend.dispatcher
        status, config = core.status(), core.config
        sample = self._sample()
        now, ended, decisions = sample.time, self._ended.copy(), dispatcher.recent.copy()
        samples = [*(old for old in self._samples.copy() if old.time < now), sample]
        latency = parts.latency(ended, now)
        engines = parts.engines(status, dispatcher.compensation_after(status.traces), decisions, config, now)
        return {
            "time": now,
            "model": self._model,
            "version": __version__,
            "state": status.state,
            "uptime_s": now - self._start,
            "warnings": parts.warnings(status, latency["outcomes"], config, now),
            "mesh": {"dp": config.mesh.dp, "tp": config.mesh.tp, "ranks": config.mesh.ranks},
            "policies": {
                "dispatch": config.dispatch.policy,
                "queue": config.queue.policy,
                "placement": config.placement.policy,
            },
            "token_budget": config.engine.token_budget,
            "close_tokens": config.dispatch.close_scores * config.engine.token_budget,
            "step": status.step,
            "streaming": self._frontend.active,
            "central_queue": core.central_queue,
            "preemptions": status.preemptions,
            "engines": engines,
            "dispatch": parts.dispatch(dict(self._frontend.counters.rules), decisions, now),
            "rates": parts.recent_rates(samples, now),
            "latency": latency,
            "history": parts.history(ended, samples, now),
            "experts": parts.experts(status, core.model.moe_layers, config.mesh.ranks),
            "placement": parts.placement(status, now),
            "requests": [
                {**{name: value for name, value in row.items() if name != "end"}, "age_s": now - row["end"]}
                for row in reversed(self._rows.copy())
            ],
        }
