"""Log with one line for every ended request, as aligned text or as JSON."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from gimbal_jax.serving.frontend.record import RequestRecord

MAX_PENDING = 10_000
"""Most lines that wait for a slow disk or pipe. Further lines are dropped."""
MAX_TEXT = 256
"""Most characters kept of each text from a client, and of errors that may quote one."""

_log = logging.getLogger(__name__)


def json_line(record: RequestRecord, ended: float) -> str:
    """Return a record as one JSON object in ASCII. ``ended`` is the end of the request, in Unix seconds."""
    fields: dict[str, Any] = {
        "time": _timestamp(ended),
        "request_id": record.request_id[:MAX_TEXT],
        "client": record.origin.client[:MAX_TEXT],
        "traceparent": record.origin.traceparent[:MAX_TEXT],
        "outcome": record.outcome,
        "error": record.error[:MAX_TEXT],
        "engine": record.engine,
        "rule": record.rule,
        "priority": record.priority,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "queue_s": _rounded(record.queue_s),
        "first_token_s": _rounded(record.first_token_s),
        "token_s": _rounded(record.token_s),
        "total_s": _rounded(record.total_s),
    }
    return json.dumps(fields)


def text_line(record: RequestRecord, ended: float) -> str:
    """Return a record as columns of fixed width. Texts from clients come last, quoted as in JSON."""
    engine = "-" if record.engine is None else str(record.engine)
    columns = [
        f"{_timestamp(ended)} {record.outcome:9} engine {engine:>3} {record.rule or '-':12}",
        f"prompt {record.prompt_tokens:6} cached {_count(record.cached_tokens)} output {record.output_tokens:6}",
        f"queue {_seconds(record.queue_s)} first {_seconds(record.first_token_s)}",
        f"token {_seconds(record.token_s)} total {_seconds(record.total_s)}",
        f"client {_quoted(record.origin.client)} id {_quoted(record.request_id)}",
    ]
    if record.error:
        columns.append(f"error {_quoted(record.error)}")
    return " ".join(columns)


class RequestLog:
    """Writer of the lines. Call it with every record, on one thread.

    A separate thread writes, so that a slow disk or pipe does not delay requests. ``lost`` counts the lines that
    could not be written.
    """

    def __init__(self, stream: TextIO, form: Literal["text", "json"], wall_clock: Callable[[], float]) -> None:
        self.lost = 0
        self._stream, self._wall_clock = stream, wall_clock
        self._line = json_line if form == "json" else text_line
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_PENDING)
        self._thread = threading.Thread(target=self._write_all, name="request log", daemon=True)
        self._thread.start()

    def __call__(self, record: RequestRecord) -> None:
        try:
            self._lines.put_nowait(self._line(record, self._wall_clock()) + "\n")
        except queue.Full:
            self._lose("the stream is too slow")

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the waiting lines, for at most ``timeout_s``. The stream stays open."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError) as error:  # ValueError: the stream has been closed
                self._lose(str(error))

    def _lose(self, why: str) -> None:
        if self.lost == 0:
            _log.warning("requests are missing in the request log from now on: %s", why)
        self.lost += 1


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _seconds(seconds: float | None) -> str:
    return f"{'-' if seconds is None else f'{seconds:.3f}s':>9}"


def _count(tokens: int | None) -> str:
    return f"{'-' if tokens is None else tokens:>6}"


def _quoted(text: str) -> str:
    return json.dumps(text[:MAX_TEXT])
