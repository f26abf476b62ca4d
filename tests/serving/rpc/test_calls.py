"""Errors as statuses. The tests of the services cover which errors they raise."""

import asyncio

import grpc
import pytest

from gimbal_jax.serving.rpc.calls import MAX_DETAILS, STATUS_CODES, answering


class Context:
    """Context of a call that can only be aborted."""

    def __init__(self):
        self.aborted = None

    async def abort(self, code, details):
        self.aborted = code, details
        raise grpc.aio.AbortError


def answer(error):
    async def call(context):
        async with answering(context):
            raise error

    context = Context()
    with pytest.raises((grpc.aio.AbortError, asyncio.CancelledError)) as raised:
        asyncio.run(call(context))
    return context.aborted, raised.type


def test_each_error_has_its_status_and_limited_details():
    for kind, code in STATUS_CODES.items():
        assert answer(kind("x" * 5000)) == ((code, "x" * MAX_DETAILS), grpc.aio.AbortError)
    assert len({*STATUS_CODES.values()}) == len(STATUS_CODES)


def test_unexpected_error_is_logged_but_not_sent(caplog):
    (code, details), _ = answer(KeyError("secret"))
    assert code == grpc.StatusCode.INTERNAL and "secret" not in details
    assert "secret" in caplog.text


def test_client_that_left_is_not_logged(caplog):
    assert answer(grpc.aio.InternalError("Failed to send")) == (None, asyncio.CancelledError)
    assert answer(grpc.aio.AbortError()) == (None, grpc.aio.AbortError)
    assert caplog.text == ""
