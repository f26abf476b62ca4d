"""A model on a mesh without an engine: tests pass chunks of sequences and get all logits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gimbal_jax.config import EngineConfig, Exchange, MeshConfig, ModelConfig
from gimbal_jax.model.checkpoint import load_safetensors
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.inputs import StepInputs
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.model.step import DeviceState, abstract_model, new_state
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.pallas_kernels import Backend

ENGINE = EngineConfig(max_model_len=80, page_size=8, num_pages=32, tile=8, token_budget=48)


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, whose pages start at ``first_page``."""

    tokens: np.ndarray
    start: int
    first_page: int = 0


@dataclass
class Rig:
    """Weights, pages and counters of one checkpoint on one mesh."""

    config: ModelConfig
    mesh: jax.sharding.Mesh
    layout: StepLayout
    graph: nnx.GraphDef
    weights: nnx.State
    state: DeviceState
    slot_of_expert_LE: np.ndarray
    decode_rows: int = 2
    tiles: int = 5
    _forward: Any = field(default=None, repr=False)

    def run(self, *engines: tuple[list[Chunk], list[Chunk]]) -> list[list[np.ndarray]]:
        """Run one step. Each engine gets (decode chunks, prefill chunks).

        Returns, for each engine, the logits [tokens, V] of its chunks in that order.
        """
        if self._forward is None:
            self._forward = jax.jit(partial(_all_logits, self.graph, self.layout), donate_argnums=1)
        inputs, places = build(engines, self.decode_rows, self.tiles)
        logits, self.state = self._forward(self.weights, self.state, jnp.asarray(self.slot_of_expert_LE), inputs)
        logits_STV = np.asarray(logits)
        return [[logits_STV[s, at] for at in engine] for s, engine in enumerate(places)]

    def counts_LSE(self) -> np.ndarray:
        """Return tokens per MoE layer, source and expert."""
        return np.asarray(self.state.counts_STLE).sum(axis=1).transpose(1, 0, 2)

    def placed(self, slot_of_expert_LE: np.ndarray) -> Rig:
        """Return the model under another placement, with empty pages and counters. Both share compiled programs."""
        order_LP = np.take_along_axis(self.slot_of_expert_LE, np.argsort(slot_of_expert_LE, axis=1), axis=1)
        weights = reordered(self.weights, self.config, order_LP)
        state = new_state(self.config, ENGINE, jnp.float32, self.mesh)
        return replace(self, weights=weights, state=state, slot_of_expert_LE=slot_of_expert_LE)


def reordered(weights: nnx.State, config: ModelConfig, order_LP: np.ndarray) -> nnx.State:
    """Return weights in which slot p of MoE layer l holds the expert that was in slot order_LP[l, p]."""

    def moved(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        if variable.get_metadata("axes")[0] != "slot":
            return variable
        value = variable.get_value()
        by_slot = np.asarray(value)[order_LP[config.moe_layers.index(path[1])]]
        return variable.replace(jax.device_put(by_slot, value.sharding))

    return nnx.from_flat_state([(path, moved(path, variable)) for path, variable in nnx.to_flat_state(weights)])


def rig(
    folder: Path, dp: int, tp: int, exchange: Exchange = "gather", slot_of_expert_LE: np.ndarray | None = None
) -> Rig:
    """Load the checkpoint in this folder; the default placement is contiguous."""
    config = load_config(folder)
    _, abstract = abstract_model(config, jnp.float32, make_mesh(MeshConfig(dp, tp)))
    if slot_of_expert_LE is None:
        slot_of_expert_LE = np.tile(np.arange(config.num_experts, dtype=np.int32), (len(config.moe_layers), 1))
    weights = load_safetensors(folder, config, abstract, slot_of_expert_LE)
    return rig_of(config, weights, slot_of_expert_LE, dp, tp, exchange)


def rig_of(
    config: ModelConfig,
    weights: nnx.State,
    slot_of_expert_LE: np.ndarray,
    dp: int,
    tp: int,
    exchange: Exchange = "gather",
    backend: Backend = "xla",
    dtype: Any = jnp.float32,
) -> Rig:
    """Return a rig of weights that are on this mesh already, in the slot order of this placement."""
    mesh = make_mesh(MeshConfig(dp, tp))
    graph, _ = abstract_model(config, dtype, mesh)
    layout = StepLayout(mesh, ENGINE.tile, exchange, backend)
    state = new_state(config, ENGINE, dtype, mesh)
    return Rig(config, mesh, layout, graph, weights, state, slot_of_expert_LE)


def _all_logits(graph, layout, weights, state, slot_of_expert_LE, inputs):
    model = nnx.merge(graph, weights)
    hidden_STD, pages, counts = model(inputs, state.pages, slot_of_expert_LE, layout)
    return model.logits(hidden_STD, layout), replace(state, pages=pages, counts_STLE=state.counts_STLE + counts)


def build(engines, rows: int, tiles: int) -> tuple[StepInputs, list[list[np.ndarray]]]:
    """Return step inputs for these chunks, and the places in T of each chunk's tokens."""
    size, tile, pages = len(engines), ENGINE.tile, ENGINE.pages_per_row
    tokens_ST, positions_ST = np.zeros((2, size, rows + tiles * tile), np.int32)
    write_ST = np.full_like(tokens_ST, ENGINE.num_pages * ENGINE.page_size)
    start_SG, count_SG = np.zeros((2, size, rows + tiles), np.int32)
    table_SGM = np.zeros((size, rows + tiles, pages), np.int32)
    places: list[list[np.ndarray]] = []

    def put(s: int, group: int, place: int, chunk: Chunk, at: int, n: int) -> np.ndarray:
        where, position = np.arange(place, place + n), chunk.start + at + np.arange(n)
        tokens_ST[s, where], positions_ST[s, where] = chunk.tokens[at : at + n], position
        write_ST[s, where] = chunk.first_page * ENGINE.page_size + position
        start_SG[s, group], count_SG[s, group] = position[0], n
        table_SGM[s, group] = np.minimum(chunk.first_page + np.arange(pages), ENGINE.num_pages - 1)
        return where

    for s, (decode, prefill) in enumerate(engines):
        here, next_tile = [put(s, i, i, c, 0, 1) for i, c in enumerate(decode)], 0
        for chunk in prefill:
            parts = []
            for at in range(0, len(chunk.tokens), tile):
                n = min(tile, len(chunk.tokens) - at)
                parts.append(put(s, rows + next_tile, rows + next_tile * tile, chunk, at, n))
                next_tile += 1
            here.append(np.concatenate(parts))
        places.append(here)
    return StepInputs(tokens_ST, positions_ST, write_ST, table_SGM, start_SG, count_SG), places
