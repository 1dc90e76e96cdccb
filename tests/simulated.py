"""Hopper's epilogue by its own code, a warp group at a time, on numbers that have a value for each of its threads.

What CuTe DSL would trace runs instead: walks, slots, shuffles and addresses are the kernel's; products and elementwise
functions are PyTorch's. Nothing travels by TMA, no cluster exchanges, and nothing is merged after the launch.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated import _KINDS, Emulated, _products, transposed
from hopper import RANKED
from test_fragment import traced

from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.providers.cutedsl import emit, launch
from epifuse.providers.cutedsl.design import SUBTILE, WARP_GROUP
from epifuse.providers.cutedsl.kernel_text import read
from epifuse.providers.cutedsl.kernels import dealing, epilogue, modes, reduce, regions
from epifuse.providers.cutedsl.kernels.accesses import direct, lifecycle, line, scalar, vector
from epifuse.providers.cutedsl.kernels.fragment import Fragment as Places
from epifuse.providers.cutedsl.kernels.parts import Parts
from epifuse.providers.cutedsl.kernels.place import Place

T = WARP_GROUP


class Number:
    """A scalar of each thread."""

    dtype: Any = None

    def __init__(self, value: Any) -> None:
        given = (value.v if isinstance(value, Number) else np.asarray(value)).astype(self.dtype, copy=False)
        # No `broadcast_to` where it can be helped, which takes ten times as long as what is computed.
        self.v = given if given.shape == (T,) else np.full(T, given)

    def to(self, kind: Any) -> Any:
        return kind(self)

    def __neg__(self) -> Any:
        return type(self)(-self.v)

    @property
    def width(self) -> int:
        return 8 * self.v.itemsize


class Float32(Number):
    dtype = np.float32


class Int32(Number):
    dtype = np.int32


class Int64(Number):
    dtype = np.int64


class Boolean(Number):
    dtype = np.bool_


Int64.width = 64  # type: ignore[assignment,method-assign]  # asked of the type too
KINDS = {"float": Float32, "int32": Int32, "int64": Int64, "mask": Boolean}
_ORDER = (Boolean, Int32, Int64, Float32)
_PYTHON = {bool: Boolean, int: Int32, float: Float32}


def number(value: Any) -> Number:
    """What Python's or numpy's number is on the device."""
    if isinstance(value, Number):
        return value
    if type(value) in _PYTHON:
        return _PYTHON[type(value)](value)
    kind = np.asarray(value).dtype.kind
    return {"f": Float32, "b": Boolean}.get(
        kind, Int64 if np.asarray(value).dtype == np.int64 and np.ndim(value) else Int32
    )(value)


def _operator(name: str) -> Any:
    compares = name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")

    def apply(x: Any, y: Any) -> Any:
        if isinstance(y, Fragment):
            return NotImplemented
        y = number(y)
        kind = max(type(x), type(y), key=_ORDER.index)
        found = getattr(x.v.astype(kind.dtype, copy=False), name)(y.v.astype(kind.dtype, copy=False))
        return Boolean(found) if compares else kind(found)

    return apply


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "floordiv",
    "mod",
    "and",
    "rshift",
    "lshift",
    "or",
):
    setattr(Number, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _operator(f"__{_name}__"))


class Fragment:
    """Registers of each thread, as a value or as memory."""

    def __init__(self, numbers: list[Any], kind: Any) -> None:
        self.numbers, self.element_type, self.shape = list(numbers), kind, (len(numbers),)

    def to(self, kind: Any) -> Any:
        return Fragment([kind(x) for x in self.numbers], kind)

    def load(self) -> Any:
        return Fragment(self.numbers, self.element_type)

    def store(self, other: Any) -> None:
        self.numbers[:] = other.numbers

    def reshape(self, _shape: Any) -> Any:
        return self

    def __getitem__(self, at: Any) -> Any:
        return self.numbers[at] if isinstance(at, int) else (self, at[1])

    def __setitem__(self, at: int, value: Any) -> None:
        self.numbers[at] = self.element_type(value)

    def __abs__(self) -> Any:
        return _each(lambda x: type(x)(np.abs(x.v)), self)

    def _with(self, other: Any, function: Any) -> Any:
        others = other.numbers if isinstance(other, Fragment) else [other] * len(self.numbers)
        found = [function(x, y) for x, y in zip(self.numbers, others, strict=True)]
        return Fragment(found, type(found[0]))

    def __ne__(self, other: Any) -> Any:
        return self._with(other, lambda x, y: x != y)

    def __eq__(self, other: Any) -> Any:
        return self._with(other, lambda x, y: x == y)

    def __lt__(self, other: Any) -> Any:
        return self._with(other, lambda x, y: x < y)

    def __add__(self, other: Any) -> Any:
        return self._with(other, lambda x, y: x + y)

    __hash__ = None  # type: ignore[assignment]


class Memory:
    """A tensor as (M, N, L), where a reshape may have cut an axis in pieces."""

    element_type = Float32

    def __init__(self, tensor: torch.Tensor, access: Any) -> None:
        self.inner = access.inner
        self.tensor = tensor if tensor.dim() == 3 + sum(map(len, access.inner)) else tensor[..., None]
        self.values = self.tensor.double().numpy().copy()
        ends = [0, *itertools.accumulate(len(own) + 1 for own in self.inner)]
        own = [tuple(self.tensor.shape[i:j]) for i, j in itertools.pairwise(ends)]
        self.shape = tuple(each if len(each) > 1 else each[0] for each in own)

    def at(self, *places: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        for place, inner in zip(places, self.inner, strict=True):
            if isinstance(place, tuple):
                found += [number(x).v for x in place]
                continue
            left = number(place).v
            for extent in inner:
                found.append(left % extent)
                left = left // extent
            found.append(left)
        sizes = zip(found, self.tensor.shape, strict=True)
        return tuple(x * (size > 1) for x, size in sizes)  # TMA brings one matrix for every batch

    def __getitem__(self, places: Any) -> Number:
        return Float32(self.values[self.at(*places)])

    def write_back(self) -> None:
        first = tuple(slice(0, None if step else 1) for step in self.tensor.stride())
        self.tensor[first].copy_(torch.from_numpy(self.values[first]).to(self.tensor.dtype))


class Vector:
    """A vector in shared memory, for each warp group."""

    def __init__(self, kind: Any, layout: Any) -> None:
        self.element_type, self.values = kind, np.full(layout, np.nan if kind is Float32 else -1, kind.dtype)

    def __getitem__(self, at: Any) -> Any:
        return self.element_type(self.values[number(at[0]).v, number(at[1]).v])

    def __setitem__(self, at: Any, value: Any) -> None:
        self.values[number(at[0]).v, number(at[1]).v] = value.v


def _element(tensor: Memory, access: Any, row: Any, column: Any, batch: Any) -> Any:
    return tensor, (row, column, batch), 2 if access.pairs else 1


def _beside(places: Any, further: int) -> Any:
    row, column, batch = places
    column = (column[0] + further, *column[1:]) if isinstance(column, tuple) else column + further
    return row, column, batch


def _copied(source: Any, to: Any) -> None:
    tensor, places, count = source
    registers, v = to
    for i in range(count):
        registers[v * count + i] = tensor[_beside(places, i)]


def _stored_inside(values: Any, to: Any, place: Any, limits: Any) -> None:
    tensor, places, count = to
    inside = np.logical_and.reduce([number(x).v < number(end).v for x, end in zip(place, limits, strict=True)])
    registers, v = values
    for i in range(count):
        at = tuple(np.broadcast_to(x, (T,))[inside] for x in tensor.at(*_beside(places, i)))
        assert np.isnan(tensor.values[at]).all(), "written twice"
        tensor.values[at] = registers[v * count + i].v[inside]


def _full(shape: Any, value: Any, kind: Any = Float32) -> Fragment:
    return Fragment([kind(value)] * shape[0], kind)


def _like(x: Any, value: Any, kind: Any = None) -> Fragment:
    kind = kind or (type(value) if isinstance(value, Number) else x.element_type)
    return _full(x.shape, value, kind)


def _extreme(function: Any) -> Any:
    def apply(x: Any, y: Any, **_: Any) -> Any:
        kind = max(type(number(x)), type(number(y)), key=_ORDER.index)
        return kind(function(number(x).v, number(y).v))

    return apply


def _selected(condition: Any, x: Any, y: Any) -> Any:
    x, y = number(x), number(y)
    kind = max(type(x), type(y), key=_ORDER.index)
    return kind(np.where(number(condition).v, x.v, y.v))


def _where(condition: Any, x: Any, y: Any) -> Fragment:
    each = zip(condition.numbers, x.numbers, y.numbers, strict=True)
    return Fragment([_selected(*one) for one in each], x.element_type)


def _as_kind(value: Fragment, _kind: str, wanted: str) -> Fragment:
    return value if wanted == "mask" else value.to(KINDS[wanted])


def _each(function: Any, *fragments: Fragment, dtype: Any = None) -> Fragment:
    found = [function(*xs) for xs in zip(*(x.numbers for x in fragments), strict=True)]
    return Fragment(found, dtype or type(found[0]))


def _row(name: str, _accuracy: Any, kind: str, _literals: Any) -> Any:
    def apply(*args: Fragment) -> Fragment:
        tensors = [torch.from_numpy(np.stack([x.v for x in arg.numbers])) for arg in args]
        found = VOCABULARY[name].function(*tensors).to(_KINDS[kind])
        return Fragment([KINDS[kind](x) for x in found.numpy()], KINDS[kind])

    return apply


_ARCH = SimpleNamespace(
    lane_idx=lambda: Int32(np.arange(T) % 32),
    fmax=_extreme(np.maximum),
    fmin=_extreme(np.minimum),
    shuffle_sync_bfly=lambda word, offset: type(word)(word.v[np.arange(T) ^ offset]),
    shuffle_sync=lambda word, offset: type(word)(word.v[np.arange(T) // 32 * 32 + offset.v]),
)
_MATH = SimpleNamespace(
    exp=lambda x: _each(lambda y: Float32(np.exp(y.v)), x) if isinstance(x, Fragment) else Float32(np.exp(x.v)),
    log=lambda x: _each(lambda y: Float32(np.log(y.v)), x),
)


class _Registers:
    """`values.iterator + first`: some of a thread's registers from one on."""

    def __init__(self, values: Fragment, first: int = 0) -> None:
        self.values, self.first = values, first

    def __add__(self, first: int) -> Any:
        return _Registers(self.values, self.first + first)


