"""The server's programs for 4 H100s break no rule, and each deliberate fault breaks the rule that should find it."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import GPU_ENGINE, MeshConfig, ServerConfig
from gimbal_jax.model import moe, transformer
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.sharding import RANKS
from gimbal_jax.pallas_kernels import grouped_matmul
from gimbal_jax.planning import compiled
from gimbal_jax.planning.check import server_config
from gimbal_jax.planning.compiled import Program, compile_migration, compile_step
from gimbal_jax.planning.hardware import gpu_kinds
from gimbal_jax.planning.plan import PlanRequest
from gimbal_jax.planning.rules import Subject, findings

H100 = gpu_kinds()["H100"]
# The vocabulary is small, because sampling takes most of the time to compile a shallow model.
MODEL = replace(PRESETS["Qwen3-30B-A3B"], vocab_size=1024)
REQUEST = PlanRequest(MODEL, H100, 4, replace(GPU_ENGINE, max_model_len=32768))
CONFIG = server_config(REQUEST, MeshConfig(2, 2))
DECODE, MIXED = (128, 0), (128, 128)


@pytest.fixture
def replace_in(monkeypatch):
    """Return a function that replaces a function of the model, whose layers are then traced again."""

    def replaced(module, name, function):
        monkeypatch.setattr(transformer, "_run_layer", inspect.unwrap(transformer._run_layer))
        monkeypatch.setattr(module, name, function)

    return replaced


def step_of(config: ServerConfig, bucket: tuple[int, int]) -> Program:
    return compile_step(MODEL, config, H100, bucket, layers=1)


def rules_broken_by(program: Program, config: ServerConfig, bucket: tuple[int, int] | None) -> set[str]:
    return {one.rule for one in findings(Subject(program, MODEL, config, H100, REQUEST.utilisation, bucket))}


@pytest.mark.parametrize("exchange", ["gather", "sparse"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_step_keeps_every_rule(exchange, nodes):
    config = replace(CONFIG, mesh=MeshConfig(2, 2, nodes), engine=replace(CONFIG.engine, exchange=exchange))
    assert rules_broken_by(step_of(config, MIXED), config, MIXED) == set()


def test_programs_of_one_and_two_layers_give_the_same_bytes():
    """Only then does a shallow program represent the deep one."""
    one, two = (compile_step(MODEL, CONFIG, H100, DECODE, layers=layers) for layers in (1, 2))
    assert one.argument_bytes == two.argument_bytes
    assert two.temporary_bytes == pytest.approx(one.temporary_bytes, abs=2e6)
    assert rules_broken_by(two, CONFIG, DECODE) == set()


def test_a_product_with_all_experts_is_found(replace_in):
    replace_in(grouped_matmul, "_product_by_tokamax", jax.lax.ragged_dot)
    assert {"sparse experts", "kernels"} <= rules_broken_by(step_of(CONFIG, DECODE), CONFIG, DECODE)


def test_a_dense_copy_of_the_context_is_found(replace_in):
    def dense(q_GQHD, k_pages, v_pages, page_table_GM, start_G, count_G, *, window, backend):
        groups = q_GQHD.shape[0]
        k, v = (pages[page_table_GM].reshape(groups, -1, *pages.shape[2:]) for pages in (k_pages, v_pages))
        seen = jnp.arange(k.shape[1]) < (start_G + count_G)[:, None]
        return jax.nn.dot_product_attention(q_GQHD, k, v, mask=seen[:, None, None])

    replace_in(transformer, "paged_attention", dense)
    assert "paged context" in rules_broken_by(step_of(CONFIG, DECODE), CONFIG, DECODE)


def test_a_step_that_keeps_its_old_state_is_found(monkeypatch):
    real = jax.jit
    monkeypatch.setattr(jax, "jit", lambda *run, donate_argnums=(), **settings: real(*run, **settings))
    assert "in place" in rules_broken_by(step_of(CONFIG, DECODE), CONFIG, DECODE)


def test_recomputed_values_are_found(monkeypatch):
    """XLA recomputes values if memory is short and no option forbids it."""
    monkeypatch.setattr(compiled, "COMPILER_OPTIONS", {})
    assert "collectives" in rules_broken_by(compile_step(MODEL, CONFIG, H100, DECODE, layers=2), CONFIG, DECODE)


def test_a_pool_that_is_too_large_is_found():
    """The program need not be compiled again: the pool is an argument, and nothing else depends on it."""
    program = step_of(CONFIG, DECODE)
    larger = replace(program, argument_bytes=program.argument_bytes + 2 * 10**9)
    assert "memory" in rules_broken_by(larger, CONFIG, DECODE)


def test_expert_weights_that_are_gathered_are_found(replace_in):
    def everywhere(x, slots, weight, sizes, gate_up, down, **kwargs):
        whole = jax.lax.all_gather(gate_up, RANKS, tiled=True)
        return grouped_matmul.grouped_ffn(x, slots, weight, sizes, whole[: gate_up.shape[0]], down, **kwargs)

    replace_in(moe, "grouped_ffn", everywhere)
    assert {"experts stay", "collectives"} <= rules_broken_by(step_of(CONFIG, DECODE), CONFIG, DECODE)


def test_a_round_of_moves_keeps_every_rule():
    assert rules_broken_by(compile_migration(MODEL, CONFIG, H100), CONFIG, None) == set()


def test_a_naive_migration_is_found(monkeypatch):
    def naive(weights, send_RRC, receive_RRC, *, mesh):
        new_order = jnp.argsort(receive_RRC.reshape(-1)[jnp.arange(MODEL.num_experts) % receive_RRC.size])
        ranks = NamedSharding(mesh, P(RANKS))
        return tuple(jax.lax.with_sharding_constraint(part[new_order], ranks) for part in weights)

    monkeypatch.setattr(compiled, "move_experts", naive)
    broken = rules_broken_by(compile_migration(MODEL, CONFIG, H100), CONFIG, None)
    assert {"collectives", "temporaries"} <= broken
