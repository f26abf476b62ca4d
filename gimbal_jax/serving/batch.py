"""From the plans of all engines to the arrays of one step, and back to each engine's next tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gimbal_jax.config import MAX_STOP_IDS, EngineConfig
from gimbal_jax.model.inputs import SamplingInputs, StepInputs, StepOutputs, group_sizes
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


def stack(plans: Sequence[Plan], config: EngineConfig, decode_rows: int, tiles: int) -> StepInputs:
    """Lay out one plan per engine in a bucket of ``decode_rows`` and ``tiles``; numpy arrays throughout."""
    engines, tile, page_size = len(plans), config.tile, config.page_size
    places, groups = group_sizes(decode_rows, tiles, tile)
    tokens_ST = np.zeros((engines, places), np.int32)
    page_table_SGM = np.zeros((engines, groups, config.pages_per_row), np.int32)
    start_SG = np.zeros((engines, groups), np.int32)
    count_SG = np.zeros((engines, groups), np.int32)
    choosing: dict[tuple[int, int], tuple[SamplingParams, tuple[int, ...]]] = {}

    for s, plan in enumerate(plans):
        for chunk, place, first, last in _layout(plan, decode_rows, tile):
            tokens_ST[s, place : place + len(chunk.tokens)] = chunk.tokens
            page_table_SGM[s, first : last + 1, : len(chunk.pages)] = chunk.pages
            done = tile * (last - first)  # tokens in the chunk's full tiles before its last one
            start_SG[s, first : last + 1] = range(chunk.start, chunk.start + done + 1, tile)
            count_SG[s, first:last] = tile
            count_SG[s, last] = len(chunk.tokens) - done
            if chunk.sampling is not None:
                choosing[s, last] = chunk.sampling, chunk.suppress

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
        sampling=_sampling(choosing, engines, groups),
    )


def results_of(
    outputs: StepOutputs, plan: Plan, engine: int, config: EngineConfig, decode_rows: int
) -> list[NextToken | None]:
    """What the step chose after each of ``plan.chunks``; None where nothing was to be chosen.

    ``outputs`` holds numpy arrays; ``decode_rows`` is that of the step's bucket.
    """
    return [_next_token(outputs, chunk, engine, last) for chunk, _, _, last in _layout(plan, decode_rows, config.tile)]


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
    choosing: dict[tuple[int, int], tuple[SamplingParams, tuple[int, ...]]], engines: int, groups: int
) -> SamplingInputs:
    """Settings, and tokens to suppress, of the groups that choose a token; the others are greedy, which costs least."""
    inputs = SamplingInputs(
        temperature_SG=np.zeros((engines, groups), np.float32),
        top_k_SG=np.zeros((engines, groups), np.int32),
        top_p_SG=np.ones((engines, groups), np.float32),
        min_p_SG=np.zeros((engines, groups), np.float32),
        seed_SG=np.zeros((engines, groups), np.uint32),
        suppress_SGK=np.full((engines, groups, MAX_STOP_IDS), -1, np.int32),
        plain=np.array(all(params.temperature == 0 and not suppress for params, suppress in choosing.values())),
        truncates=np.array(any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p, _ in choosing.values())),
        want_logprobs=np.array(any(params.logprobs is not None for params, _ in choosing.values())),
    )
    for group, (params, suppress) in choosing.items():
        inputs.temperature_SG[group] = params.temperature
        inputs.top_k_SG[group] = params.top_k
        inputs.top_p_SG[group] = params.top_p
        inputs.min_p_SG[group] = params.min_p
        inputs.seed_SG[group] = params.seed & 0xFFFFFFFF  # the device draws from 32 bits
        inputs.suppress_SGK[group][: len(suppress)] = suppress
    return inputs


def _next_token(outputs: StepOutputs, chunk: Chunk, engine: int, group: int) -> NextToken | None:
    if chunk.sampling is None:
        return None
    token_id = int(outputs.token_SG[engine, group])
    wanted = chunk.sampling.logprobs
    if wanted is None:
        return NextToken(token_id)
    return NextToken(
        token_id,
        TokenLogprobs(
            chosen=float(outputs.logprob_SG[engine, group]),
            top_ids=tuple(outputs.top_ids_SGK[engine, group, :wanted].tolist()),
            top_values=tuple(outputs.top_logprobs_SGK[engine, group, :wanted].tolist()),
        ),
    )
