"""Plans of all engines to the arrays of one step, and its outputs back to each engine's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gimbal_jax.config import MAX_LOGIT_BIAS, MAX_STOP_IDS, EngineConfig
from gimbal_jax.model.inputs import (
    Bucket,
    Logprobs,
    PackedInputs,
    RareInputs,
    StepOutputs,
    StepShape,
    empty_inputs,
    sampling_block,
    unpack,
)
from gimbal_jax.serving.engine.plan import NOT_FINITE, Adjustment, Chunk, DecodeRows, Plan, StepResult, pack_sampling
from gimbal_jax.serving.engine.request import TokenLogprobs


def step_buckets(config: EngineConfig, tp: int) -> tuple[Bucket, ...]:
    """Return the shapes to compile at warm-up, by rising number of token places. Every plan fits the last one.

    On a CPU (8 layers, hidden size 512) 4 decode rows take 1.4 times as long in 8 places. 8 decode rows take 1.1 times
    as long in 16 places and 1.3 times in 32, and together with 128 prefill tokens 1.15 times in 32.
    ``tp`` divides each bucket's token places, because every rank owns an equal share. ValueError if it cannot.
    """
    if config.tile % tp:
        raise ValueError(f"tile must be a multiple of tp: tile {config.tile}, tp {tp}")
    all_rows, all_tiles = config.max_rows, config.token_budget // config.tile
    eighth, quarter, half, full = (-(-all_rows // part // tp) * tp for part in (8, 4, 2, 1))
    few_tiles = -(-all_tiles // 4)
    buckets = {
        (eighth, 0),
        (quarter, 0),
        (half, 0),
        (full, 0),
        (quarter, few_tiles),
        (full, few_tiles),
        (full, all_tiles),
    }
    return tuple(sorted(buckets, key=lambda bucket: (bucket[1], bucket[0])))


def bucket_for(plans: Sequence[Plan], buckets: Sequence[Bucket]) -> Bucket:
    """Return the first bucket that all plans fit into."""
    rows = max(len(plan.decode) for plan in plans)
    tiles = max(plan.tiles for plan in plans)
    return next((d, n) for d, n in buckets if d >= rows and n >= tiles)


DEFAULTS = {"suppress_SRK": -1, "bias_ids_SRK": -1, "allowed_SRW": -1, "repetition_SR": 1}
"""Value of each rare input that no request sets; 0 for the others. -1 allows all tokens, a penalty of 1 is none."""


def default_rare_inputs(config: EngineConfig, vocab_size: int, engines: int) -> RareInputs:
    """Return the rare inputs of a step in which no request sets any."""
    rows = (engines, config.max_rows)
    shapes: dict[str, tuple[tuple[int, ...], type]] = {
        "suppress_SRK": ((*rows, MAX_STOP_IDS), np.int32),
        "bias_ids_SRK": ((*rows, MAX_LOGIT_BIAS), np.int32),
        "bias_SRK": ((*rows, MAX_LOGIT_BIAS), np.float32),
        "allowed_SRW": ((*rows, -(-vocab_size // 32)), np.int32),
        "history_SRN": ((*rows, config.max_model_len), np.int32),
        "prompt_tokens_SR": (rows, np.int32),
        "repetition_SR": (rows, np.float32),
        "frequency_SR": (rows, np.float32),
        "presence_SR": (rows, np.float32),
        "targets_ST": ((engines, -(-config.token_budget // config.tile) * config.tile), np.int32),
        "adjusts": ((), np.bool_),
        "penalises": ((), np.bool_),
        "want_targets": ((), np.bool_),
    }
    return RareInputs(**{name: np.full(shape, DEFAULTS.get(name, 0), kind) for name, (shape, kind) in shapes.items()})


def pack_step(plans: Sequence[Plan], shape: StepShape, defaults: RareInputs) -> tuple[np.ndarray, RareInputs]:
    """Return one plan per engine as arrays: packed inputs [S, X], and rare inputs.

    Rare inputs that no request sets are those of ``defaults``, wherever these arrays are. No Python runs for each
    decode row.
    """
    packed_SX = empty_inputs(len(plans), shape)
    parts, sampling_SXC = unpack(packed_SX, shape), sampling_block(packed_SX, shape)
    adjusted: list[tuple[tuple[int, int], Adjustment]] = []
    targets: list[tuple[tuple[int, slice], np.ndarray]] = []
    for s, plan in enumerate(plans):
        if len(plan.decode):
            _put_decode(parts, sampling_SXC, s, plan.decode)
            adjusted += [((s, int(plan.decode.row_D[d])), adjustment) for d, adjustment in plan.decode.adjustments]
        sequence, tile = len(plan.decode), 0
        for chunk in plan.prefill:
            _put_chunk(parts, sampling_SXC, s, sequence, tile, chunk, shape)
            if chunk.sampling is not None and chunk.adjustment is not None:
                adjusted.append(((s, chunk.row), chunk.adjustment))
            if chunk.targets is not None:
                targets.append(((s, slice(tile * shape.tile, tile * shape.tile + len(chunk.targets))), chunk.targets))
            sequence, tile = sequence + 1, tile + -(-len(chunk.tokens) // shape.tile)
    return packed_SX, build_rare_inputs(adjusted, targets, defaults) if adjusted or targets else defaults


def unpack_results(outputs: StepOutputs, plan: Plan, engine: int, shape: StepShape) -> StepResult:
    """Return the results of one engine's plan. ``outputs`` holds numpy arrays."""
    rows = len(plan.decode)
    token_C = outputs.token_SC[engine]

    # Log probabilities of prompt tokens stand at the tile places of their chunks.
    prompt_logprobs, tile = {}, 0
    for sequence, chunk in enumerate(plan.prefill, rows):
        if chunk.targets is not None and token_C[sequence] != NOT_FINITE:
            places = np.arange(len(chunk.targets)) + tile * shape.tile
            counts = [chunk.target_logprobs] * len(places)
            prompt_logprobs[chunk.row] = tuple(_token_logprobs(outputs.prompt_logprobs, engine, places, counts))
        tile += -(-len(chunk.tokens) // shape.tile)

    logprobs = {}
    if plan.logprobs:
        sequences, _, alternatives = zip(*plan.logprobs, strict=True)
        found = _token_logprobs(outputs.logprobs, engine, np.array(sequences), alternatives)
        logprobs = {
            row: of_row
            for (sequence, row, _), of_row in zip(plan.logprobs, found, strict=True)
            if token_C[sequence] != NOT_FINITE
        }
    return StepResult(token_C[:rows], token_C[rows : rows + len(plan.prefill)], logprobs, prompt_logprobs)


def _put_decode(parts: PackedInputs, sampling_SXC: np.ndarray, s: int, decode: DecodeRows) -> None:
    rows = slice(len(decode))
    parts.tokens_ST[s, rows] = decode.token_D
    parts.start_SG[s, rows] = decode.start_D
    parts.count_SG[s, rows] = 1
    parts.last_SC[s, rows] = np.arange(len(decode))
    parts.row_SC[s, rows] = decode.row_D
    parts.page_table_SCM[s, rows, : decode.page_table_DM.shape[1]] = decode.page_table_DM
    sampling_SXC[s, :, rows] = decode.sampling_DX.T


def _put_chunk(
    parts: PackedInputs,
    sampling_SXC: np.ndarray,
    s: int,
    sequence: int,
    tile: int,
    chunk: Chunk,
    shape: StepShape,
) -> None:
    """Write a chunk as this sequence of the step; ``tile`` is the first tile of the chunk."""
    count, place = len(chunk.tokens), shape.rows + tile * shape.tile
    tiles = -(-count // shape.tile)
    first, last = shape.rows + tile, shape.rows + tile + tiles - 1
    done = shape.tile * (tiles - 1)  # tokens in the chunk's full tiles before its last one
    parts.tokens_ST[s, place : place + count] = chunk.tokens
    parts.start_SG[s, first : last + 1] = range(chunk.start, chunk.start + done + 1, shape.tile)
    parts.count_SG[s, first:last] = shape.tile
    parts.count_SG[s, last] = count - done
    parts.sequence_SN[s, tile : tile + tiles] = sequence
    parts.last_SC[s, sequence] = place + count - 1
    parts.page_table_SCM[s, sequence, : len(chunk.pages)] = chunk.pages
    if chunk.sampling is not None:
        parts.row_SC[s, sequence] = chunk.row
        sampling_SXC[s, :, sequence] = pack_sampling(chunk.sampling)


def build_rare_inputs(
    adjusted: Sequence[tuple[tuple[int, int], Adjustment]],
    targets: Sequence[tuple[tuple[int, slice], np.ndarray]],
    defaults: RareInputs,
) -> RareInputs:
    """Return ``defaults`` with the adjustments and targets of a step.

    ``adjusted`` are by (engine, row), ``targets`` by (engine, places in the tiles).
    """
    arrays: dict[str, np.ndarray] = {}

    def put(name: str, at: Any, values: Any) -> None:
        if name not in arrays:
            default = getattr(defaults, name)
            arrays[name] = np.full(default.shape, DEFAULTS.get(name, 0), default.dtype)
        arrays[name][at] = values

    for at, adjustment in adjusted:
        put("adjusts", (), True)
        if adjustment.suppress:
            put("suppress_SRK", (*at, slice(len(adjustment.suppress))), adjustment.suppress)
        if adjustment.allowed is not None:
            put("allowed_SRW", at, adjustment.allowed)
        if adjustment.params is not None and adjustment.params.logit_bias:
            ids, values = zip(*adjustment.params.logit_bias, strict=True)
            put("bias_ids_SRK", (*at, slice(len(ids))), ids)
            put("bias_SRK", (*at, slice(len(ids))), values)
        if adjustment.params is not None and adjustment.history is not None:
            put("penalises", (), True)
            put("history_SRN", (*at, slice(len(adjustment.history))), adjustment.history)
            put("prompt_tokens_SR", at, adjustment.prompt_tokens)
            put("repetition_SR", at, adjustment.params.repetition_penalty)
            put("frequency_SR", at, adjustment.params.frequency_penalty)
            put("presence_SR", at, adjustment.params.presence_penalty)
    for place, tokens in targets:
        put("want_targets", (), True)
        put("targets_ST", place, tokens)
    return replace(defaults, **arrays)


def _token_logprobs(found: Logprobs | None, engine: int, at: np.ndarray, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log probabilities at these places, each with its number of alternatives."""
    assert found is not None, "the step reports log probabilities if a plan wants them"
    values = (array[engine, at].tolist() for array in (found.chosen, found.top_ids, found.top_values))
    return [
        TokenLogprobs(chosen, tuple(ids[:count]), tuple(tops[:count]))
        for chosen, ids, tops, count in zip(*values, counts, strict=True)
    ]
