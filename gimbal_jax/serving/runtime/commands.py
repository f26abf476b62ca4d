"""Commands of the leading process to its followers, and how they are encoded as bytes.

Every process has the same programs and executes the commands in order. The bytes of a step hold only the inputs of the
engines whose devices the receiver has. Page tables are as wide as the longest sequence needs, and rare inputs are left
out if no request sets them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import numpy as np

from gimbal_jax.model.inputs import Bucket, RareInputs, StepShape, empty_inputs, unpack
from gimbal_jax.scheduler.migration import Round


@dataclass(frozen=True, eq=False)
class Step:
    """One step of all engines."""

    bucket: Bucket
    packed_SX: np.ndarray
    rare: RareInputs
    """Arrays that differ from those of ``Layout.defaults`` are sent."""


@dataclass(frozen=True)
class TakeCounts:
    """Read the expert counters and reset them."""


@dataclass(frozen=True, eq=False)
class Migrate:
    """Apply one round of moves to a MoE layer."""

    layer: int
    moves: Round


@dataclass(frozen=True)
class Stop:
    """The last command. All processes then do together what the options ask for at the end."""


Command = Step | TakeCounts | Migrate | Stop


@dataclass(frozen=True, eq=False)
class Layout:
    """Sizes that sender and receiver know before the first command."""

    shape_of: Callable[[Bucket], StepShape]
    defaults: RareInputs
    """Rare inputs that no request sets. Only their shapes and types are read, so they may be on the devices."""
    engines_of_process: tuple[slice, ...]
    """Engines that have devices in each process; they are consecutive."""


class Followers(Protocol):
    """The other processes, as the leader sees them."""

    def send(self, command: Command, layout: Layout) -> None:
        """Send a command to all of them. Raises if one of them is lost."""

    def compiles_after_warmup(self) -> int:
        """Return the programs that all of them compiled since warm-up, as far as they have reported."""

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise for a failed computation: a lost follower if that is the cause, or ``error``."""


_STEP, _TAKE_COUNTS, _MIGRATE, _STOP = range(4)
_HEAD = struct.Struct("<BIIII")
"""Kind and four numbers. A step has rows, tiles, page table columns and rare bits; a migration has layer and moves."""
_RARE = tuple(RareInputs.__dataclass_fields__)


def engines_by_process(mesh: jax.sharding.Mesh) -> tuple[slice, ...]:
    """Return ``Layout.engines_of_process`` of a mesh. ValueError if a process has no devices in it."""
    process_ST = np.vectorize(lambda device: device.process_index)(mesh.devices)
    engines = [np.flatnonzero((process_ST == process).any(axis=1)) for process in range(jax.process_count())]
    if not all(map(len, engines)):
        raise ValueError(f"process {list(map(len, engines)).index(0)} has no devices in the mesh")
    return tuple(slice(int(own[0]), int(own[-1]) + 1) for own in engines)


def encode(command: Command, layout: Layout, process: int) -> bytes:
    """Return the bytes of a command for one process."""
    engines = layout.engines_of_process[process]
    match command:
        case Step(bucket, packed_SX, rare):
            asked = {
                bit: array
                for bit, name in enumerate(_RARE)
                if (array := getattr(rare, name)) is not getattr(layout.defaults, name)
            }
            parts = [array[engines] if array.ndim else array for array in asked.values()]
            usual_SX, table_SCM = _usual_and_table(packed_SX[engines], layout.shape_of(bucket))
            used = np.flatnonzero(table_SCM.any(axis=(0, 1)))
            columns = int(used[-1]) + 1 if len(used) else 0
            head = _HEAD.pack(_STEP, *bucket, columns, sum(1 << bit for bit in asked))
            arrays = usual_SX, table_SCM[..., :columns], *parts
            return b"".join([head, *(array.tobytes() for array in arrays)])
        case TakeCounts():
            return _HEAD.pack(_TAKE_COUNTS, 0, 0, 0, 0)
        case Migrate(layer, moves):
            slots = moves.src_slot, moves.dst_slot, moves.slot_of_expert_E
            head = _HEAD.pack(_MIGRATE, layer, len(moves.src_slot), 0, 0)
            return head + b"".join(array.astype("<i4").tobytes() for array in slots)
        case Stop():
            return _HEAD.pack(_STOP, 0, 0, 0, 0)


def decode(data: bytes, layout: Layout, process: int) -> Command:
    """Return the command that ``encode`` was given. Inputs of engines of other processes are meaningless."""
    kind, *numbers = _HEAD.unpack_from(data)
    rest = memoryview(data)[_HEAD.size :]
    if kind == _STEP:
        rows, tiles, columns, asked = numbers
        return _decode_step(rest, (rows, tiles), columns, asked, layout, process)
    if kind == _TAKE_COUNTS:
        return TakeCounts()
    if kind == _MIGRATE:
        layer, count, *_ = numbers
        values = np.frombuffer(rest, "<i4")
        return Migrate(layer, Round(values[:count], values[count : 2 * count], values[2 * count :]))
    return Stop()


def _decode_step(rest: memoryview, bucket: Bucket, columns: int, asked: int, layout: Layout, process: int) -> Step:
    defaults, shape, engines = layout.defaults, layout.shape_of(bucket), layout.engines_of_process[process]
    sources = len(defaults.prompt_tokens_SR)
    packed_SX = empty_inputs(sources, shape)
    usual_SX, table_SCM = _usual_and_table(packed_SX[engines], shape)
    at = 0

    def take(into: np.ndarray) -> None:
        nonlocal at
        into[...] = np.frombuffer(rest[at:], into.dtype, into.size).reshape(into.shape)
        at += into.nbytes

    take(usual_SX)
    take(table_SCM[..., :columns])
    arrays: dict[str, np.ndarray] = {}
    for bit, name in enumerate(_RARE):
        if asked >> bit & 1:
            like = getattr(defaults, name)
            arrays[name] = array = np.zeros(like.shape, like.dtype)
            take(array[engines] if array.ndim else array)
    return Step(bucket, packed_SX, replace(defaults, **arrays))


def _usual_and_table(packed_SX: np.ndarray, shape: StepShape) -> tuple[np.ndarray, np.ndarray]:
    """Return two views of packed inputs: everything before the page tables, and the page tables, which come last."""
    table_SCM = unpack(packed_SX, shape).page_table_SCM
    return packed_SX[:, : packed_SX.shape[1] - table_SCM[0].size], table_SCM
