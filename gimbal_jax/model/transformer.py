"""Qwen3-MoE in Flax NNX: the forward pass of one step of S engines over paged KV caches.

Dense parts are plain products that XLA partitions by the shardings of the parameters. Attention over pages and the MoE
exchange are ``shard_map`` regions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import Exchange, ModelConfig
from gimbal_jax.model.inputs import StepInputs, rows_and_tiles
from gimbal_jax.model.moe import moe_exchange
from gimbal_jax.model.rope import Rotation, apply_rope, rotation
from gimbal_jax.model.sharding import kv_heads_in_cache
from gimbal_jax.pallas_kernels import Backend, paged_attention, product, route_and_count

KVPages = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, [S, pages, page_size, KV heads, head_dim] each."""


def param(dtype: Any, **axes: int) -> nnx.Param:
    """Return a parameter of zeros whose axes have these logical names (see ``sharding.MESH_AXES``) and sizes."""
    return nnx.Param(jnp.zeros(tuple(axes.values()), dtype), axes=tuple(axes))


@dataclass(frozen=True)
class StepLayout:
    """Settings, in addition to shapes, for which a step is compiled."""

    mesh: Mesh
    """(dp, tp)."""
    tile: int
    """Tokens of a prefill tile."""
    exchange: Exchange
    """Form of the MoE exchange."""
    backend: Backend
    """Form of the kernels."""

    def constrain(self, x: jax.Array, *spec: str | None) -> jax.Array:
        """Return x with the sharding of this partition."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))


class RMSNorm(nnx.Module):
    """Root mean square norm in float32, as Hugging Face computes it."""

    def __init__(self, size: int, eps: float, dtype: Any, axis: str) -> None:
        self.scale = param(dtype, **{axis: size})
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.square(x32).mean(axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * x32.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with norms of queries and keys, over paged keys and values."""

    def __init__(self, c: ModelConfig, dtype: Any, tp: int) -> None:
        groups = kv_heads_in_cache(c, tp)
        # Each KV head's query heads, then its key and its value, so that one product makes all of them.
        heads = {"kv_heads": groups, "group": c.num_heads // groups + 2, "head_dim": c.head_dim}
        self.config = c
        self.qkv = param(dtype, embed=c.hidden_size, **heads)
        self.o = param(dtype, heads=c.num_heads, head_dim=c.head_dim, embed=c.hidden_size)
        if c.attention_bias:
            self.qkv_bias = param(dtype, **heads)
            self.o_bias = param(dtype, embed=c.hidden_size)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, "head_dim")
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, "head_dim")

    def __call__(
        self, x_STD: jax.Array, pages: KVPages, inputs: StepInputs, rope: Rotation, layout: StepLayout
    ) -> tuple[jax.Array, KVPages]:
        """Return outputs [S, T, D], and the pages with the new keys and values."""
        qkv = product("std,dgnk->stgnk", x_STD, self.qkv[...])
        if self.config.attention_bias:
            qkv = qkv + self.qkv_bias[...]
        q, k, v = qkv[..., :-2, :].reshape(*x_STD.shape[:2], -1, self.config.head_dim), qkv[..., -2, :], qkv[..., -1, :]
        q, k = apply_rope(self.q_norm(q), rope), apply_rope(self.k_norm(k), rope)

        # Each rank attends with its own heads over its own part of the pages.
        heads = P("dp", None, "tp", None)
        cache = P("dp", None, None, "tp", None)
        attend = jax.shard_map(
            partial(_attend_one_engine, tile=layout.tile, window=self.config.sliding_window, backend=layout.backend),
            mesh=layout.mesh,
            in_specs=(heads, heads, heads, cache, cache, P("dp"), P("dp"), P("dp"), P("dp")),
            out_specs=(heads, cache, cache),
            check_vma=False,
        )
        out, k_pages, v_pages = attend(
            q, k, v, *pages, inputs.write_ST, inputs.page_table_SGM, inputs.start_SG, inputs.count_SG
        )
        out = product("sthk,hkd->std", out, self.o[...])
        return out + self.o_bias[...] if self.config.attention_bias else out, (k_pages, v_pages)


