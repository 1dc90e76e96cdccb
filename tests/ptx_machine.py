"""Executes the PTX of a kernel on the CPU, one block after the other: what a GPU would do to memory.

It knows what kernels that copy and those that multiply by mma.sync are made of: integers, float32 arithmetic,
conversions of 8 bits, branches, barriers, loads and stores of global and shared memory, cp.async, ldmatrix, and
products of mma.sync. A load or store outside of memory, or of what nobody holds in it, or at an address that is no
multiple of its size, fails; so does an instruction that is not known. What cp.async brings arrives when it is waited
for; before, its place holds NaN.
"""

import itertools
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

_SHARED = 1 << 18
_WARP = 32
_LATE = 0xFF  # a byte of NaN


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
        for line in _whole_lines(body):
            if line.endswith(":"):
                labels[line[:-1]] = len(instructions)
            elif line and not line.startswith("."):
                negated, predicate, called, rest = _LINE.fullmatch(line).groups()
                operands = tuple(_OPERAND.findall(rest or ""))
                instructions.append(Instruction(bool(negated), predicate, called, operands))
        return Kernel(instructions, labels)


def _whole_lines(body: str) -> Iterator[str]:
    """Without comments; an instruction of several lines is one."""
    begun = ""
    for line in (line.partition("//")[0].strip() for line in body.splitlines()):
        begun = f"{begun} {line}".strip()
        if not begun or begun[-1] in ";:" or begun[0] in ".}":
            yield begun
            begun = ""


_LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?(\S+?)(?:\s+(.*))?;")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_PARAMETER = re.compile(r"\[.*_param_(\d+)(?:\+(\d+))?\]")
_FLOAT = re.compile(r"b?f\d+(x2)?")
_ADDRESS = re.compile(r"\[(%\w+)(?:\+(-?\d+))?\]")


def execute(
    kernel: Kernel,
    parameters: Sequence[bytes],
    memory: np.ndarray,
    blocks: Iterable[int],
    threads: int,
    *,
    together: int | None = None,
    held: np.ndarray | None = None,
) -> int:
    """Execute these blocks; bytes of `memory` are at their own addresses. How many elements were stored in it.

    `held` says which bytes of `memory` may be read and written: all unless said otherwise.

    So many threads run `together`, up to a barrier or their end, before others do: all unless said otherwise. Where
    they are fewer than all, what some leave for others without a barrier is found missing.
    """
    blocks = list(blocks)
    held = np.ones(len(memory), bool) if held is None else held
    return sum(
        Block(kernel, parameters, memory, held, (block, len(blocks)), threads).execute(together or threads)
        for block in blocks
    )


class TwoCopiesError(Exception):
    """cp.async brings something to a place that another one is still to write: either may arrive last."""


class Copied(NamedTuple):
    """What cp.async brings: where in shared memory each thread's bytes go, and the bytes."""

    to: np.ndarray
    values: np.ndarray


