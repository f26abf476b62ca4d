"""Common parts of the gRPC services: errors as statuses, and log probabilities as messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.exceptions import (
    DuplicateRequest,
    FellBehind,
    GenerationFailed,
    InvalidField,
    NotKept,
    NotServing,
    Precondition,
    QueueFull,
    Unsupported,
)
from gimbal_jax.serving.engine.request import TokenLogprobs

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    Precondition: grpc.StatusCode.FAILED_PRECONDITION,
    DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotServing: grpc.StatusCode.UNAVAILABLE,
    GenerationFailed: grpc.StatusCode.INTERNAL,
    NotKept: grpc.StatusCode.OUT_OF_RANGE,
    FellBehind: grpc.StatusCode.DATA_LOSS,
}
MAX_DETAILS = 1000
"""Most characters of an error that a client gets. A status travels in a header of limited length."""

type Context = grpc.aio.ServicerContext

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """End the call with the status of the error that the block raises.

    An unexpected error is logged, and the client gets INTERNAL without its text.
    """
    try:
        yield
    except tuple(STATUS_CODES) as error:
        await context.abort(STATUS_CODES[type(error)], str(error)[:MAX_DETAILS])
    except grpc.aio.AbortError:
        raise  # raised by ``abort``, which has ended the call
    except grpc.aio.InternalError as error:
        # A message could not be sent. The client has left, and gRPC has not cancelled the handler yet.
        raise asyncio.CancelledError from error
    except Exception:
        _log.exception("a call failed")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error: see the server's log")


def output_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int | None
) -> pb.OutputLogProbs | None:
    """Return the log probabilities of the tokens. ``top`` is the requested number of alternatives; None gives None."""
    if top is None:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.chosen for entry in logprobs],
        token_ids=token_ids,
        top_logprobs=_tops(logprobs, top) if top else (),
    )


def input_logprobs(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int | None
) -> pb.InputLogProbs | None:
    """Return one entry for each token of the prompt. The first has no value. ``top`` as in ``output_logprobs``."""
    if top is None:
        return None
    values = [pb.InputTokenLogProb(value=entry.chosen) for entry in logprobs]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *values],
        token_ids=prompt,
        top_logprobs=[pb.TopLogProbs(), *_tops(logprobs, top)] if top else (),
    )


def _tops(logprobs: Sequence[TokenLogprobs], top: int) -> list[pb.TopLogProbs]:
    return [pb.TopLogProbs(values=entry.top_values[:top], token_ids=entry.top_ids[:top]) for entry in logprobs]