CUTE = SimpleNamespace(
    arch=_ARCH,
    math=_MATH,
    full=_full,
    full_like=_like,
    where=_where,
    size=lambda x: len(x.numbers),
    make_layout=lambda shape, **_: shape,
    make_rmem_tensor=lambda shape, kind: Fragment([kind(0)] * int(np.prod(shape)), kind),
    make_tensor=lambda at, shape: Fragment(at.values.numbers[at.first : at.first + shape[0]], Float32),
    autovec_copy=_copied,
)
CUTLASS = SimpleNamespace(select_=_selected, min=_extreme(np.minimum), max=_extreme(np.maximum))
DM = SimpleNamespace(
    fragment=lambda values, _shape, kind: Fragment([kind(x) for x in values], kind),
    numbers=lambda x: x.numbers,
    each=_each,
    disguised=lambda value, _number=0: value,
    divide=lambda x, y: _each(lambda a, b: a / b, x, y),
    sqrt=lambda x: _each(lambda a: Float32(np.sqrt(a.v)), x),
    LOG2_E=1.0,
)


def _patches() -> list[tuple[Any, dict[str, Any]]]:
    """What stands for CuTe DSL in each module."""
    numbers = {"Float32": Float32, "Int32": Int32, "Int64": Int64, "Boolean": Boolean}
    every = {"cute": CUTE, "cutlass": CUTLASS, "dm": DM, "HELD": KINDS, "as_kind": _as_kind, **numbers}
    every |= {"_put_if": lambda *_: None}  # what is merged after the launch
    every |= {"element": _element, "store_inside": _stored_inside, "under": lambda fragment, _: fragment, "row": _row}
    every |= {
        "stored": lambda value, _kind, _dtype: value.load(),
        "whole": lambda tensor, access, _: Memory(tensor, access),
    }
    modules = (emit, dealing, epilogue, reduce, regions, lifecycle, direct, line, scalar, vector)
    found = [(module, {name: value for name, value in every.items() if hasattr(module, name)}) for module in modules]
    return [*found, (modes, {"Int32": Int32})]


