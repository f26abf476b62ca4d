"""Admission of a request: dispatch to an engine, then the core's queue. Shared by the frontend and the simulator."""

from __future__ import annotations

from dataclasses import replace

from gimbal_jax.scheduler.dispatcher import Dispatcher, Ticket
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.engine.request import Request


def admit(
    core: EngineCore, dispatcher: Dispatcher, request: Request, cached_tokens_S: tuple[int, ...] | None = None
) -> Ticket:
    """Dispatch a request by the latest traces, submit it to the core, and return its ticket.

    ``request.engine`` is the engine that the client chose; if it is None, the dispatcher chooses one. Dispatch sets
    ``request.sequence``. ``cached_tokens_S`` gives the prompt tokens that the prefix cache of each engine holds, by
    default none. Raises what ``core.submit`` raises, with the ticket released, or ValueError for an engine that does
    not exist.
    """
    dispatcher.observe(core.traces)
    ticket = dispatcher.dispatch(
        request.label, len(request.prompt), request.arrival, request.engine, cached_tokens_S=cached_tokens_S
    )
    try:
        core.submit(replace(request, engine=ticket.decision.engine, sequence=ticket.sequence))
    except Exception:
        ticket.release()
        raise
    return ticket
