"""Errors to statuses; what services do with them is tested with the services."""

import asyncio

import grpc
import pytest

from gimbal_jax.serving.rpc.calls import MAX_DETAILS, STATUS_CODES, answering


class Context:
    """Of a call that can only be aborted."""

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


def test_each_error_has_its_status_and_a_length():
    for kind, code in STATUS_CODES.items():
        assert answer(kind("x" * 5000)) == ((code, "x" * MAX_DETAILS), grpc.aio.AbortError)
    assert len({*STATUS_CODES.values()}) == len(STATUS_CODES)


def test_what_nobody_expects_is_logged_and_not_told(caplog):
    (code, details), _ = answer(KeyError("secret"))
    assert code == grpc.StatusCode.INTERNAL and "secret" not in details
    assert "secret" in caplog.text


def test_a_client_that_left_is_no_error(caplog):
    assert answer(grpc.aio.InternalError("Failed to send")) == (None, asyncio.CancelledError)
    assert answer(grpc.aio.AbortError()) == (None, grpc.aio.AbortError)
    assert caplog.text == ""
