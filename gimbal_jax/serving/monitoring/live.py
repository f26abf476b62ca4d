"""The live view: one snapshot for /dashboard and ``gimbal top``, and the page that shows it."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections import deque
from importlib import resources

from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.monitoring import live_snapshot as parts
from gimbal_jax.serving.monitoring.live_format import TEXT, Snapshot
from gimbal_jax.version import __version__

FRESH_S = 0.5
"""Seconds that one snapshot serves all viewers."""
ENDED_REQUESTS = 20_000
"""Requests remembered for latencies: five minutes at 66 per second."""
ROWS = 20
"""Requests shown as rows."""
SAMPLE_S = 1.0
"""Seconds between samples of the token counts."""
SAMPLES = 400

PAGE = (resources.files("gimbal_jax.serving.monitoring") / "dashboard.html").read_bytes()
"""/dashboard: HTML with its style and script; it fetches /dashboard/data once a second."""


def _policy(page: str) -> str:
    """Return the Content-Security-Policy that allows only the page's own style and script, by their hashes."""
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
    """Remembers ended requests and token counts, and makes snapshots of the server."""

    def __init__(self, frontend: Frontend, model: str = "") -> None:
        """``model``: name to show. Make the view when the server starts, because its uptime runs from here."""
        self._frontend = frontend
        self._model = model[:TEXT]
        self._start = frontend.clock()
        self._ended: deque[parts.EndedRequest] = deque(maxlen=ENDED_REQUESTS)
        self._records: deque[RequestRecord] = deque(maxlen=ROWS)
        self._samples: deque[parts.TokenSample] = deque([parts.TokenSample(self._start, 0, 0)], maxlen=SAMPLES)
        self._sampling = threading.Lock()
        self._making = threading.Lock()
        self._made: Snapshot | None = None

    def observe(self, record: RequestRecord) -> None:
        """Remember a request that ended. Call it on the event loop."""
        self._ended.append(parts.ended_request(record))
        self._records.append(record)
        self._sample()

    def snapshot(self) -> Snapshot:
        """Return the server as JSON data, at most ``FRESH_S`` old unless the engine thread is slow.

        Any thread except the event loop's may call this, because it may wait for the end of a step. Only one caller
        waits. The others get the last snapshot, whose ``time`` shows its age.
        """
        made = self._made
        if made is not None and self._frontend.clock() - made["time"] < FRESH_S:
            return made
        if not self._making.acquire(blocking=made is None):
            assert made is not None
            return made
        try:
            if self._made is None or self._made is made:  # no other thread made one while this one waited
                self._made = self._make()
            return self._made
        finally:
            self._making.release()

    def _sample(self) -> parts.TokenSample:
        """Return the tokens since start; keep them once per ``SAMPLE_S`` for the history."""
        with self._sampling:
            counters = self._frontend.counters
            sample = parts.TokenSample(self._frontend.clock(), counters.prompt_tokens, counters.generated_tokens)
            if sample.time - self._samples[-1].time >= SAMPLE_S:
                self._samples.append(sample)
            return sample

    def _make(self) -> Snapshot:
        core, dispatcher = self._frontend.core, self._frontend.dispatcher
        status, config = core.status(), core.config
        # Copies, because the event loop appends to these meanwhile.
        sample = self._sample()
        now, ended, decisions = sample.time, self._ended.copy(), dispatcher.recent.copy()
        samples = [*(old for old in self._samples.copy() if old.time < now), sample]
        latency = parts.summarise_latency(ended, now)
        compensation_S = dispatcher.compensation_after(status.traces)
        return {
            "time": now,
            "model": self._model,
            "version": __version__,
            "state": status.state,
            "uptime_s": now - self._start,
            "warnings": parts.active_warnings(status, latency["outcomes"], config, now),
            "mesh": {"dp": config.mesh.dp, "tp": config.mesh.tp, "ranks": config.mesh.ranks},
            "policies": {
                "dispatch": config.dispatch.policy,
                "queue": config.queue.policy,
                "placement": config.placement.policy,
            },
            "token_budget": config.engine.token_budget,
            "close_tokens": config.dispatch.close_scores * config.engine.token_budget,
            "step": status.steps.count,
            "streaming": self._frontend.active,
            "central_queue": core.central_queue,
            "preemptions": status.preemptions,
            "engines": parts.engine_rows(status, compensation_S, decisions, config, now),
            "dispatch": parts.summarise_dispatch(dict(self._frontend.counters.rules), decisions, now),
            "rates": parts.recent_rates(samples, now),
            "latency": latency,
            "history": parts.bucket_history(ended, samples, now),
            "experts": parts.map_experts(status.placement, core.model.moe_layers, config.mesh.ranks),
            "placement": parts.summarise_placement(status.placement, now),
            "requests": [parts.request_row(record, now) for record in reversed(self._records.copy())],
        }
