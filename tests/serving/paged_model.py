"""A small deterministic model that reads its context from the pages, as attention does."""

import zlib

import numpy as np

from gimbal_jax.config import EngineConfig
from gimbal_jax.serving.engine import max_sequence_tokens
from gimbal_jax.serving.plan import Chunk, NextToken, Plan
from gimbal_jax.serving.request import Request, SamplingParams, TokenLogprobs

VOCAB = 7


def request(name, prompt, max_tokens=4, arrival=0.0, sequence=1, **sampling) -> Request:
    prompt = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(str(name), prompt, SamplingParams(max_tokens=max_tokens, **sampling), arrival, 0, sequence)


def next_token(context, seed, suppress) -> int:
    token = zlib.crc32(repr((tuple(context), seed)).encode()) % VOCAB
    while token in suppress:
        token = (token + 1) % VOCAB
    return token


def alone(request: Request, config: EngineConfig) -> tuple[tuple[int, ...], str]:
    """What the request must give, whatever else runs: its tokens and how it ends."""
    params, out = request.sampling, list[int]()
    while len(out) < min(params.max_tokens, max_sequence_tokens(config) - len(request.prompt)):
        early = len(out) < params.min_tokens
        token = next_token((*request.prompt, *out), params.seed, params.stop_token_ids if early else ())
        if token in params.stop_token_ids:
            return tuple(out), "stop"
        out.append(token)
    return tuple(out), "length"


class PagedModel:
    """Keeps the tokens themselves as its "keys and values"."""

    def __init__(self, config: EngineConfig):
        self.cache = np.full((config.num_pages, config.page_size), -1)

    def __call__(self, plan: Plan) -> list[NextToken | None]:
        page_size = self.cache.shape[1]
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                self.cache[chunk.pages[position // page_size], position % page_size] = token
        return [self._choose(chunk) for chunk in plan.chunks]

    def _choose(self, chunk: Chunk) -> NextToken | None:
        if chunk.sampling is None:
            return None
        context = self.cache[chunk.pages].reshape(-1)[: chunk.start + len(chunk.tokens)].tolist()
        token = next_token(context, chunk.sampling.seed, chunk.suppress)
        return NextToken(token, None if chunk.sampling.logprobs is None else TokenLogprobs(-0.5, (token,), (-0.5,)))
