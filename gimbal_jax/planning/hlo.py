"""Instructions, collectives, kernels and parameters of a compiled program, read from its optimised HLO text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""Device numbers of each group that exchanges data."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclass(frozen=True)
class HloArray:
    """Type of one array of a program, on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return -(-self.elements * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction that writes its result to device memory."""

    name: str
    opcode: str
    results: tuple[HloArray, ...]
    text: str


@dataclass(frozen=True)
class Collective:
    """One array that a collective gives to every device of a group."""

    kind: str
    result: HloArray
    groups: Groups


def instructions(hlo: str) -> Iterator[Instruction]:
    """Yield every instruction outside fusions. The instructions inside fusions write no memory."""
    fused = set(re.findall(r" fusion\(.*?calls=%?([\w.\-]+)", hlo))
    fused |= set(re.findall(r"to_apply=%?([\w.\-]+)", hlo))
    inside = ""
    for line in hlo.splitlines():
        if not line.startswith(" "):
            header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)
            inside = header[1] if header else inside
            continue
        match = re.match(r" +(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(", line)
        if match and inside not in fused:
            yield Instruction(match[1], match[3], _arrays(match[2]), line.strip())


def collectives(hlo: str) -> tuple[Collective, ...]:
    """Return every array that devices exchange; an operation on several arrays counts once for each."""
    found, every = [], list(instructions(hlo))
    # The type of a start includes operands and buffers; the type of its done is the result alone.
    done = {
        start: one.results
        for one in every
        if one.opcode.endswith("-done") and (start := re.findall(r"-done\(.*?%?([\w.\-]+)\)", one.text)[0])
    }
    for one in every:
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            results = done[one.name] if one.opcode.endswith("-start") else one.results
            found += [Collective(kind, array, _groups(one.text)) for array in results]
    return tuple(found)


def mosaic_kernels(hlo: str) -> Counter[str]:
    """Count calls of Mosaic GPU kernels by name; ``+wgmma`` follows the names of those that use the tensor cores."""
    calls = [line for line in hlo.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    found: Counter[str] = Counter()
    for call in calls:
        path = re.search(r'op_name="([^"]*)/mpmd_map"', call)
        name = path[1].rsplit("/", 1)[-1] if path else "?"
        found[name + ("+wgmma" if "wgmma" in call else "")] += 1
    return found


def parameters(hlo: str) -> tuple[HloArray, ...]:
    """Return the types of the program's parameters."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", hlo)
    return _arrays(layout[1]) if layout else ()


def donated_parameters(hlo: str) -> frozenset[int]:
    """Return the numbers of the parameters whose memory a result takes over."""
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", hlo)
    return frozenset(int(n) for n in re.findall(r": \((\d+),", aliases[1])) if aliases else frozenset()


def _arrays(type_text: str) -> tuple[HloArray, ...]:
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_text)
    return tuple(HloArray(dtype, tuple(int(n) for n in shape.split(",") if n)) for dtype, shape in found)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def _groups(text: str) -> Groups:
    """Parse replica groups in any form of HLO: mesh axes, a reshaped iota, a list, or pairs."""
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        names, over = list(sizes), re.findall(r"'(\w+)'", mesh[2])
        ids = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
        last = [names.index(name) for name in over]
        ids = np.moveaxis(ids, last, range(-len(last), 0))
        return _rows(ids.reshape(-1, prod(sizes[name] for name in over)))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, base = (tuple(int(n) for n in part.split(",")) for part in (iota[1], iota[2]))
        ids = np.arange(prod(base)).reshape(base)
        if iota[3]:
            ids = ids.transpose([int(n) for n in iota[3].split(",")])
        return _rows(ids.reshape(shape))
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text):
        return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    raise ValueError(f"no replica groups in: {text}")


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in ids)
