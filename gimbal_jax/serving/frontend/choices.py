"""One validated request run as its n sequences, with their text and their stop strings."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from gimbal_jax.serving.engine.request import FinishReason, Grammar, Output, SamplingParams, TokenLogprobs
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import NO_ORIGIN, Origin
from gimbal_jax.serving.text.stops import Decoder, OutputText


@dataclass(slots=True)  # not frozen: one is made for every token
class Piece:
    """News of one choice. The last piece of each has a finish_reason."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """What may be shown now; it may come later than its tokens. Empty without a decoder."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    """The stop token or stop string that ended it. The token is not among the tokens, those of the string are."""
    cached_tokens: int = 0
    """With the first tokens: prompt tokens that the prefix cache held."""


async def run_choices(
    frontend: Frontend,
    request_id: str,
    generation: Generation,
    new_decoder: Callable[[], Decoder] | None = None,
    *,
    priority: int = 0,
    origin: Origin = NO_ORIGIN,
) -> AsyncGenerator[tuple[int, Piece]]:
    """Yield (index, news) of the choices until all have ended.

    ``new_decoder`` makes what turns the tokens of one output into text; without one there is no text,
    and there must be no stop strings. What is not taken is kept, at most max_tokens tokens a choice.
    Leaving the iteration early cancels all choices; the error of one ends all. Raises as ``Frontend.generate``.
    """
    # As vLLM names them.
    ids = [f"{index}_{request_id}" for index in range(generation.n)] if generation.n > 1 else [request_id]
    news: dict[int, list[Piece]] = {}
    arrived = asyncio.Event()

    async def pieces(index: int) -> AsyncGenerator[Piece]:
        outputs = frontend.generate(
            ids[index],
            generation.prompt,
            # vLLM's rule for seeds.
            replace(generation.sampling, seed=(generation.sampling.seed + index) % 2**32),
            engine=generation.engine,
            priority=priority,
            grammar=generation.new_grammar() if generation.new_grammar else None,
            page_hashes=generation.page_hashes,
            may_stop=bool(generation.stops),
            origin=origin,
        )
        text = None
        if new_decoder is not None:
            min_tokens = generation.sampling.min_tokens
            text = OutputText(new_decoder(), generation.stops, generation.include_stop, min_tokens)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                piece = _piece(output, text)
                if isinstance(piece.stop, str):
                    frontend.stop(ids[index])
                yield piece
                if piece.finish_reason is not None:
                    return

    async def run(index: int) -> None:
        async with contextlib.aclosing(pieces(index)) as taken:
            async for piece in taken:
                news.setdefault(index, []).append(piece)
                arrived.set()

    with frontend.group(request_id, ids):
        if generation.n == 1 and not generation.stops:  # no task between: it would be woken for every token
            async with contextlib.aclosing(pieces(0)) as taken:
                async for piece in taken:
                    yield 0, piece
            return
        tasks = [asyncio.create_task(run(index)) for index in range(generation.n)]
        for task in tasks:
            task.add_done_callback(lambda task: arrived.set())
        try:
            live = generation.n
            while live:
                await arrived.wait()
                arrived.clear()
                for task in tasks:
                    if task.done():
                        task.result()  # raises what ended it
                while news:
                    index = next(iter(news))
                    piece = _merge(news.pop(index))
                    live -= piece.finish_reason is not None
                    yield index, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _piece(output: Output, text: OutputText | None) -> Piece:
    """News with their text, which may end the output earlier than its tokens do."""
    piece = Piece(
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=output.finish_reason,
        stop=output.stop_token_id,
        cached_tokens=output.cached_tokens,
    )
    if text is None:
        return piece
    piece.text, count = text.add(output.token_ids)
    if text.matched is not None:
        piece.token_ids, piece.logprobs = output.token_ids[:count], output.logprobs[:count]
        piece.finish_reason, piece.stop = "stop", text.matched
    elif output.finish_reason is not None:
        piece.text += text.rest()
    return piece


def _merge(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return Piece(
        tuple(itertools.chain.from_iterable(piece.token_ids for piece in pieces)),
        "".join(piece.text for piece in pieces),
        tuple(itertools.chain.from_iterable(piece.logprobs for piece in pieces)),
        pieces[0].prompt_logprobs,
        last.finish_reason,
        last.stop,
        pieces[0].cached_tokens,
    )


@dataclass(frozen=True)
class Generation:
    """A validated request: one prompt, and ``n`` outputs to it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    stops: tuple[str, ...] = ()
    """Strings that end an output; only with a tokenizer."""
    include_stop: bool = False
    """Leave the stop string in the text."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text, in which stop strings are searched too."""
    new_grammar: Callable[[], Grammar] | None = None
    engine: int | None = None
    """The engine that the client pinned the request to."""
    page_hashes: tuple[bytes, ...] = ()
    """Of the prompt, where the prefix cache may know its beginning."""
