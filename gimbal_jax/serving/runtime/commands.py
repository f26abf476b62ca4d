"""What the process that leads tells the others to do, in order, and its bytes.

Every process has the same programs. A step's bytes are those of the engines whose devices the receiver holds: the
packed inputs of these engines, with page tables as wide as the longest sequence needs, and of the rare ones only what
somebody asks for.
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
    """Arrays that are not those of ``Layout.defaults`` are asked for."""


@dataclass(frozen=True)
class TakeCounts:
    """Set the counters aside; they start anew."""


@dataclass(frozen=True, eq=False)
class Migrate:
    """One round of moves."""

    layer: int
    moves: Round


@dataclass(frozen=True)
class Stop:
    """The last command: what the options want at the end comes next, in all processes together."""


Command = Step | TakeCounts | Migrate | Stop


@dataclass(frozen=True, eq=False)
class Layout:
    """What sender and receiver know before any command."""

    shape_of: Callable[[Bucket], StepShape]
    defaults: RareInputs
    """Inputs that ask for nothing; only its shapes and types are read, so they may be on the devices."""
    engines_of_process: tuple[slice, ...]
    """The engines that have devices in each process; they are consecutive."""


class Followers(Protocol):
    """The other processes, to the one that leads."""

    def send(self, command: Command, layout: Layout) -> None:
        """Have them all do it, after what they were told before. Raises where one of them is gone."""

    def compiles_after_warmup(self) -> int:
        """Of all of them, as far as they have told."""

    def explain(self, error: Exception) -> Exception:
        """What to raise for a failed computation: that a follower is lost, if that is why."""


_STEP, _TAKE_COUNTS, _MIGRATE, _STOP = range(4)
_HEAD = struct.Struct("<BIIII")
"""Kind, and four numbers: rows, tiles, columns of the page tables and a bit for each rare array; layer and moves."""
_RARE = tuple(RareInputs.__dataclass_fields__)


def engines_by_process(mesh: jax.sharding.Mesh) -> tuple[slice, ...]:
    """``Layout.engines_of_process`` of a mesh; raises ValueError where a process has no part in it."""
    process_ST = np.vectorize(lambda device: device.process_index)(mesh.devices)
    engines = [np.flatnonzero((process_ST == process).any(axis=1)) for process in range(jax.process_count())]
    if not all(map(len, engines)):
        raise ValueError(f"process {list(map(len, engines)).index(0)} has no devices in the mesh")
    return tuple(slice(int(own[0]), int(own[-1]) + 1) for own in engines)


def encode(command: Command, layout: Layout, process: int) -> bytes:
    """The bytes for this process."""
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
    """The command of ``encode`` for this process; what it says of other engines' inputs means nothing."""
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
    """Views of packed inputs: all that is before the page tables, which come last, and these."""
    table_SCM = unpack(packed_SX, shape).page_table_SCM
    return packed_SX[:, : packed_SX.shape[1] - table_SCM[0].size], table_SCM