def _attend_one_engine(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    write: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    tile: int,
    window: int | None,
    backend: Backend,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write one engine's new keys and values into its pages, then attend. The leading axis of all arrays is S = 1."""

    def write_pages(pages: jax.Array, new: jax.Array) -> jax.Array:
        # Do not flatten the pages: XLA would copy the whole pool of a single KV head, and copy it back.
        page, offset = jnp.divmod(write[0], pages.shape[2])
        return pages.at[0, page, offset].set(new[0].astype(pages.dtype), mode="drop")

    k_pages, v_pages = write_pages(k_pages, k), write_pages(v_pages, v)
    rows, tiles = rows_and_tiles(q.shape[1], count.shape[1], tile)

    def attend(q_THD: jax.Array, groups: slice, size: int) -> jax.Array:
        q_GQHD = q_THD.reshape(-1, size, *q_THD.shape[1:])
        tables = page_table[0, groups], start[0, groups], count[0, groups]
        out = paged_attention(q_GQHD, k_pages[0], v_pages[0], *tables, window=window, backend=backend)
        return out.reshape(q_THD.shape)

    # Decode rows are groups of one token, tiles are groups of ``tile`` tokens.
    out = attend(q[0, :rows], slice(0, rows), 1)
    if tiles:
        out = jnp.concatenate([out, attend(q[0, rows:], slice(rows, None), tile)])
    return out[None], k_pages, v_pages


class DenseMLP(nnx.Module):
    """SwiGLU feed-forward network of the layers without experts."""

    def __init__(self, c: ModelConfig, dtype: Any) -> None:
        self.gate_up = param(dtype, embed=c.hidden_size, gate_up=2, mlp=c.intermediate_size)
        self.down = param(dtype, mlp=c.intermediate_size, embed=c.hidden_size)

    def __call__(self, x_STD: jax.Array) -> jax.Array:
        """Return outputs [S, T, D]."""
        gate_up = product("std,dgf->stgf", x_STD, self.gate_up[...])
        return product("stf,fd->std", jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], self.down[...])


class MoE(nnx.Module):
    """Routed experts. Their weights are in slot order, and the placement maps experts to slots."""

    def __init__(self, c: ModelConfig, dtype: Any) -> None:
        self.config = c
        self.router = param(dtype, embed=c.hidden_size, router=c.num_experts)
        self.gate_up = param(dtype, slot=c.num_experts, embed=c.hidden_size, expert_mlp=2 * c.moe_intermediate_size)
        self.down = param(dtype, slot=c.num_experts, expert_mlp=c.moe_intermediate_size, embed=c.hidden_size)

    def __call__(
        self, x_STD: jax.Array, valid_ST: jax.Array, slot_of_expert_E: jax.Array, layout: StepLayout
    ) -> tuple[jax.Array, jax.Array]:
        """Return outputs [S, T, D] and counts [S, TP, E] of the experts that each rank's own tokens chose."""
        c = self.config

        def on_rank(
            x: jax.Array, valid: jax.Array, slots: jax.Array, router: jax.Array, gate_up: jax.Array, down: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            # In float32, because rounding could change the choice of experts.
            logits = x[0].astype(jnp.float32) @ router.astype(jnp.float32)
            routing = route_and_count(
                logits,
                valid[0],
                slots,
                k=c.experts_per_token,
                renormalise=c.norm_topk_prob,
                ranks=layout.mesh.size,
                backend=layout.backend,
            )
            y = moe_exchange(layout.exchange, x[0], routing, slots, gate_up, down, layout.backend)
            return y[None], routing.count_E[None, None]

        # Tokens are split over all ranks, also within an engine, so that no rank routes the tokens of another.
        own, ranks = P("dp", "tp"), P(("dp", "tp"))
        return jax.shard_map(
            on_rank,
            mesh=layout.mesh,
            in_specs=(own, own, P(), P(), ranks, ranks),
            out_specs=(own, P("dp", "tp")),
            check_vma=False,
        )(x_STD, valid_ST, slot_of_expert_E, self.router[...], self.gate_up[...], self.down[...])


class Layer(nnx.Module):
    """One transformer block."""

    def __init__(self, c: ModelConfig, index: int, dtype: Any, tp: int) -> None:
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, "embed")
        self.attention = Attention(c, dtype, tp)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, "embed")
        self.mlp = MoE(c, dtype) if index in c.moe_layers else DenseMLP(c, dtype)

    def __call__(
        self,
        x_STD: jax.Array,
        pages: KVPages,
        slot_of_expert_E: jax.Array | None,
        inputs: StepInputs,
        rope: Rotation,
        layout: StepLayout,
    ) -> tuple[jax.Array, KVPages, jax.Array | None]:
        """Return hidden states, pages and counts [S, TP, E]. Without experts, placement and counts are None."""
        attended, pages = self.attention(self.input_norm(x_STD), pages, inputs, rope, layout)
        x_STD = layout.constrain(x_STD + attended, "dp")
        y_STD = self.post_norm(x_STD)
        if isinstance(self.mlp, MoE):
            # Padding has a KV place past the end of the pages.
            valid_ST = inputs.write_ST < pages[0].shape[1] * pages[0].shape[2]
            assert slot_of_expert_E is not None
            y_STD, counts_STE = self.mlp(y_STD, valid_ST, slot_of_expert_E, layout)
        else:
            y_STD, counts_STE = self.mlp(y_STD), None
        return layout.constrain(x_STD + y_STD, "dp"), pages, counts_STE


