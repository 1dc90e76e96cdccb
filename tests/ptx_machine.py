"""Executes the PTX of a kernel on the CPU, one block after the other: what a GPU would do to memory.

It knows what kernels without tensor cores are made of: integers, float32 additions, conversions of 8 bits, branches,
barriers, and loads and stores of global and shared memory. A load or store outside of memory, or at an address that is
no multiple of its size, fails; so does an instruction that is not known.
"""

import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

_SHARED = 1 << 16


class Instruction(NamedTuple):
    """One line: what it depends on, its name, and its operands."""

    negated: bool
    predicate: str | None
    name: str
    operands: tuple[str, ...]


class Kernel(NamedTuple):
    """What is executed, and which instruction follows each label."""

    instructions: Sequence[Instruction]
    labels: Mapping[str, int]

    @staticmethod
    def of(ptx: str, name: str) -> "Kernel":
        """The kernel of a module whose name contains this."""
        entry = next(part for part in ptx.split(".entry")[1:] if name in part.partition("(")[0])
        body = entry[entry.index("{") + 1 :].partition("\n}")[0]
        instructions: list[Instruction] = []
        labels = {}
        for line in (line.partition("//")[0].strip() for line in body.splitlines()):
            if line.endswith(":"):
                labels[line[:-1]] = len(instructions)
            elif line and not line.startswith("."):
                negated, predicate, called, rest = _LINE.fullmatch(line).groups()
                operands = tuple(_OPERAND.findall(rest or ""))
                instructions.append(Instruction(bool(negated), predicate, called, operands))
        return Kernel(instructions, labels)


_LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?(\S+?)(?:\s+(.*))?;")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_PARAMETER = re.compile(r"\[.*_param_(\d+)(?:\+(\d+))?\]")
_ADDRESS = re.compile(r"\[(%\w+)(?:\+(-?\d+))?\]")


def execute(
    kernel: Kernel, parameters: Sequence[bytes], memory: np.ndarray, blocks: Iterable[int], threads: int
) -> int:
    """Execute these blocks; bytes of `memory` are at their own addresses. How many elements were stored in it."""
    return sum(Block(kernel, parameters, memory, block, threads).execute() for block in blocks)


class Block:
    """The state of one block: registers hold bits as int64, an element a thread."""

    def __init__(
        self, kernel: Kernel, parameters: Sequence[bytes], memory: np.ndarray, block: int, threads: int
    ) -> None:
        self.kernel, self.parameters, self.memory, self.stored = kernel, parameters, memory, 0
        self.shared = np.zeros(_SHARED, np.uint8)
        self.registers = {"%tid.x": np.arange(threads), "%ctaid.x": np.full(threads, block)}
        self.at, self.waiting, self.over = np.zeros(threads, int), np.zeros(threads, bool), np.zeros(threads, bool)

    def execute(self) -> int:
        """All threads to their end: always those that are furthest behind."""
        while not self.over.all():
            active = ~self.over & ~self.waiting
            if not active.any():
                self.waiting[:] = False
                continue
            place = self.at[active].min()
            those = active & (self.at == place)
            one = self.kernel.instructions[place]
            self.at[those] += 1
            if one.predicate:
                those = those & (self.registers[one.predicate].astype(bool) ^ one.negated)
            self.step(one, those)
        return self.stored

    def step(self, one: Instruction, those: np.ndarray) -> None:
        """One instruction, of those threads."""
        operation, kind = one.name.split(".")[0], one.name.split(".")[-1]
        if operation == "bra":
            self.at[those] = self.kernel.labels[one.operands[0]]
        elif operation == "ret":
            self.over |= those
        elif operation == "bar":
            self.waiting |= those
        elif one.name.startswith("ld.param"):
            self.parameter(one, kind, those)
        elif operation in ("ld", "st"):
            self.access(one, kind, those)
        elif operation != "griddepcontrol":
            target, *sources = one.operands
            self.put(
                target, _result(one.name, kind, [self.value(each, kind) for each in sources], self.chosen(one)), those
            )

    def chosen(self, one: Instruction) -> np.ndarray | None:
        """What selp chooses by."""
        return self.registers[one.operands[-1]] != 0 if one.name.startswith("selp") else None

    def value(self, operand: str, kind: str) -> np.ndarray:
        """An operand's bits as a number of this kind."""
        count = len(self.at)
        if operand.startswith("%"):
            found = self.registers.setdefault(operand, np.zeros(count, np.int64))
        else:  # the start of shared memory is 0
            found = np.full(count, 0 if operand.startswith("__") else int(operand.replace("0f", "0x"), 0))
        return _number(found, kind)

    def put(self, target: str, values: np.ndarray, those: np.ndarray) -> None:
        """Write a register, or halves of 16 bits to several."""
        if target.startswith("{"):
            for i, half in enumerate(target.strip("{}").split(",")):
                self.put(half.strip(), values >> 16 * i & 0xFFFF, those)
            return
        before = self.registers.get(target, np.zeros(len(self.at), np.int64))
        self.registers[target] = np.where(those, values, before)

    def parameter(self, one: Instruction, kind: str, those: np.ndarray) -> None:
        """Read one, or two neighbours."""
        index, offset = _PARAMETER.fullmatch(one.operands[1]).groups()
        names = [name.strip() for name in one.operands[0].strip("{}").split(",")]
        values = struct.unpack_from(
            f"<{len(names)}{'q' if _bits(kind) == 64 else 'i'}", self.parameters[int(index)], int(offset or 0)
        )
        for name, value in zip(names, values, strict=True):
            self.put(name, np.full(len(self.at), value), those)

    def access(self, one: Instruction, kind: str, those: np.ndarray) -> None:
        """Load or store."""
        is_global, size = ".global" in one.name, _bits(kind) // 8
        is_load = one.name.startswith("ld")
        target, source = one.operands
        register, offset = _ADDRESS.fullmatch(source if is_load else target).groups()
        where = self.value(register, "s64")[those] + int(offset or 0)
        held = self.memory if is_global else self.shared
        assert (where % size == 0).all(), "an address that is no multiple of the size"
        assert ((where >= 0) & (where + size <= len(held))).all(), "an address outside of memory"
        if is_load:
            found = np.zeros(len(self.at), np.int64)
            found[those] = sum(held[where + i].astype(np.int64) << 8 * i for i in range(size))
            self.put(target, found, those)
        else:
            self.stored += len(where) if is_global else 0
            for i in range(size):
                held[where + i] = self.value(source, kind)[those] >> 8 * i & 255


