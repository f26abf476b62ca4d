"""A validated request, and its run as n sequences with their text and stop strings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from gimbal_jax.serving.engine.request import Grammar, SamplingParams, TokenDelta
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import NO_ORIGIN, Origin
from gimbal_jax.serving.text.stops import Decoder, OutputText


@dataclass(frozen=True)
class Generation:
    """A validated request: one prompt and its ``n`` outputs."""

    prompt: tuple[int, ...]
    """Token ids."""
    sampling: SamplingParams
    n: int = 1
    stops: tuple[str, ...] = ()
    """Strings that end an output; they need a tokenizer."""
    include_stop: bool = False
    """Whether the text keeps the stop string at its end."""
    skip_special_tokens: bool = False
    """Whether the text, and so the search for stop strings, leaves out special tokens."""
    new_grammar: Callable[[], Grammar] | None = None
    """Function that makes a Grammar for one sequence; None without a constraint."""
    engine: int | None = None
    """Engine that the client chose; None leaves the choice to the server."""
    page_hashes: tuple[bytes, ...] = ()
    """Hashes of the prompt's full pages; empty if it must not share pages."""


async def run_choices(
    frontend: Frontend,
    request_id: str,
    generation: Generation,
    new_decoder: Callable[[], Decoder] | None = None,
    *,
    priority: int = 0,
    origin: Origin = NO_ORIGIN,
) -> AsyncGenerator[tuple[int, TokenDelta]]:
    """Yield (index, delta) of the choices until all have ended.

    ``new_decoder`` makes the decoder of one output's tokens; None gives deltas without text, and allows no stop
    strings. Deltas that are not taken are kept, at most max_tokens tokens for each choice. Leaving the iteration early
    cancels all choices, and an error of one ends all. Raises DuplicateRequest, and the errors of ``Frontend.generate``.
    """
    # vLLM's names and seeds of choices.
    labels = [f"{index}_{request_id}" for index in range(generation.n)] if generation.n > 1 else [request_id]
    seeds = [(generation.sampling.seed + index) % 2**32 for index in range(generation.n)]
    arrived = asyncio.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(frontend.group(request_id, labels))
        streams = {}
        for index, (label, seed) in enumerate(zip(labels, seeds, strict=True)):
            stream = frontend.generate(
                label,
                generation.prompt,
                replace(generation.sampling, seed=seed),
                engine=generation.engine,
                priority=priority,
                grammar=generation.new_grammar() if generation.new_grammar else None,
                page_hashes=generation.page_hashes,
                text=None if new_decoder is None else _new_text(generation, new_decoder()),
                arrived=arrived,
                origin=origin,
            )
            streams[index] = stack.enter_context(stream)
        while streams:
            await arrived.wait()
            arrived.clear()
            for index, stream in list(streams.items()):
                delta = stream.take()
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    del streams[index]
                yield index, delta


def _new_text(generation: Generation, decoder: Decoder) -> OutputText:
    return OutputText(decoder, generation.stops, generation.include_stop, generation.sampling.min_tokens)
