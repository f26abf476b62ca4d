"""A small deterministic model that reads its context from the pages, as attention does."""

import zlib

import numpy as np

from gimbal_jax.config import EngineConfig
from gimbal_jax.serving.engine.limits import max_sequence_tokens
from gimbal_jax.serving.engine.plan import ON_DEVICE, SEED, Plan, StepResult
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import Request, SamplingParams, TokenLogprobs

VOCAB = 7


def request(name, prompt, max_tokens=4, arrival=0.0, sequence=1, page_size=None, **sampling) -> Request:
    """It may share its beginning with others if it is told the ``page_size``."""
    prompt = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    hashes = page_hashes(prompt, page_size) if page_size else ()
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(str(name), prompt, params, arrival, 0, sequence, page_hashes=hashes, label=str(name))


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
    """Keeps the tokens themselves as its "keys and values", and the last token of each row."""

    def __init__(self, config: EngineConfig):
        self.cache = np.full((config.num_pages, config.page_size), -1)
        self.last_R = np.full(config.max_rows, -1)

    def __call__(self, plan: Plan) -> StepResult:
        """All writes come first, as in each layer of a step."""
        decode, page_size = plan.decode, self.cache.shape[1]
        token_D = np.where(decode.token_D == ON_DEVICE, self.last_R[decode.row_D], decode.token_D)
        page_D = decode.page_table_DM[np.arange(len(decode)), decode.start_D // page_size]
        self.cache[page_D, decode.start_D % page_size] = token_D
        for chunk in plan.prefill:
            positions = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            self.cache[chunk.pages[positions // page_size], positions % page_size] = chunk.tokens
        adjustments = dict(decode.adjustments)
        token_D = np.array(
            [
                self._choose(decode.page_table_DM[i], start + 1, int(decode.sampling_DX[i, SEED]), adjustments.get(i))
                for i, start in enumerate(decode.start_D.tolist())
            ],
            np.int32,
        )
        token_C = np.array([self._after(chunk) for chunk in plan.prefill], np.int32)
        self.last_R[decode.row_D] = token_D
        for chunk, token in zip(plan.prefill, token_C.tolist(), strict=True):
            if chunk.sampling is not None:
                self.last_R[chunk.row] = token
        logprobs = {row: TokenLogprobs(-0.5, (int(self.last_R[row]),), (-0.5,)) for _, row, _ in plan.logprobs}
        targets = {
            chunk.row: tuple(TokenLogprobs(float(token), (), ()) for token in chunk.targets)  # as its own probability
            for chunk in plan.prefill
            if chunk.targets is not None
        }
        return StepResult(token_D, token_C, logprobs, targets)

    def _after(self, chunk) -> int:
        if chunk.sampling is None:
            return 0
        return self._choose(chunk.pages, chunk.start + len(chunk.tokens), chunk.sampling.seed, chunk.adjustment)

    def _choose(self, pages, length, seed, adjustment) -> int:
        context = self.cache[pages].reshape(-1)[:length].tolist()
        assert min(context) >= 0, "a token that nobody has computed"
        return next_token(context, seed, adjustment.suppress if adjustment else ())