def _bits(kind: str) -> int:
    if kind in _PAIRS:
        return 16 if kind in ("e4m3x2", "e5m2x2") else 32
    return 1 if kind == "pred" else int(kind[1:])


_PAIRS = ("bf16x2", "f16x2", "e4m3x2", "e5m2x2")


def _number(bits: np.ndarray, kind: str) -> np.ndarray:
    """The low bits; with their sign but for unsigned kinds."""
    size = _bits(kind)
    if size == 64:
        return bits
    low = bits & (1 << size) - 1
    return low if kind[0] == "u" or size == 1 else np.where(low >> size - 1 == 1, low - (1 << size), low)


_FLOATS = {"add": np.add, "sub": np.subtract}
_COMPARED = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_WHOLE = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "mad": lambda x, y, z: x * y + z,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "shl": lambda x, y: x << y,
    "shr": lambda x, y: x >> y,
    "div": lambda x, y: np.sign(x) * np.sign(y) * (abs(x) // np.maximum(abs(y), 1)),
    "mov": lambda x: x,
    "cvt": lambda x: x,
    "shfl": lambda x, *_: x,  # of a value that all lanes have
}


def _apart(first: np.ndarray, second: np.ndarray, which: np.ndarray) -> np.ndarray:
    """prmt: four of the eight bytes of two words."""
    whole = (first & 0xFFFFFFFF) | (second & 0xFFFFFFFF) << 32
    return sum((whole >> 8 * (int(which[0]) >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def _floats(bits: np.ndarray, dtype: torch.dtype, count: int) -> torch.Tensor:
    """So many floats of a dtype, that lie side by side in each."""
    size = 8 * dtype.itemsize
    apart = np.stack([bits >> size * i & (1 << size) - 1 for i in range(count)])
    whole = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return torch.from_numpy(apart.astype(whole)).view(dtype)


def _bits_of(floats: torch.Tensor) -> np.ndarray:
    """And back."""
    whole = {2: torch.int16, 4: torch.int32}[floats.itemsize]
    size = 8 * floats.itemsize
    apart = floats.view(whole).numpy().astype(np.int64) & (1 << size) - 1
    return sum(each << size * i for i, each in enumerate(apart))


def _between(source: torch.dtype, count: int, to: torch.dtype) -> Callable[..., np.ndarray]:
    """A conversion of the floats of one operand."""
    return lambda x: _bits_of(_floats(x, source, count).to(to))


def _less(dtype: torch.dtype) -> Callable[..., np.ndarray]:
    """A subtraction of pairs."""
    return lambda x, y: _bits_of(_floats(x, dtype, 2) - _floats(y, dtype, 2))


_CONVERSIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "prmt.b32": _apart,
    "sub.rn.bf16x2": _less(torch.bfloat16),
    "sub.rn.f16x2": _less(torch.float16),
    "cvt.rn.f16x2.e4m3x2": _between(torch.float8_e4m3fn, 2, torch.float16),
    "cvt.rn.f16x2.e5m2x2": _between(torch.float8_e5m2, 2, torch.float16),
    "cvt.f32.f16": _between(torch.float16, 1, torch.float32),
    "cvt.rn.bf16x2.f32": lambda high, low: _bits_of(
        torch.stack([_floats(x, torch.float32, 1)[0] for x in (low, high)]).to(torch.bfloat16)
    ),
}
"""By their whole names."""


def _result(name: str, kind: str, sources: Sequence[np.ndarray], chosen: np.ndarray | None) -> np.ndarray:
    """What an instruction makes of its operands."""
    operation, *further = name.split(".")
    if name in _CONVERSIONS:
        return _CONVERSIONS[name](*sources)
    if chosen is not None:
        return np.where(chosen, sources[0], sources[1])
    if operation == "setp":
        return _COMPARED[further[0]](*sources).astype(np.int64)
    if kind == "f32" and operation in _FLOATS:
        floats = [source.astype(np.uint32).view(np.float32) for source in sources]
        return _FLOATS[operation](*floats).view(np.uint32).astype(np.int64)
    return _number(_WHOLE[operation](*sources), kind)
