"""Late binding (ours): requests wait in one queue until an engine's next step has room for their prefill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.scheduler.dispatch_decision import Decision, least, sum_S
from gimbal_jax.scheduler.queue import Job, queue_key


class Unbound(NamedTuple):
    """A request in the central queue."""

    id: str
    job: Job
    """``prefill_tokens`` is its whole prompt."""
    cached_tokens_S: tuple[int, ...]
    """Tokens of its prefill that each engine's prefix cache holds, in whole pages."""
    engine: int | None = None
    """The engine that the user chose."""
    kept_pages_S: tuple[int, ...] = ()
    """Pages of those tokens that no sequence uses: free ones as long as nobody takes them. Empty if there are none."""


@dataclass(frozen=True)
class Room:
    """What one engine can still take into the step to come."""

    decode_rows: int
    """Tokens of the step that are taken by sequences that decode."""
    free_rows: int
    """Sequences that it may let in; 0 where it must not let any in."""
    free_pages: int
    """KV pages that are left when decode has taken its own."""
    prefills: tuple[Job, ...]
    """Prefills that have started."""


def bind(
    waiting: Sequence[Unbound],
    rooms_S: Sequence[Room],
    engine: EngineConfig,
    queue: QueueConfig,
    turn: int,
    now: float,
) -> list[tuple[Unbound, Decision]]:
    """Requests to give to an engine now, in the order of the queue.

    An engine has room for a request if a row is free, the pages of its prefill and of one token
    more, and if the step can compute at least the first of its tokens beside the prefills that the
    queue runs before it: so no step stays emptier than it must. Of the engines with room it gets
    the one with the least work: decode rows + prefill left + its own uncached tokens; ties go in
    turn, from ``turn`` on. An engine that a request would like and cannot have takes none of those
    behind it, so that no request starves.
    """
    keyed = [(queue_key(queue, request.job, now), request) for request in waiting]
    return bind_in_order(sorted(keyed, key=lambda one: one[0]), rooms_S, engine, queue, turn, now)


def bind_in_order(
    keyed: Iterable[tuple[tuple[float, ...], Unbound]],
    rooms_S: Sequence[Room],
    engine: EngineConfig,
    queue: QueueConfig,
    turn: int,
    now: float,
) -> list[tuple[Unbound, Decision]]:
    """``bind`` for requests with their ``queue_key``, smallest first. Takes no more of them than it must."""
    engines = range(len(rooms_S))
    free_rows_S = [room.free_rows for room in rooms_S]
    free_pages_S = [room.free_pages for room in rooms_S]
    prefills_S = [[(queue_key(queue, job, now), job.prefill_tokens) for job in room.prefills] for room in rooms_S]
    open_engines = {s for s in engines if free_rows_S[s]}  # who is full now is full for the first in the queue too
    bound: list[tuple[Unbound, Decision]] = []
    if not open_engines:
        return bound
    for key, request in keyed:
        prompt, cached_S = request.job.prefill_tokens, request.cached_tokens_S
        tokens_S = tuple(max(1, prompt - cached) for cached in cached_S)
        kept_S = request.kept_pages_S or (0,) * len(rooms_S)
        pages_S = [
            -(-(prompt + 1) // engine.page_size) - cached // engine.page_size + kept
            for cached, kept in zip(cached_S, kept_S, strict=True)
        ]
        wanted = open_engines if request.engine is None else open_engines & {request.engine}
        fitting = {
            s
            for s in wanted
            if free_rows_S[s]
            and pages_S[s] <= free_pages_S[s]
            and _step_has_room(
                engine, rooms_S[s].decode_rows, [tokens for other, tokens in prefills_S[s] if other <= key]
            )
        }
        if not fitting:
            open_engines = open_engines - wanted
            if not open_engines:
                break
            continue
        terms = {
            "decode": tuple(room.decode_rows for room in rooms_S),
            "prefill": tuple(sum(tokens for _, tokens in prefills) for prefills in prefills_S),
            "uncached": tokens_S,
            "no_room": tuple(0 if s in fitting else math.inf for s in engines),
        }
        chosen = least(sum_S(terms), turn)
        bound.append((request, Decision(chosen, "late" if request.engine is None else "pinned", terms)))
        free_rows_S[chosen] -= 1
        free_pages_S[chosen] -= pages_S[chosen]
        prefills_S[chosen].append((key, tokens_S[chosen]))
    return bound


def _step_has_room(engine: EngineConfig, decode_rows: int, before: Sequence[int]) -> bool:
    """Whether a step can begin another prefill after the prefills ``before`` it."""
    tiles = sum(-(-tokens // engine.tile) for tokens in before)
    return decode_rows + sum(before) < engine.token_budget and tiles < engine.token_budget // engine.tile