def function(registers: dict[int, tuple[Places, list[Any]]]) -> Any:
    """In place of `load.function`, where a thread's registers lie so in a subtile of as many columns."""

    def made(text: str, _name: str) -> Any:
        source = read(text)
        loads = tuple((node, _in_place(access)) for node, access in source.program.loads)
        program = replace(source.program, loads=loads, stores=tuple(map(_in_place, source.program.stores)))
        design = replace(source.design, load_stages=0, store_stages=0, spare=0, exchanged=0)
        places = registers[design.subtile[1]]
        assert source.design.exchanged == 0, "rows of several CTAs"

        def compute(a: Any, b: Any, tensors: Any, numbers: Any, outputs: Any, *_: Any) -> None:
            if design.swapped:
                a, b, tensors, outputs = transposed(program, a, b, tensors, outputs)
            products = _products(a, b, program.order)
            pairs = zip(tensors, source.program.tensors, strict=True)
            tensors = [_again(tensor, access, products[0].shape[1]) for tensor, (_, access) in pairs]
            product, parts = products[0], _parts(len(places[0].registers), design) if program.order else None
            own = regions.Regions(design, (program,), places[0], parts)
            made = own.first
            read_, written = made.whole(tensors, outputs)
            for memory in written:
                memory.values[...] = np.nan
            shape = tuple(Int32(size) for size in product.shape)
            given = lifecycle.Given(read_, numbers, written, None, shape, shape)
            tiles = (
                -(-size // step) for size, step in zip(product.shape, (design.tile[0], design.columns, 1), strict=True)
            )
            for m, n, l, within in itertools.product(*map(range, (*tiles, design.sharing))):
                at = Place(Int32(m), Int32(n), Int32(l), Int32(within))
                _tile(made, places, *own.within(at, (given,)), products, at)
            for memory, access in zip(written, program.stores, strict=True):
                if not access.travels.merged:
                    memory.write_back()

        return compute

    return made


def _in_place(access: Any) -> Any:
    return replace(access, way="direct") if access.travels.staged or access.way in ("wide", "coalesced") else access


def _again(tensor: Any, access: Any, columns: int) -> Any:
    """What repeats along N, as it is read in place: in pieces."""
    if not access.period:
        return tensor
    tensor = tensor if tensor.dim() == 3 else tensor[..., None]
    return tensor.unsqueeze(2).expand(-1, -1, columns // access.period, -1)


def _parts(count: int, design: Any) -> Parts:
    """The registers of one part behind those of the other, subtile by subtile."""
    across = design.columns // SUBTILE[1]
    return Parts((tuple(range(count)), tuple(range(count, 2 * count))), 2 * count * across, 2 * count)


def _tile(made: Any, places: Any, given: Any, products: list[torch.Tensor], place: Place) -> None:
    """As `Sm90Gemm.multiply` does it, of what is there already."""
    fragment, lanes = places
    thread = Int32(np.arange(T))
    own = [_allocated(each) for each in made.accesses]
    team = SimpleNamespace(
        shape=(len(fragment.registers),), count=len(fragment.registers), thread=thread, group=0, own={},
        before=lifecycle.Before(0, 0),
        given=given, shared=lifecycle.Shared(own, None), last=None,
        rows=[Int32([lane[registers[0]][0] for lane in lanes]) for registers in fragment.by_row],
        columns=[Int32([lane[registers[0]][1] for lane in lanes]) for registers in fragment.by_column],
    )  # fmt: skip
    values = Fragment([], Float32)
    values.iterator = _Registers(values)  # type: ignore[attr-defined]
    every = [np.pad(product.numpy(), ((0, 512), (0, 512), (0, 0))) for product in products]
    subtiles = itertools.product(range(made.division.down), range(made.division.across), every)
    count = len(fragment.registers)
    coordinates = [[Int32([lane[register][i] for lane in lanes]) for i in (0, 1)] for register in range(count)]
    for down, right, padded in subtiles:
        for row, column in coordinates:
            at = made.division.row(down, row, place).v, made.division.column(right, column, place).v, place.l.v
            values.numbers.append(Float32(padded[at]))
    held = made.fetch(place, thread, given)
    made.deposit(held, team.shared, 0, thread)
    tile, last, arrived = made.tile(place, held), len(made.walks) - 1, {}
    for s in range(made.division.subtiles):
        if made.scene.begins(s):
            made.reduce_rows(s, values, tile, team)
            arrived = made.arrive(last, s, team)
        made.subtile(s, values, arrived, tile, team)
        arrived = {} if made.scene.begins(s + 1) else made.arrive(last, s + 1, team)
    made.leave(tile, {}, team)


def _allocated(each: Any) -> Any:
    return each.allocate(SimpleNamespace(allocate_tensor=lambda kind, layout, _: Vector(kind, layout)))


@pytest.fixture(scope="session")
def registers() -> dict[int, tuple[Places, list[Any]]]:
    """By columns of a subtile the fragment, and the places of the registers of each thread of a warp group."""
    from test_fragment import wgmma

    found = {}
    for width in (SUBTILE[1] // 2, SUBTILE[1]):
        fragment, lanes = traced(lambda width=width: wgmma(width), "sm_90a")
        warps = [[(row + 16 * warp, column) for row, column in lane] for warp in range(4) for lane in lanes]
        found[width] = fragment, warps
    return found


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, registers: dict[int, tuple[Places, list[Any]]]) -> Emulated:
    """A machine for the tests of tests/gpu: they judge what the kernel's own code computes."""
    monkeypatch.setattr(launch, "function", function(registers))
    monkeypatch.setattr(launch, "resident_clusters", lambda index, size: 100)
    monkeypatch.setattr(launch, "rank_table", lambda *_: RANKED)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    for module, names in _patches():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    return Emulated("cpu")
