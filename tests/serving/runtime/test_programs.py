"""Compiled programs kept in a folder: the same bits as fresh ones, and only where everything is the same."""

import dataclasses
import hashlib
import os
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig, PlacementConfig, QueueConfig, ServerConfig
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.serving.runtime import programs
from gimbal_jax.serving.runtime.device_runner import CompileCounter
from gimbal_jax.serving.runtime.programs import ProgramCache, compile_programs, programs_key

MODEL = ModelConfig(64, 16, 32, 1, 2, 1, 8, 4, 2, 8, (0,))
SIZES = (3, 8)


@dataclasses.dataclass(frozen=True)
class Pair:
    table_AB: jax.Array
    total_A: jax.Array


jax.tree_util.register_dataclass(Pair)


def computation(state: Pair, x_AB: jax.Array, size: int) -> tuple[jax.Array, Pair]:
    """Products, a sort by a comparator, draws and a sum over the mesh; updates its state in place."""
    ranked_AB, order_AB = jax.lax.sort_key_val(jnp.sin(x_AB @ state.table_AB.T)[:, :size], x_AB[:, :size])
    noise_A = jax.random.gumbel(jax.random.key(size), x_AB.shape[:1])
    return ranked_AB * order_AB + x_AB.sum(), Pair(state.table_AB + 1, state.total_A + noise_A)


class Lowering:
    """Lowers a function at each size on a 2 x 2 mesh, and counts how often."""

    def __init__(self, function=lambda state, x_AB, size: (x_AB * size, state)):
        self.mesh = make_mesh(MeshConfig(2, 2), jax.devices())
        self.function, self.count = function, 0

    def inputs(self):
        x_AB = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
        rows, columns = (NamedSharding(self.mesh, PartitionSpec(axis)) for axis in ("dp", "tp"))
        return Pair(jax.device_put(x_AB, columns), jax.device_put(x_AB[0], rows)), jax.device_put(x_AB + 1, rows)

    def lower(self, size: int) -> jax.stages.Lowered:
        self.count += 1
        return jax.jit(lambda state, x_AB: self.function(state, x_AB, size), donate_argnums=0).lower(*self.inputs())

    def lowerers(self):
        return {("step", size): lambda size=size: self.lower(size) for size in SIZES}

    def outputs(self, compiled):
        return [jax.tree.leaves(jax.device_get(program(*self.inputs()))) for program in compiled.values()]


def cache_in(folder, notes, key="key"):
    return ProgramCache(folder, key, jax.devices(), notes.append)


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("ahead", [False, True])
def test_a_second_start_neither_lowers_nor_compiles_and_gives_the_same_bits(tmp_path, ahead):
    lowering, done = Lowering(computation), []
    notes: list[str] = []
    fresh = compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
    wanted = lowering.outputs(fresh)
    uncached = lowering.outputs(compile_programs(lowering.lowerers(), None))
    assert lowering.count == 4
    cache, counter = cache_in(tmp_path, notes), CompileCounter()
    if ahead:
        cache.read_ahead()
    kept = compile_programs(lowering.lowerers(), cache, progress=lambda *counts: done.append(counts))
    assert (lowering.count, counter.count, notes) == (4, 0, [])
    assert done[-1] == (2, 2) and done == sorted(done)
    state, x_AB = lowering.inputs()
    kept["step", 3](state, x_AB)
    assert state.table_AB.is_deleted(), "donated as before"
    for outputs in (lowering.outputs(kept), uncached):
        jax.tree.map(np.testing.assert_array_equal, outputs, wanted)


def test_other_keys_names_and_options_miss(tmp_path):
    lowering = Lowering()
    notes: list[str] = []
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes, "other"))
    assert lowering.count == 4
    options = {"xla_disable_hlo_passes": "rematerialization"}
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes), options)
    assert lowering.count == 6
    renamed = {("step", 4): lambda: lowering.lower(4)}
    compile_programs(renamed, cache_in(tmp_path, notes), options)
    assert (lowering.count, notes) == (7, [])


def with_digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: b"",
        lambda whole: whole[:-100],
        lambda whole: whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:],
        lambda whole: with_digest(b"not a pickle"),
        lambda whole: with_digest(pickle.dumps("not a program")),
        lambda whole: with_digest(pickle.dumps((b"not a program", None, None))),
    ],
)
def test_a_damaged_file_is_logged_and_its_program_compiled(tmp_path, spoil):
    lowering = Lowering()
    notes: list[str] = []
    wanted = lowering.outputs(compile_programs(lowering.lowerers(), cache_in(tmp_path, notes)))
    spoiled = files_in(tmp_path)[0]
    spoiled.write_bytes(spoil(spoiled.read_bytes()))
    compiled = compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
    jax.tree.map(np.testing.assert_array_equal, lowering.outputs(compiled), wanted)
    assert lowering.count == 3
    (note,) = notes
    assert spoiled.name in note and "compiled again" in note
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
    assert (lowering.count, len(notes)) == (3, 1), "it is whole again"


def test_files_that_other_users_can_write_are_not_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    lowering = Lowering()
    notes: list[str] = []
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
    for path in files_in(tmp_path):
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        path.write_bytes(with_digest(pickle.dumps(Evil())))
        path.chmod(0o620)
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
    assert lowering.count == 4 and not (tmp_path / "harm").exists()
    assert ["others than this user can write to" in note for note in notes] == [True, True]


