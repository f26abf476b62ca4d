from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import EngineConfig
from gimbal_jax.model.inputs import RareInputs, empty_inputs, step_shape, unpack
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.runtime.batch import default_rare_inputs
from gimbal_jax.serving.runtime.commands import Layout, Migrate, Step, Stop, TakeCounts, decode, encode

ENGINE = EngineConfig(max_model_len=64, page_size=8, num_pages=16, max_rows=4, token_budget=16, tile=4)
ENGINES = 4
LAYOUT = Layout(
    shape_of=lambda bucket: step_shape(ENGINE, bucket),
    defaults=default_rare_inputs(ENGINE, vocab_size=100, engines=ENGINES),
    engines_of_process=(slice(0, 1), slice(1, 3), slice(3, 4), slice(0, 4)),
)
PROCESSES = range(len(LAYOUT.engines_of_process))
RARE = tuple(RareInputs.__dataclass_fields__)


def any_step(bucket, asked, seed):
    """Inputs that no plan would give: every bit of them must arrive."""
    rng = np.random.default_rng(seed)
    packed_SX = empty_inputs(ENGINES, LAYOUT.shape_of(bucket))
    packed_SX[:] = rng.integers(-(2**31), 2**31, packed_SX.shape)

    def drawn(name):
        like = getattr(LAYOUT.defaults, name)
        return rng.integers(0, 2, like.shape).astype(like.dtype)

    return Step(bucket, packed_SX, replace(LAYOUT.defaults, **{name: drawn(name) for name in asked}))


@given(
    bucket=st.sampled_from([(1, 0), (4, 0), (4, 4), (2, 1)]),
    asked=st.sets(st.sampled_from(RARE)),
    process=st.sampled_from(PROCESSES),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_process_receives_the_inputs_of_its_engines_and_keeps_defaults(bucket, asked, process, seed):
    step = any_step(bucket, asked, seed)
    got = decode(encode(step, LAYOUT, process), LAYOUT, process)
    own = LAYOUT.engines_of_process[process]
    assert isinstance(got, Step)
    assert got.bucket == bucket
    np.testing.assert_array_equal(got.packed_SX[own], step.packed_SX[own])
    assert got.packed_SX.shape == step.packed_SX.shape
    for name in RARE:
        sent, arrived = getattr(step.rare, name), getattr(got.rare, name)
        if name not in asked:
            assert arrived is getattr(LAYOUT.defaults, name)
            continue
        assert (arrived.shape, arrived.dtype) == (sent.shape, sent.dtype)
        np.testing.assert_array_equal(*((array[own] if array.ndim else array) for array in (arrived, sent)))


def test_a_process_receives_no_inputs_of_other_engines():
    step = any_step((4, 4), {"history_SRN"}, seed=0)
    sizes = [len(encode(step, LAYOUT, process)) for process in PROCESSES]
    per_engine = 4 * (step.packed_SX.shape[1] + step.rare.history_SRN[0].size)
    assert np.diff([sizes[0], sizes[1], sizes[3]]).tolist() == [per_engine, 2 * per_engine]
    assert sizes[0] < per_engine + 32


def test_page_tables_are_as_wide_as_the_longest_sequence():
    step = any_step((4, 4), set(), seed=0)
    table_SCM = unpack(step.packed_SX, LAYOUT.shape_of((4, 4))).page_table_SCM
    sizes = {}
    for columns in (0, 1, 3):
        table_SCM[:] = 0
        table_SCM[0, 2, columns - 1] = 7 * (columns > 0)
        table_SCM[1:] = 5  # of other processes
        sizes[columns] = len(encode(step, LAYOUT, 0))
        got = decode(encode(step, LAYOUT, 0), LAYOUT, 0)
        assert isinstance(got, Step)
        np.testing.assert_array_equal(got.packed_SX[0], step.packed_SX[0])
    assert np.diff(list(sizes.values())).tolist() == [4 * table_SCM.shape[1], 8 * table_SCM.shape[1]]
    assert sizes[0] <= step.packed_SX[0].nbytes - 4 * table_SCM[0].size + 20


@given(st.integers(0, 93), st.lists(st.integers(0, 127), max_size=9), st.permutations(range(16)))
def test_moves_arrive(layer, slots, table):
    moves = Round(np.array(slots, np.int32), np.array(slots[::-1], np.int32), np.array(table, np.int32))
    got = decode(encode(Migrate(layer, moves), LAYOUT, 1), LAYOUT, 1)
    assert isinstance(got, Migrate)
    assert got.layer == layer
    for name in ("src_slot", "dst_slot", "slot_of_expert_E"):
        np.testing.assert_array_equal(getattr(got.moves, name), getattr(moves, name))
        assert getattr(got.moves, name).dtype == np.int32


@pytest.mark.parametrize("command", [TakeCounts(), Stop()])
def test_commands_without_arguments_arrive(command):
    assert decode(encode(command, LAYOUT, 2), LAYOUT, 2) == command
