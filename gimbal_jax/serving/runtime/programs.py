"""Compiled programs, in memory and in a folder for the next start.

jax's own cache saves XLA's work, but not tracing and lowering, which take seconds in Python. This cache keeps whole
executables, under a key of everything they depend on, so a second start does none of these.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils, serialize_executable, topologies
from jax.experimental.compilation_cache import compilation_cache
from jaxlib import xla_client

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.serving.runtime.environment import PACKAGE, PACKAGES, installed_version, sources_digest

MAX_BYTES = 2 * 2**30
"""Most bytes of all programs in a folder; the configurations that were used least recently are removed first."""
UNRELATED_SETTINGS = ("cache", "log", "dump", "traceback", "pprint", "debug_leaked", "report")
"""Settings of jax whose names contain one of these change no program."""
DEVICE_SETTINGS = ("jax_platforms", "jax_num_cpu_devices")
"""jax's settings that choose devices: the list of devices is in the key instead."""
SOURCES = ("model", "pallas_kernels", "serving/runtime")
"""Folders of this package that compiled code depends on, next to ``config.py``."""
SUFFIX = ".program"
"""Suffix of complete files; a file that is being written has none."""
DIGEST_BYTES = hashlib.sha256().digest_size


def programs_key(model: ModelConfig, config: ServerConfig, dtype: Any, devices: Sequence[jax.Device]) -> str:
    """Return a digest of everything that the programs of a server depend on. Equal keys mean equal programs.

    The digest covers the settings of model, engine and mesh, the files of this package that compiled code depends on,
    the versions of the packages that compile, the settings and flags of jax and XLA, the devices with their processes,
    the process that asks, and the kind and number of the host's processors.
    """
    client = devices[0].client
    facts = (
        asdict(model),
        asdict(config.engine),
        asdict(config.mesh),
        config.placement.rows_per_pair,
        str(dtype),
        [installed_version(name) for name in PACKAGES],
        hashlib.sha256((PACKAGE / "config.py").read_bytes()).hexdigest(),
        [sources_digest(PACKAGE / folder) for folder in SOURCES],
        _settings(jax.config.values),
        hashlib.sha256(xla_client.CompileOptions().SerializeAsString()).hexdigest(),
        [(device.id, device.device_kind, device.process_index) for device in devices],
        (jax.process_index(), jax.process_count()),
        (client.platform, client.platform_version, platform.machine(), _processors()),
        hashlib.sha256(topologies.get_attached_topology(client.platform).serialize()).hexdigest(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Return jax's settings that may change a program."""
    return {
        name: str(value)
        for name, value in sorted(values.items())
        if name not in DEVICE_SETTINGS and not any(part in name for part in UNRELATED_SETTINGS)
    }


def _processors() -> int:
    """Return the number of processors that XLA uses on CPU."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _file_name(key: object, compiler_options: dict[str, Any] | None) -> str:
    return hashlib.sha256(repr((key, compiler_options)).encode()).hexdigest()[:32] + SUFFIX


def _check_ours(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"others than this user can write to {path}")


class ProgramCache:
    """The compiled programs of one configuration, in a folder that other configurations and processes use too.

    Reading a file unpickles it, which can run any code. So only files and folders are used that belong to this user and
    that no other user can write to. If a file cannot be used, the reason is logged and the program is compiled.
    """

    def __init__(self, folder: Path, key: str, devices: Sequence[jax.Device], log: Callable[[str], None]) -> None:
        """``key``: ``programs_key`` of the programs for ``devices``. ``log`` receives problems, one line each.

        Turns jax's own cache off, because a program that comes from it lacks its code when it is serialized.
        """
        self._root = folder
        self._folder = folder / key
        self._devices = devices
        self._log = log
        self._writes = True
        self._ahead: dict[str, Future[jax.stages.Compiled | None]] = {}
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()

    def read_ahead(self) -> None:
        """Start to read all programs of this configuration, on two threads, without waiting."""
        pool = ThreadPoolExecutor(2)
        self._ahead = {path.name: pool.submit(self._read, path.name) for path in self._folder.glob(f"*{SUFFIX}")}
        pool.shutdown(wait=False)

    def load(self, name: str) -> jax.stages.Compiled | None:
        """Return the program of this name; None if there is none that can be used."""
        ahead = self._ahead.pop(name, None)
        return self._read(name) if ahead is None else ahead.result()

    def _read(self, name: str) -> jax.stages.Compiled | None:
        path = self._folder / name
        try:
            _check_ours(self._folder.stat(), self._folder)
            with path.open("rb") as file:
                _check_ours(os.fstat(file.fileno()), path)
                digest, content = file.read(DIGEST_BYTES), file.read()
            if hashlib.sha256(content).digest() != digest:
                raise ValueError("it is damaged")
            executable, inputs, outputs = pickle.loads(content)
            program = serialize_executable.deserialize_and_load(
                executable, inputs, outputs, self._devices[0].client, self._devices
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # an old file of this user may hold anything
            self._log(f"compiled program {name} cannot be used, so it is compiled again: {error}")
            return None
        with contextlib.suppress(OSError):  # a folder that can only be read
            os.utime(self._folder)
        return program

    def store(self, name: str, program: jax.stages.Compiled) -> None:
        """Write a program under this name, atomically. Then remove old programs if the folder is too large."""
        if not self._writes:
            return
        try:
            content = pickle.dumps(serialize_executable.serialize(program))
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            self._log(f"compiled program {name} is not kept: {error}")
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_ours(self._folder.stat(), self._folder)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete_on_close=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
                file.close()
                os.replace(file.name, self._folder / name)
            with contextlib.suppress(FileNotFoundError):  # another start was faster
                self._trim()
        except OSError as error:
            self._writes = False
            self._log(f"compiled programs are not kept: {error}")

    def _trim(self) -> None:
        sizes = {
            folder: sum(file.stat().st_size for file in folder.iterdir())
            for folder in self._root.iterdir()
            if folder.is_dir()
        }
        for folder in sorted(sizes, key=lambda folder: folder.stat().st_mtime):
            if sum(sizes.values()) <= MAX_BYTES or folder == self._folder:
                return
            shutil.rmtree(folder, ignore_errors=True)
            del sizes[folder]


def compile_programs[K](
    lowerers: Mapping[K, Callable[[], jax.stages.Lowered]],
    cache: ProgramCache | None,
    compiler_options: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[K, jax.stages.Compiled]:
    """Return a program for each key, from the cache, or lowered on this thread and compiled on a pool.

    XLA reads and compiles programs outside the interpreter lock. The ``repr`` of a key is the program's name in the
    cache. ``progress`` is called with the number done and the total; an error of it ends this function as soon as the
    programs that are being compiled are done.

    All processes call this together, with the same keys in the same order. If one of them lacks a program, all compile
    it, because XLA:GPU tunes it once for all processes, and a process that compiled it alone would wait forever.
    """
    names = {key: _file_name(key, compiler_options) for key in lowerers}

    def compiled(key: K, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        program = lowered.compile(compiler_options)
        if cache is not None:
            cache.store(names[key], program)
        return program

    programs: dict[K, jax.stages.Compiled] = {}

    def report() -> None:
        if progress is not None:
            progress(len(programs), len(lowerers))

    pool = ThreadPoolExecutor(max_workers=min(4, _processors()))
    try:
        found = {key: pool.submit(cache.load, names[key]) for key in lowerers} if cache is not None else {}
        for key, reading in found.items():
            report()
            if (program := reading.result()) is not None:
                programs[key] = program
        kept_by_all = multihost_utils.process_allgather(np.array([key in programs for key in lowerers])).all(axis=0)
        programs = {key: programs[key] for key, kept in zip(lowerers, kept_by_all, strict=True) if kept}
        pending: dict[K, Future[jax.stages.Compiled]] = {}
        for key in [key for key in lowerers if key not in programs]:
            report()
            pending[key] = pool.submit(compiled, key, lowerers[key]())
        for key, future in pending.items():
            programs[key] = future.result()
            report()
    finally:
        pool.shutdown(cancel_futures=True)
    report()
    return programs
