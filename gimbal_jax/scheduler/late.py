"""Late binding (ours): requests wait in one queue until an engine's next step has room for their prefill.

Suffix ``_S``: one value per engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gimbal_jax.config import EngineConfig, QueueConfig
from gimbal_jax.scheduler.dispatch_decision import Decision, least, sum_S
from gimbal_jax.scheduler.queue import QueueItem, queue_key


class PendingRequest(NamedTuple):
    """A request in the central queue."""

    id: str
    """Key of the request in the core."""
    item: QueueItem
    """The request as its queue sees it; ``prefill_tokens`` is the whole prompt."""
    cached_tokens_S: tuple[int, ...]
    """Tokens of the prefill that each engine's prefix cache holds, in whole pages."""
    engine: int | None = None
    """The engine that the user chose; None if the user chose none."""
    kept_pages_S: tuple[int, ...] = ()
    """Cached pages of the prefill that no running sequence uses, so that they still count as free; empty if none."""


@dataclass(frozen=True)
class Capacity:
    """The resources that one engine has left for its next step."""

    decode_rows: int
    """Tokens of the step that decoding sequences take."""
    free_rows: int
    """Sequences that the engine may admit; 0 if it must not admit any."""
    free_pages: int
    """KV pages that are left after decode has taken its own."""
    prefills: tuple[QueueItem, ...]
    """Prefills that have started and are not complete."""


def bind(
    waiting: Sequence[PendingRequest],
    capacity_S: Sequence[Capacity],
    engine: EngineConfig,
    queue: QueueConfig,
    turn: int,
    now: float,
) -> list[tuple[PendingRequest, Decision]]:
    """Choose the requests that get an engine now, in the order of the queue.

    An engine has room for a request if three things hold. A row is free. The KV pages of the prefill and of one more
    token are free. The step can compute at least the first token of the request after the prefills that the queue
    runs before it, so no step stays emptier than necessary.

    The request gets the engine with room that has the least work: decode rows + prefill left + its own
    uncached tokens. Ties go to the first engine from ``turn`` on. If an engine that the request could use has no
    room for it, the engine accepts none of the later requests either, so no request starves.
    """
    keyed = [(queue_key(queue, request.item, now), request) for request in waiting]
    return bind_in_order(sorted(keyed, key=lambda pair: pair[0]), capacity_S, engine, queue, turn, now)


def bind_in_order(
    keyed: Iterable[tuple[tuple[float, ...], PendingRequest]],
    capacity_S: Sequence[Capacity],
    engine: EngineConfig,
    queue: QueueConfig,
    turn: int,
    now: float,
) -> list[tuple[PendingRequest, Decision]]:
    """Do what ``bind`` does, for requests with their ``queue_key`` in ascending order.

    Stops reading ``keyed`` as soon as no engine can accept another request.
    """
    engines = range(len(capacity_S))
    free_rows_S = [capacity.free_rows for capacity in capacity_S]
    free_pages_S = [capacity.free_pages for capacity in capacity_S]
    prefills_S = [
        [(queue_key(queue, item, now), item.prefill_tokens) for item in capacity.prefills] for capacity in capacity_S
    ]
    # An engine that is full now has no room for the first request of the queue either, so it accepts none.
    open_engines = {s for s in engines if free_rows_S[s]}
    bound: list[tuple[PendingRequest, Decision]] = []
    if not open_engines:
        return bound
    for key, request in keyed:
        # The request's needs on each engine: tokens to compute and pages to take.
        prompt, cached_S = request.item.prefill_tokens, request.cached_tokens_S
        tokens_S = tuple(max(1, prompt - cached) for cached in cached_S)
        kept_S = request.kept_pages_S or (0,) * len(capacity_S)
        pages_S = [
            -(-(prompt + 1) // engine.page_size) - cached // engine.page_size + kept
            for cached, kept in zip(cached_S, kept_S, strict=True)
        ]
        # The engines that it may use, and those of them that have room.
        wanted = open_engines if request.engine is None else open_engines & {request.engine}
        fitting = {
            s
            for s in wanted
            if free_rows_S[s]
            and pages_S[s] <= free_pages_S[s]
            and _step_has_room(
                engine, capacity_S[s].decode_rows, [tokens for other, tokens in prefills_S[s] if other <= key]
            )
        }
        # Without room the request keeps its engines for itself.
        if not fitting:
            open_engines = open_engines - wanted
            if not open_engines:
                break
            continue
        # Choose the engine with the least work, and take the request's needs off its capacity.
        terms = {
            "decode": tuple(capacity.decode_rows for capacity in capacity_S),
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
    """Return whether a step can begin another prefill after the prefills ``before``, given by their tokens."""
    tiles = sum(-(-tokens // engine.tile) for tokens in before)
    return decode_rows + sum(before) < engine.token_budget and tiles < engine.token_budget // engine.tile
