"""From the plans of all engines to the arrays of one step, and back to each engine's next tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gimbal_jax.config import MAX_LOGIT_BIAS, MAX_STOP_IDS, EngineConfig
from gimbal_jax.model.inputs import Logprobs, RareInputs, SamplingInputs, StepInputs, StepOutputs, group_sizes
from gimbal_jax.serving.plan import Chunk, NextToken, Plan
from gimbal_jax.serving.request import SamplingParams, TokenLogprobs

Bucket = tuple[int, int]
"""(decode rows, prefill tiles): the shape of one compiled step."""


def step_buckets(config: EngineConfig, tp: int) -> tuple[Bucket, ...]:
    """The shapes to compile at warm-up, by rising number of token places; any plan of an engine fits the last.

    Each bucket's token places divide by ``tp``, because every rank owns an equal share of them.
    ValueError if that cannot be.
    """
    if config.tile % tp:
        raise ValueError(f"tile must be a multiple of tp: tile {config.tile}, tp {tp}")
    all_rows, all_tiles = config.max_rows, config.token_budget // config.tile
    rows = {-(-n // tp) * tp for n in (-(-all_rows // 4), all_rows)}
    tiles = {0, -(-all_tiles // 4), all_tiles}
    return tuple(sorted(((d, n) for d in rows for n in tiles), key=lambda b: group_sizes(b[0], b[1], config.tile)))


def bucket_for(plans: Sequence[Plan], buckets: Sequence[Bucket]) -> Bucket:
    """The first bucket that all plans fit into."""
    rows = max(len(plan.decode) for plan in plans)
    tiles = max(plan.tiles for plan in plans)
    return next((d, n) for d, n in buckets if d >= rows and n >= tiles)


_UNUSED = {"group_SC": -1, "suppress_SCK": -1, "bias_ids_SCK": -1, "allowed_SCW": -1, "repetition_SC": 1}
"""What rare inputs hold where nobody asks for anything, if not 0: all bits are set, and a penalty of 1 is none."""


def blank(config: EngineConfig, vocab_size: int, engines: int) -> RareInputs:
    """Rare inputs that ask for nothing."""
    rows = (engines, config.max_rows)  # no more sequences than these choose a token in a step
    shapes: dict[str, tuple[tuple[int, ...], type]] = {
        "group_SC": (rows, np.int32),
        "suppress_SCK": ((*rows, MAX_STOP_IDS), np.int32),
        "bias_ids_SCK": ((*rows, MAX_LOGIT_BIAS), np.int32),
        "bias_SCK": ((*rows, MAX_LOGIT_BIAS), np.float32),
        "allowed_SCW": ((*rows, -(-vocab_size // 32)), np.int32),
        "history_SCN": ((*rows, config.max_model_len), np.int32),
        "prompt_tokens_SC": (rows, np.int32),
        "repetition_SC": (rows, np.float32),
        "frequency_SC": (rows, np.float32),
        "presence_SC": (rows, np.float32),
        "targets_ST": ((engines, -(-config.token_budget // config.tile) * config.tile), np.int32),
        "adjusts": ((), np.bool_),
        "penalises": ((), np.bool_),
        "want_targets": ((), np.bool_),
    }
    return RareInputs(**{name: np.full(shape, _UNUSED.get(name, 0), kind) for name, (shape, kind) in shapes.items()})


def stack(plans: Sequence[Plan], config: EngineConfig, decode_rows: int, tiles: int, blank: RareInputs) -> StepInputs:
    """Lay out one plan per engine in a bucket of ``decode_rows`` and ``tiles``, as numpy arrays.

    What nobody asks for is passed on from ``blank``, wherever its arrays are.
    """
    engines, tile, page_size = len(plans), config.tile, config.page_size
    places, groups = group_sizes(decode_rows, tiles, tile)
    tokens_ST = np.zeros((engines, places), np.int32)
    page_table_SGM = np.zeros((engines, groups, config.pages_per_row), np.int32)
    start_SG = np.zeros((engines, groups), np.int32)
    count_SG = np.zeros((engines, groups), np.int32)
    choosing: dict[tuple[int, int], SamplingParams] = {}
    adjusted: dict[tuple[int, int], tuple[int, Chunk]] = {}
    targets: dict[Any, np.ndarray] = {}

    for s, plan in enumerate(plans):
        row = 0
        for chunk, place, first, last in _layout(plan, decode_rows, tile):
            tokens_ST[s, place : place + len(chunk.tokens)] = chunk.tokens
            page_table_SGM[s, first : last + 1, : len(chunk.pages)] = chunk.pages
            done = tile * (last - first)  # tokens in the chunk's full tiles before its last one
            start_SG[s, first : last + 1] = range(chunk.start, chunk.start + done + 1, tile)
            count_SG[s, first:last] = tile
            count_SG[s, last] = len(chunk.tokens) - done
            if chunk.sampling is not None:
                choosing[s, last] = chunk.sampling
                if _adjusts(chunk, chunk.sampling):
                    adjusted[s, row] = last, chunk
                    row += 1
            if chunk.targets is not None:
                in_tiles = place - decode_rows
                targets[s, in_tiles : in_tiles + len(chunk.targets)] = chunk.targets

    # Positions and KV places follow from the groups, for all tokens at once.
    group_T = np.concatenate([np.arange(decode_rows), decode_rows + np.repeat(np.arange(tiles), tile)])
    offset_T = np.concatenate([np.zeros(decode_rows, np.int32), np.tile(np.arange(tile, dtype=np.int32), tiles)])
    real_ST = offset_T < count_SG[:, group_T]
    positions_ST = np.where(real_ST, start_SG[:, group_T] + offset_T, 0)
    page_ST = page_table_SGM[np.arange(engines)[:, None], group_T, positions_ST // page_size]
    write_ST = np.where(real_ST, page_ST * page_size + positions_ST % page_size, config.num_pages * page_size)
    return StepInputs(
        tokens_ST=tokens_ST,
        positions_ST=positions_ST.astype(np.int32),
        write_ST=write_ST.astype(np.int32),
        page_table_SGM=page_table_SGM,
        start_SG=start_SG,
        count_SG=count_SG,
        sampling=_sampling(choosing, bool(adjusted), engines, groups),
        rare=_rare(adjusted, targets, blank),
    )


def results_of(
    outputs: StepOutputs, plan: Plan, engine: int, config: EngineConfig, decode_rows: int
) -> list[NextToken | None]:
    """What the step gives for each of ``plan.chunks``; None where that is nothing.

    ``outputs`` holds numpy arrays; ``decode_rows`` is that of the step's bucket.
    """
    return [
        _next_token(outputs, chunk, engine, place - decode_rows, last)
        for chunk, place, _, last in _layout(plan, decode_rows, config.tile)
    ]


def _layout(plan: Plan, decode_rows: int, tile: int) -> Iterator[tuple[Chunk, int, int, int]]:
    """Each chunk with its first token place and its first and last group."""
    for row, chunk in enumerate(plan.decode):
        yield chunk, row, row, row
    first = decode_rows
    for chunk in plan.prefill:
        end = first + -(-len(chunk.tokens) // tile)
        yield chunk, decode_rows + (first - decode_rows) * tile, first, end - 1
        first = end


def _sampling(
    choosing: dict[tuple[int, int], SamplingParams], adjusts: bool, engines: int, groups: int
) -> SamplingInputs:
    """Settings of the groups that choose a token; the others are greedy, which costs least."""
    chosen = choosing.values()
    inputs = SamplingInputs(
        temperature_SG=np.zeros((engines, groups), np.float32),
        top_k_SG=np.zeros((engines, groups), np.int32),
        top_p_SG=np.ones((engines, groups), np.float32),
        min_p_SG=np.zeros((engines, groups), np.float32),
        seed_SG=np.zeros((engines, groups), np.uint32),
        plain=np.array(not adjusts and all(params.temperature == 0 for params in chosen)),
        truncates=np.array(any(params.top_k > 0 or params.top_p < 1 or params.min_p > 0 for params in chosen)),
        want_logprobs=np.array(any(params.logprobs is not None for params in chosen)),
    )
    for group, params in choosing.items():
        inputs.temperature_SG[group] = params.temperature
        inputs.top_k_SG[group] = params.top_k
        inputs.top_p_SG[group] = params.top_p
        inputs.min_p_SG[group] = params.min_p
        inputs.seed_SG[group] = params.seed & 0xFFFFFFFF  # the device draws from 32 bits
    return inputs


def _adjusts(chunk: Chunk, params: SamplingParams) -> bool:
    """Whether something changes the logits that its token is chosen by."""
    return bool(chunk.suppress or params.logit_bias) or chunk.allowed is not None or chunk.history is not None


def _rare(
    adjusted: dict[tuple[int, int], tuple[int, Chunk]], targets: dict[Any, np.ndarray], blank: RareInputs
) -> RareInputs:
    """Blank, but for what is asked for: by chunks, at their (engine, row), with their groups; targets of prompts."""
    asked: dict[str, np.ndarray] = {}

    def put(name: str, at: Any, values: Any) -> None:
        if name not in asked:
            unused = getattr(blank, name)
            asked[name] = np.full(unused.shape, _UNUSED.get(name, 0), unused.dtype)
        asked[name][at] = values

    for at, (group, chunk) in adjusted.items():
        params = chunk.sampling
        assert params is not None, "who chooses no token has nothing to adjust"
        put("adjusts", (), True)
        put("group_SC", at, group)
        if chunk.suppress:
            put("suppress_SCK", (*at, slice(len(chunk.suppress))), chunk.suppress)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            put("bias_ids_SCK", (*at, slice(len(ids))), ids)
            put("bias_SCK", (*at, slice(len(ids))), values)
        if chunk.allowed is not None:
            put("allowed_SCW", at, chunk.allowed)
        if chunk.history is not None:
            put("penalises", (), True)
            put("history_SCN", (*at, slice(len(chunk.history))), chunk.history)
            put("prompt_tokens_SC", at, chunk.prompt_tokens)
            put("repetition_SC", at, params.repetition_penalty)
            put("frequency_SC", at, params.frequency_penalty)
            put("presence_SC", at, params.presence_penalty)
    for at, tokens in targets.items():
        put("want_targets", (), True)
        put("targets_ST", at, tokens)
    return replace(blank, **asked)


def _next_token(outputs: StepOutputs, chunk: Chunk, engine: int, place: int, group: int) -> NextToken | None:
    """``place``: of the chunk's first token, among those of the tiles."""
    if not outputs.finite_SG[engine, group]:
        return NextToken(None, error="its logits are not finite")
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    if chunk.targets is not None:
        of_targets = engine, slice(place, place + len(chunk.targets))
        prompt_logprobs = _token_logprobs(outputs.prompt_logprobs, of_targets, chunk.target_logprobs)
    if chunk.sampling is None:
        return NextToken(None, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
    token_id, wanted, logprobs = int(outputs.token_SG[engine, group]), chunk.sampling.logprobs, None
    if wanted is not None:
        [logprobs] = _token_logprobs(outputs.logprobs, (engine, slice(group, group + 1)), wanted)
    return NextToken(token_id, logprobs, prompt_logprobs)


def _token_logprobs(found: Logprobs | None, at: tuple[int, slice], wanted: int) -> tuple[TokenLogprobs, ...]:
    assert found is not None, "who wants log probabilities gets them"
    values = found.chosen[at].tolist(), found.top_ids[at].tolist(), found.top_values[at].tolist()
    return tuple(
        TokenLogprobs(chosen, tuple(ids[:wanted]), tuple(tops[:wanted]))
        for chosen, ids, tops in zip(*values, strict=True)
    )