def test_folders_that_other_users_can_write_are_not_used(tmp_path):
    lowering = Lowering()
    notes: list[str] = []
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
    (tmp_path / "key").chmod(0o770)
    before = [path.stat().st_mtime_ns for path in files_in(tmp_path)]
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
    assert lowering.count == 4
    assert [path.stat().st_mtime_ns for path in files_in(tmp_path)] == before
    assert all("others than this user can write to" in note for note in notes) and len(notes) >= 3


def test_programs_are_used_if_their_folder_cannot_be_written(tmp_path, monkeypatch):
    lowering = Lowering()
    notes: list[str] = []
    (tmp_path / "file").write_text("")
    cache = cache_in(tmp_path / "file", notes)
    cache.read_ahead()
    assert len(compile_programs(lowering.lowerers(), cache)) == 2
    assert notes and all("compiled programs are not kept" in note for note in notes)

    notes.clear()
    full = cache_in(tmp_path, notes)
    monkeypatch.setattr(os, "replace", lambda *paths: full_disk())
    compile_programs(lowering.lowerers(), full)
    compile_programs(lowering.lowerers(), full)
    assert notes and len(notes) <= 2, "logged by at most the threads that were writing"


def full_disk():
    raise OSError(28, "No space left on device")


def test_programs_of_the_jax_cache_are_compiled_again(tmp_path):
    """Kept again they would lack their code, which shows when they run."""
    before = jax.config.jax_compilation_cache_dir
    lowering = Lowering()
    notes: list[str] = []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_enable_compilation_cache", True)
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        wanted = lowering.outputs(compile_programs(lowering.lowerers(), None))
        compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
        kept = compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))
        jax.tree.map(np.testing.assert_array_equal, lowering.outputs(kept), wanted)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    assert (lowering.count, notes) == (4, [])


def test_simultaneous_starts_share_a_folder(tmp_path):
    lowering, outputs = Lowering(), []
    notes: list[str] = []

    def start():
        outputs.append(lowering.outputs(compile_programs(lowering.lowerers(), cache_in(tmp_path, notes))))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start()
    assert notes == [] and len(files_in(tmp_path)) == 2
    for other in outputs[1:]:
        jax.tree.map(np.testing.assert_array_equal, outputs[0], other)
    assert len(outputs) == 5


def test_least_recently_used_configurations_are_removed_first(tmp_path, monkeypatch):
    lowering = Lowering()
    notes: list[str] = []
    for age, key in enumerate(("young", "old", "oldest")):
        compile_programs(lowering.lowerers(), cache_in(tmp_path, notes, key))
        os.utime(tmp_path / key, (10**9 - age, 10**9 - age))
    size = sum(path.stat().st_size for path in (tmp_path / "young").iterdir())
    monkeypatch.setattr(programs, "MAX_BYTES", int(2.5 * size))
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes, "old"))  # used: now the youngest
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes, "new"))
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}
    monkeypatch.setattr(programs, "MAX_BYTES", 0)
    compile_programs(lowering.lowerers(), cache_in(tmp_path, notes, "last"))
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
    assert notes == []


def test_an_error_of_progress_ends_compilation(tmp_path):
    lowering = Lowering()

    def interrupted(done: int, total: int) -> None:
        if lowering.count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_programs(lowering.lowerers(), None, progress=interrupted)
    assert lowering.count == 1


def test_the_key_depends_on_everything_that_changes_a_program(monkeypatch, tmp_path):
    config, devices = ServerConfig(MeshConfig(2, 2)), jax.devices()
    key = programs_key(MODEL, config, "float32", devices)
    assert programs_key(MODEL, config, "float32", devices) == key
    same = dataclasses.replace(config, queue=QueueConfig("fcfs"))
    assert programs_key(MODEL, same, "float32", devices) == key, "scheduling is not compiled"
    keys = {
        key,
        programs_key(dataclasses.replace(MODEL, rms_norm_eps=1e-5), config, "float32", devices),
        programs_key(MODEL, dataclasses.replace(config, engine=EngineConfig(num_pages=7)), "float32", devices),
        programs_key(MODEL, dataclasses.replace(config, mesh=MeshConfig(4, 1)), "float32", devices),
        programs_key(
            MODEL, dataclasses.replace(config, placement=PlacementConfig(rows_per_pair=3)), "float32", devices
        ),
        programs_key(MODEL, config, "bfloat16", devices),
        programs_key(MODEL, config, "float32", devices[::-1]),
    }
    with jax.default_matmul_precision("highest"):
        keys.add(programs_key(MODEL, config, "float32", devices))
    monkeypatch.setattr(programs, "installed_version", lambda package: "other")
    keys.add(programs_key(MODEL, config, "float32", devices))
    monkeypatch.undo()
    monkeypatch.setattr(programs, "PACKAGE", tmp_path)
    for folder in ("model", "serving/runtime", "serving/rpc"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "config.py").write_text("x = 1")
    changed = ("config.py", "model/moe.py", "serving/runtime/batch.py")
    for path in changed:
        (tmp_path / path).write_text("x = 2")
        keys.add(key := programs_key(MODEL, config, "float32", devices))
    assert len(keys) == 9 + len(changed)
    (tmp_path / "serving/rpc/server.py").write_text("x = 2")
    assert programs_key(MODEL, config, "float32", devices) == key, "no compiled code depends on it"


def test_settings_that_choose_devices_are_not_in_the_key():
    """The list of devices is: one CPU device is the same by ``auto`` and by ``cpu:1``."""
    chosen = {"jax_platforms": "cpu", "jax_num_cpu_devices": 1}
    assert chosen.keys() <= jax.config.values.keys()
    assert programs._settings(jax.config.values | chosen) == programs._settings(
        jax.config.values | dict.fromkeys(chosen)
    )
    assert "jax_default_matmul_precision" in programs._settings(jax.config.values)
