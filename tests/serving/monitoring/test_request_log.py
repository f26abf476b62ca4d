"""Lines of ended requests: their content, their safety against forged lines, and streams that are slow or broken."""

import io
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.serving.frontend.record import Origin
from gimbal_jax.serving.monitoring import request_log
from gimbal_jax.serving.monitoring.request_log import RequestLog, json_line, text_line
from tests.serving.core.ticked_core import wait_for
from tests.serving.records import ended

ENDED = 1_800_000_000.25
ANY_TEXT = st.text() | st.sampled_from(["a\nb", "\x1b[31m", "\u2028x", "\r\n{}", '"', "\\n", "x" * 10_000, "\udc80"])


def test_json_line_has_every_field():
    assert json.loads(json_line(ended(), ENDED)) == {
        "time": "2027-01-15T08:00:00.250Z",
        "request_id": "r-1",
        "client": "ipv4:127.0.0.1:4711",
        "traceparent": "",
        "outcome": "length",
        "error": "",
        "engine": 1,
        "rule": "least_score",
        "priority": 0,
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "output_tokens": 5,
        "queue_s": 0.25,
        "first_token_s": 1.0,
        "token_s": 0.5,
        "total_s": 3.0,
    }


def test_text_line_is_aligned_and_ends_with_texts_of_clients():
    never = ended(
        engine=None,
        rule="",
        outcome="refused",
        error="full",
        cached_tokens=None,
        queue_s=None,
        first_token_s=None,
        request_id="b",
    )
    lines = [text_line(ended(), ENDED), text_line(never, ENDED)]
    assert lines == [
        "2027-01-15T08:00:00.250Z length    engine   1 least_score  prompt     12 cached      8 output      5 "
        'queue    0.250s first    1.000s token    0.500s total    3.000s client "ipv4:127.0.0.1:4711" id "r-1"',
        "2027-01-15T08:00:00.250Z refused   engine   - -            prompt     12 cached      - output      5 "
        'queue         - first         - token         - total    3.000s client "ipv4:127.0.0.1:4711" id "b" '
        'error "full"',
    ]


@pytest.mark.parametrize("line", [json_line, text_line])
@given(request_id=ANY_TEXT, client=ANY_TEXT, error=ANY_TEXT, traceparent=ANY_TEXT)
def test_texts_of_clients_cannot_add_lines_or_control_characters(line, request_id, client, error, traceparent):
    text = line(ended(request_id=request_id, origin=Origin(client, traceparent), error=error), ENDED)
    assert text.isascii() and text.isprintable()
    assert len(text) < 8 * request_log.MAX_TEXT * 4
    if line is json_line:
        assert json.loads(text)["request_id"] == request_id[: request_log.MAX_TEXT]


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_has_a_line_for_each_record_in_order(form):
    stream = io.StringIO()
    log = RequestLog(stream, form, lambda: ENDED)
    for name in "abc":
        log(ended(request_id=name))
    log.close()
    line = json_line if form == "json" else text_line
    assert stream.getvalue().splitlines() == [line(ended(request_id=name), ENDED) for name in "abc"]
    assert log.lost == 0


class FullDisk(io.StringIO):
    full = True

    def write(self, text):
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_full_disk_loses_lines_with_one_warning(caplog):
    disk = FullDisk()
    log = RequestLog(disk, "json", lambda: ENDED)
    for _ in range(3):
        log(ended())
    wait_for(lambda: log.lost == 3)
    disk.full = False
    log(ended(request_id="late"))
    log.close()
    assert json.loads(disk.getvalue())["request_id"] == "late"
    assert [record.message for record in caplog.records] == [
        "requests are missing in the request log from now on: [Errno 28] No space left on device"
    ]


def test_closed_pipe_does_not_stop_the_log():
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    log = RequestLog(stream, "text", lambda: ENDED)
    log(ended())
    wait_for(lambda: log.lost == 1)
    log.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_stream_that_hangs_delays_no_request(monkeypatch):
    monkeypatch.setattr(request_log, "MAX_PENDING", 5)
    gate = threading.Event()

    class Hanging(io.StringIO):
        def write(self, text):
            gate.wait(60)
            return super().write(text)

    stream = Hanging()
    log = RequestLog(stream, "json", lambda: ENDED)
    for _ in range(20):
        log(ended())
    assert 14 <= log.lost <= 15  # five wait, and the thread may have one
    log.close(timeout_s=0.05)
    gate.set()
    wait_for(lambda: len(stream.getvalue().splitlines()) + log.lost == 20)