@partial(jax.jit, static_argnames=("graph", "layout"))
def _run_layer(
    graph: nnx.GraphDef,
    weights: nnx.State,
    x_STD: jax.Array,
    pages: KVPages,
    slot_of_expert_E: jax.Array | None,
    inputs: StepInputs,
    rope: Rotation,
    layout: StepLayout,
) -> tuple[jax.Array, KVPages, jax.Array | None]:
    """Run one layer. Because of the jit, layers of one kind are traced and lowered once; XLA inlines them."""
    return nnx.merge(graph, weights)(x_STD, pages, slot_of_expert_E, inputs, rope, layout)


class Qwen3Moe(nnx.Module):
    """The whole model, for engines of ``tp`` ranks. Each rank has its own KV heads, copies if there are too few.

    Its parameters are zeros: build it under ``nnx.eval_shape`` and load the values from a checkpoint.
    """

    def __init__(self, config: ModelConfig, dtype: Any, tp: int) -> None:
        self.config = config
        self.embed = param(dtype, vocab=config.vocab_size, embed=config.hidden_size)
        self.layers = nnx.List([Layer(config, i, dtype, tp) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, "embed")
        if not config.tie_embeddings:
            self.head = param(dtype, vocab=config.vocab_size, embed=config.hidden_size)

    def __call__(
        self, inputs: StepInputs, pages: list[KVPages], slot_of_expert_LE: jax.Array, layout: StepLayout
    ) -> tuple[jax.Array, list[KVPages], jax.Array]:
        """Run the forward pass of one step.

        Args:
          inputs: tokens of S engines with their positions and pages.
          pages: KV pages of each layer; donate them. Hidden states have their type, which may differ from the weights'.
          slot_of_expert_LE: int32 placement of the MoE layers.
          layout: mesh, tile, exchange and backend.

        Returns:
          Final hidden states [S, T, D], the pages, and int32 counts [S, TP, L, E].
        """
        x = layout.constrain(self.embed[...][inputs.tokens_ST].astype(pages[0][0].dtype), "dp")
        rope = rotation(self.config, inputs.positions_ST)
        slots, new_pages, counts = iter(slot_of_expert_LE), [], []
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            slots_E = next(slots) if isinstance(layer.mlp, MoE) else None
            x, layer_pages, counts_STE = _run_layer(*nnx.split(layer), x, layer_pages, slots_E, inputs, rope, layout)
            new_pages.append(layer_pages)
            counts += [] if counts_STE is None else [counts_STE]
        return self.norm(x), new_pages, jnp.stack(counts, axis=2)

    @property
    def output_table(self) -> jax.Array:
        """The output head [V, D], split by vocabulary over an engine's ranks."""
        return (self.embed if self.config.tie_embeddings else self.head)[...]

    def logits(self, hidden: jax.Array, layout: StepLayout) -> jax.Array:
        """Return float32 logits [S, G, V] of final hidden states [S, G, D], whole on every rank of an engine."""
        logits = product("sgd,vd->sgv", hidden, self.output_table, jnp.float32)
        # Constrain to a split by vocabulary first; otherwise XLA gathers the table instead of the logits.
        return layout.constrain(layout.constrain(logits, "dp", None, "tp"), "dp")