class Block:
    """The state of one block: registers hold bits as int64, an element a thread."""

    def __init__(
        self,
        kernel: Kernel,
        parameters: Sequence[bytes],
        memory: np.ndarray,
        held: np.ndarray,
        block: tuple[int, int],
        threads: int,
    ) -> None:
        self.kernel, self.parameters, self.memory, self.held, self.stored = kernel, parameters, memory, held, 0
        self.shared, self.under_way = np.zeros(_SHARED, np.uint8), np.zeros(_SHARED, bool)
        self.registers = {"%tid.x": np.arange(threads), "%laneid": np.arange(threads) % _WARP}
        for axis in "xz":  # along one of which blocks lie
            self.registers |= {
                f"%{name}.{axis}": np.full(threads, value)
                for name, value in zip(("ctaid", "nctaid"), block, strict=True)
            }
        # By the number of threads that run together: copies that no group has yet, and groups under way.
        self.begun: defaultdict[int, list[Copied]] = defaultdict(list)
        self.groups: defaultdict[int, list[list[Copied]]] = defaultdict(list)
        self.at, self.waiting, self.over = np.zeros(threads, int), np.zeros(threads, bool), np.zeros(threads, bool)

    def execute(self, together: int) -> int:
        """All threads to their end: of the first so many that do not wait, those that are furthest behind."""
        number = np.arange(len(self.at)) // together
        steps = {"ldmatrix": self.matrices, "mma": self.multiply, "shfl": self.shuffle}
        while not self.over.all():
            active = ~self.over & ~self.waiting
            if not active.any():
                self.waiting[:] = False
                continue
            active &= number == number[active.argmax()]
            place = self.at[active].min()
            those = active & (self.at == place)
            one = self.kernel.instructions[place]
            self.at[those] += 1
            if one.predicate:
                those = those & (self.registers[one.predicate].astype(bool) ^ one.negated)
            operation = one.name.split(".")[0]
            if operation == "cp":
                self.copy(one, those, int(number[those.argmax()]))
            elif operation in steps:
                steps[operation](one, those)
            else:
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
            assert operand in self.registers or operand[-1].isdigit(), f"{operand} is not known"
            found = self.registers.setdefault(operand, np.zeros(count, np.int64))
        elif parameter := re.fullmatch(r"\w+_param_(\d+)", operand):  # its address
            found = np.full(count, int(parameter[1]))
        else:  # the start of shared memory is 0
            found = np.full(count, 0 if operand.startswith("__") else int(operand.replace("0f", "0x").rstrip("U"), 0))
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
        """Read one, or two neighbours, or the one at an address."""
        if one.operands[1].startswith("[%"):
            own = self.value(one.operands[1].strip("[]"), "b64")
            found = [struct.unpack_from("<q" if _bits(kind) == 64 else "<i", self.parameters[at])[0] for at in own]
            self.put(one.operands[0], np.array(found), those)
            return
        index, offset = _PARAMETER.fullmatch(one.operands[1]).groups()
        names = _names(one.operands[0])
        values = struct.unpack_from(
            f"<{len(names)}{'q' if _bits(kind) == 64 else 'i'}", self.parameters[int(index)], int(offset or 0)
        )
        for name, value in zip(names, values, strict=True):
            self.put(name, np.full(len(self.at), value), those)

    def access(self, one: Instruction, kind: str, those: np.ndarray) -> None:
        """Load or store one value or several that lie side by side."""
        is_global, size = ".global" in one.name, _bits(kind) // 8
        is_load = one.name.startswith("ld")
        target, source = one.operands
        names = _names(target if is_load else source)
        memory = self.memory if is_global else self.shared
        where = self.address(source if is_load else target, those, size * len(names), is_global)
        self.stored += len(names) * len(where) if is_global and not is_load else 0
        for place, name in enumerate(names):
            first = where + place * size
            if is_load:
                found = np.zeros(len(self.at), np.int64)
                found[those] = sum(memory[first + i].astype(np.int64) << 8 * i for i in range(size))
                self.put(name, found, those)
            else:
                for i in range(size):
                    memory[first + i] = self.value(name, kind)[those] >> 8 * i & 255

    def address(self, operand: str, those: np.ndarray, size: int, is_global: bool) -> np.ndarray:
        """Of each of those threads, in global or in shared memory."""
        register, offset = _ADDRESS.fullmatch(operand).groups()
        where = self.value(register, "s64")[those] + int(offset or 0)
        assert (where % size == 0).all(), "an address that is no multiple of the size"
        limit = len(self.memory) if is_global else len(self.shared)
        assert ((where >= 0) & (where + size <= limit)).all(), "an address outside of memory"
        assert not is_global or self.held[where[:, None] + np.arange(size)].all(), "an address that nobody holds"
        return where

    def copy(self, one: Instruction, those: np.ndarray, number: int) -> None:
        """cp.async: start a copy, close a group, or wait until so few groups are under way."""
        begun, groups = self.begun[number], self.groups[number]
        if "commit_group" in one.name:
            groups.append(self.begun.pop(number))
        elif "wait_group" in one.name:
            assert not begun, "copies that no group has"
            done = max(len(groups) - int(one.operands[0]), 0)
            for copied in itertools.chain(*groups[:done]):
                self.shared[copied.to], self.under_way[copied.to] = copied.values, False
            del groups[:done]
        else:
            to, source, size, *limited = one.operands
            size = int(size)
            bytes_ = self.address(to, those, size, False)[:, None] + np.arange(size)
            count = self.value(limited[0], "s32")[those] if limited else np.full(len(bytes_), size)
            values = np.zeros(bytes_.shape, np.uint8)
            is_read = count > 0
            assert (count[is_read] == size).all(), "a part of a copy"
            reading = those.copy()
            reading[those] = is_read
            values[is_read] = self.memory[self.address(source, reading, size, True)[:, None] + np.arange(size)]
            if self.under_way[bytes_].any():
                raise TwoCopiesError
            self.shared[bytes_], self.under_way[bytes_] = _LATE, True
            begun.append(Copied(bytes_, values))

    def matrices(self, one: Instruction, those: np.ndarray) -> None:
        """ldmatrix of four matrices of 8 x 8 elements of 16 bits, whose rows lie where the lanes say."""
        target, source = one.operands
        rows = self.address(source, those, 16, False).reshape(-1, 4, 8)  # a warp, a matrix
        found = self.shared[rows[..., None] + np.arange(16)].view(np.uint16).astype(np.int64)
        if ".trans" in one.name:
            found = found.swapaxes(-1, -2)
        pairs = (found[..., 0::2] | found[..., 1::2] << 16).reshape(len(rows), 4, _WARP)
        for i, name in enumerate(_names(target)):
            values = np.zeros(len(self.at), np.int64)
            values[those] = pairs[:, i].reshape(-1)
            self.put(name, _number(values, "b32"), those)

    def multiply(self, one: Instruction, those: np.ndarray) -> None:
        """mma.sync of 16 x 8 x 32 bytes: a register of a fragment has neighbours along K, or one sum."""
        of_sums, of_a, of_b = one.name.split(".")[6:9]
        a, b, c = (
            np.stack([self.registers[name][those].astype(np.uint32) for name in _names(operand)])
            for operand in one.operands[1:]
        )
        a, b = (
            np.moveaxis(_floats(x.astype(np.int64), _FACTORS[of], 4 // _FACTORS[of].itemsize).double().numpy(), 0, -1)
            for x, of in ((a, of_a), (b, of_b))
        )
        # Registers, warps, eight lanes, four lanes, and neighbours.
        a = a.reshape(2, 2, -1, 8, 4, a.shape[-1]).transpose(2, 1, 3, 0, 4, 5)
        b = b.reshape(2, -1, 8, 4, b.shape[-1]).transpose(1, 0, 3, 4, 2)
        products = a.reshape(len(a), 16, -1) @ b.reshape(len(b), -1, 8)
        products = products.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(c.shape)
        held = np.dtype({"f32": np.float32, "s32": np.int32}[of_sums])
        sums = (c.view(held) + products).astype(held).view(np.uint32).astype(np.int64)
        for name, found in zip(_names(one.operands[0]), sums, strict=True):
            values = np.zeros(len(self.at), np.int64)
            values[those] = found
            self.put(name, _number(values, "b32"), those)

    def shuffle(self, one: Instruction, those: np.ndarray) -> None:
        """shfl.sync by an exclusive or of lanes, or from one lane."""
        lanes, by = np.arange(len(self.at)), int(one.operands[2])
        source = lanes ^ by if ".bfly" in one.name else lanes // _WARP * _WARP + by
        self.put(one.operands[0], self.value(one.operands[1], "b32")[source], those)


def _names(operand: str) -> list[str]:
    """Of one register, or of several in braces."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def _bits(kind: str) -> int:
    if kind in _PAIRS:
        return 16 if kind in ("e4m3x2", "e5m2x2") else 32
    return 1 if kind == "pred" else int(kind.lstrip("bfsu"))


_PAIRS = ("bf16x2", "f16x2", "e4m3x2", "e5m2x2")


def _number(bits: np.ndarray, kind: str) -> np.ndarray:
    """The low bits; with their sign but for unsigned kinds."""
    size = _bits(kind)
    if size == 64:
        return bits
    low = bits & (1 << size) - 1
    return low if kind[0] == "u" or size == 1 else np.where(low >> size - 1 == 1, low - (1 << size), low)


_FACTORS = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "s8": torch.int8, "u8": torch.uint8}
"""What mma.sync multiplies. tf32 is handed over rounded."""


def _about(exact: np.ndarray, steps: int) -> np.ndarray:
    """As far from the exact values as PTX allows, to either side; what is a float stays exact, as 1 / 2 does. Zero is
    put for what is below 2^-126."""
    nearest = exact.astype(np.float32)
    step = np.where(np.isfinite(nearest) & (nearest != exact), np.spacing(nearest), 0.0)
    is_odd = nearest.view(np.uint32) & 1 == 1
    moved = (nearest + np.where(is_odd, steps, -steps) * step).astype(np.float32)
    return np.where(abs(moved) < 2.0**-126, np.copysign(np.float32(0), moved), moved)


_FLOATS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "neg": np.negative,
    "ex2": lambda x: _about(np.exp2(x.astype(np.float64)), 2),
    "rcp": lambda x: _about(1 / x.astype(np.float64), 1),
}
"""max and min are those of NaN alone. ex2 and rcp are the approximate ones, which flush."""
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
    "rem": lambda x, y: np.fmod(x, np.where(y == 0, 1, y)),
    "mov": lambda x: x,
    "cvt": lambda x: x,
    "neg": lambda x: -x,
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


def _narrowed(dtype: torch.dtype) -> Callable[..., np.ndarray]:
    """A conversion of two floats to a pair."""
    return lambda high, low: _bits_of(torch.stack([_floats(x, torch.float32, 1)[0] for x in (low, high)]).to(dtype))


_INT32 = -(1 << 31), (1 << 31) - 1
_CONVERSIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "prmt.b32": _apart,
    "sub.rn.bf16x2": _less(torch.bfloat16),
    "sub.rn.f16x2": _less(torch.float16),
    "cvt.rn.f16x2.e4m3x2": _between(torch.float8_e4m3fn, 2, torch.float16),
    "cvt.rn.f16x2.e5m2x2": _between(torch.float8_e5m2, 2, torch.float16),
    "cvt.rn.f32.s32": lambda x: _bits_of(torch.from_numpy(x).float()[None]),
    "cvt.rzi.s32.f32": lambda x: _floats(x, torch.float32, 1)[0].double().trunc().clamp(*_INT32).long().numpy(),
    "cvt.f32.f16": _between(torch.float16, 1, torch.float32),
    "cvt.f32.bf16": _between(torch.bfloat16, 1, torch.float32),
    "cvt.rna.tf32.f32": lambda x: (x & 0xFFFFFFFF) + 0x1000 & ~0x1FFF,
    "cvt.rn.bf16.f32": _between(torch.float32, 1, torch.bfloat16),
    "cvt.rn.bf16x2.f32": _narrowed(torch.bfloat16),
    "cvt.rn.f16x2.f32": _narrowed(torch.float16),
}
"""By their whole names."""


def _result(name: str, kind: str, sources: Sequence[np.ndarray], chosen: np.ndarray | None) -> np.ndarray:
    """What an instruction makes of its operands."""
    operation, *further = name.split(".")
    if name in _CONVERSIONS:
        return _CONVERSIONS[name](*sources)
    if chosen is not None:
        return np.where(chosen, sources[0], sources[1])
    floats = [source.astype(np.uint32).view(np.float32) for source in sources] if kind == "f32" else sources
    if operation == "setp":
        return _COMPARED[further[0]](*floats).astype(np.int64)
    if kind == "f32" and operation in _FLOATS:
        assert operation not in ("max", "min") or "NaN" in further, name
        assert operation not in ("ex2", "rcp") or further == ["approx", "ftz", "f32"], name
        with np.errstate(all="ignore"):
            found = _FLOATS[operation](*floats).astype(np.float32)
        return found.view(np.uint32).astype(np.int64)
    assert operation == "mov" or not any(map(_FLOAT.fullmatch, further)), f"{name} is not known"
    return _number(_WHOLE[operation](*sources), kind)
