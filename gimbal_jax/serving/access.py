"""Who calls, and whether they may: keys, certificates and limits of the gRPC server."""

from __future__ import annotations

import grpc

from gimbal_jax.serving.request_record import Origin

TRACEPARENT_KEY = "traceparent"


def origin_of(context: grpc.aio.ServicerContext) -> Origin:
    """Where a call came from."""
    metadata = dict(context.invocation_metadata() or ())
    return Origin(context.peer(), str(metadata.get(TRACEPARENT_KEY, "")))
