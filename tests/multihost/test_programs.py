"""Compiled programs on a mesh of several processes: all take a program from their folders, or all compile it."""

import hashlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gimbal_jax.config import MeshConfig, ModelConfig, ServerConfig
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.serving.runtime.device_runner import CompileCounter
from gimbal_jax.serving.runtime.programs import ProgramCache, compile_programs, programs_key
from tests.multihost.processes import on_mesh

MODEL = ModelConfig(64, 16, 32, 1, 2, 1, 8, 4, 2, 8, (0,))
SIZES = (3, 5, 8)


class Start:
    """One start of this process of a 2 x 2 server that has a few programs with collectives."""

    def __init__(self, folder: Path | None):
        self.mesh, self.lowered = make_mesh(MeshConfig(2, 2)), 0
        self.notes: list[str] = []
        self.key = programs_key(MODEL, ServerConfig(MeshConfig(2, 2)), "float32", jax.devices())
        self.cache = None if folder is None else ProgramCache(folder, self.key, jax.devices(), self.notes.append)
        counter = CompileCounter()
        if self.cache is not None:
            self.cache.read_ahead()
        self.programs = compile_programs({size: partial(self.lower, size) for size in SIZES}, self.cache)
        self.compiled = counter.count

    def inputs(self):
        x_AB = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
        for axis in ("dp", "tp"):
            yield jax.make_array_from_callback((8, 8), NamedSharding(self.mesh, PartitionSpec(axis)), x_AB.__getitem__)

    def lower(self, size: int) -> jax.stages.Lowered:
        self.lowered += 1
        return jax.jit(lambda x_AB, y_AB: (jnp.sort(x_AB @ y_AB.T)[:, :size], y_AB - x_AB.sum())).lower(*self.inputs())

    def answer(self):
        outputs = jax.tree.leaves([program(*self.inputs()) for program in self.programs.values()])
        content = b"".join(np.asarray(shard.data).tobytes() for out in outputs for shard in out.addressable_shards)
        return {
            "key": self.key,
            "lowered": self.lowered,
            "compiled": self.compiled,
            "notes": self.notes,
            "output": hashlib.sha256(content).hexdigest(),
        }


def first_start(folder: str):
    return Start(Path(folder)).answer()


def later_starts(folder: str):
    """A second start, one after process 1 lost a program, one where process 1 keeps no programs, and a last one."""
    process, second = jax.process_index(), Start(Path(folder))
    if process == 1:
        next(Path(folder, second.key).iterdir()).unlink()
    third = Start(Path(folder))
    fourth = Start(None if process == 1 else Path(folder))
    return [start.answer() for start in (second, third, fourth, Start(Path(folder)))]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("programs"))
    first = on_mesh(first_start, processes=2, devices=2, folder=folder)
    later = on_mesh(later_starts, processes=2, devices=2, folder=folder)
    return [[first[process], *later[process]] for process in range(2)]


def test_all_processes_lower_a_program_or_none_does(started):
    for answers in started:
        assert [answer["lowered"] for answer in answers] == [3, 0, 1, 3, 0]
        # The processes exchange which programs they have by a program of jax's, compiled once in the life of a process.
        assert answers[1]["compiled"] <= 1 and answers[4]["compiled"] == 0
        assert [note for answer in answers for note in answer["notes"]] == []


def test_kept_programs_give_the_same_bits(started):
    for answers in started:
        assert len({answer["output"] for answer in answers}) == 1


def test_each_process_has_its_own_programs(started):
    keys = [{answer["key"] for answer in answers} for answers in started]
    alone = programs_key(MODEL, ServerConfig(MeshConfig(2, 2)), "float32", jax.devices())
    assert [len(found) for found in keys] == [1, 1]
    assert len(keys[0] | keys[1] | {alone}) == 3
