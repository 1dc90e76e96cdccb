"""What a launch of the panel kernel runs, for given extents: instructions over named tensors, for tiles and between.

Names are nodes for values, strings for destinations, and pairs for what else a launch holds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from epifuse.ir import Load, Node
from epifuse.ir.types import dim_size, shape_of
from epifuse.providers.cpu.lowered import Panels, Stored, Sweep
from epifuse.providers.cpu.program import BufferKey, dtype_of, per_tile, small_shape
from epifuse.providers.cpu.reduce import Accumulator
from epifuse.providers.cpu.space import Placement, Space
from epifuse.providers.cpu.store import store
from epifuse.request.problem import Problem, TensorInfo

Name = Hashable


class Instruction(NamedTuple):
    """`run(*arguments, out=out)`, without `out` where it is None."""

    run: Callable[..., Any]
    arguments: tuple[Name, ...]
    out: Name | None


class Buffer(NamedTuple):
    """Memory that values take turns in; `shape` is that of a tile which is the whole."""

    key: BufferKey
    shape: tuple[int, ...]
    nodes: tuple[Node, ...]


class Merge(NamedTuple):
    """An instruction only for the first tile along each of `once`, the axes that the value does not vary along."""

    instruction: Instruction
    once: tuple[str, ...]


class TileCode(NamedTuple):
    """One sweep. `cut` are the whole tensors of which each tile takes its part.

    First comes the product, if the sweep reads it, which is written to `product`; that is a destination where it has a
    `home`. `after` comes after the last tile.
    """

    cut: tuple[Name, ...]
    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]
    merges: tuple[Merge, ...]
    stores: tuple[Instruction, ...]
    product: Name | None
    home: str | None
    after: list[Instruction]


class Destination(NamedTuple):
    """An output: the shape of its tensor, how that lies in the space, its dtype, whether its rows are contiguous and
    whether all of it is."""

    shape: tuple[int, ...]
    placement: Placement
    dtype: torch.dtype
    by_rows: bool
    in_one_piece: bool


class Source(NamedTuple):
    """An operand: its name here, how it is loaded, the dtype of a number, and how a tensor lies in the space."""

    name: Name
    load: Load
    dtype: torch.dtype
    placement: Placement


class Code(NamedTuple):
    """All of a launch: `memory` is allocated, `before` runs, then the sweeps."""

    loads: tuple[Source, ...]
    destinations: Mapping[str, Destination]
    memory: tuple[tuple[Name, tuple[int, ...], torch.dtype], ...]
    before: list[Instruction]
    sweeps: tuple[TileCode, ...]


def of_one_tile(sweep: TileCode) -> tuple[Instruction, ...]:
    """All instructions of a sweep over one tile."""
    merges = [merge.instruction for merge in sweep.merges]
    return (*sweep.instructions, *merges, *sweep.stores, *sweep.after)


def _copied(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(x)


def given(node: Node) -> Name:
    """The name of an operand as it is handed in, where each launch copies it."""
    return node, "given"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides))


class Coder:
    """Makes the code of one problem, whose tiles have so many columns."""

    def __init__(self, panels: Panels, problem: Problem, space: Space, columns: int) -> None:
        self.columns = columns
        self.panels, self.problem, self.space = panels, problem, space
        self.types, self.stages = panels.graph.types, panels.graph.stages
        self.compute = panels.context.compute
        self.aliased = dict(problem.aliases)
        self.overwritten = frozenset(self.aliased.values())
        self.is_empty = 0 in [problem.extents[axis] for axis in "lmn"]
        self.memory: list[tuple[Name, tuple[int, ...], torch.dtype]] = []
        self.shapes: dict[Node, tuple[int, ...]] = dict.fromkeys(panels.constants, ())
        self.copied: set[Node] = set()
        self.placements = {node: space.placement(node.attr.dims or ()) for node in panels.graph.loads()}
        self.destinations = self._destinations()

    def code(self) -> Code:
        """The code."""
        before = between = [*self._inputs()]
        sweeps = []
        for sweep in self.panels.sweeps:
            if sweep.stored or sweep.merged or sweep.program.steps:
                between += self._starts(sweep)
                sweeps.append(self._sweep(sweep))
                between = sweeps[-1].after
            between += self._finished(sweep)
        loads = tuple(map(self._load, self.panels.graph.loads()))
        return Code(loads, self.destinations, tuple(self.memory), before, tuple(sweeps))

    def _load(self, node: Node) -> Source:
        name = given(node) if node in self.copied or node in self.panels.context.converted else node
        return Source(name, node.attr, self.held(node), self.placements[node])

    def _destinations(self) -> dict[str, Destination]:
        dtypes, handed = dict(self.problem.dtypes), dict(self.problem.outputs)
        found = {}
        for name, _, dims, _ in self.panels.graph.outputs:
            shape = shape_of(dims or (), self.problem.extents)
            placement = self.space.placement(dims or ())
            position, times = placement.picks[-1]
            info = handed.get(name)
            strides = _contiguous(shape) if info is None or info.shape != shape else info.strides
            by_rows = times > 0 and strides[position] * times == 1
            one_piece = placement.own and strides == _contiguous(shape)
            found[name] = Destination(shape, placement, dtypes[name], by_rows, one_piece)
        return found

    def held(self, node: Node) -> torch.dtype:
        """What the values of a node are held in."""
        return dtype_of(self.types[node].kind, self.compute)

    def _whole(self, name: Name, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.memory.append((name, shape, dtype))

    # --- before the first sweep --------------------------------------------------------------------------------

    def _inputs(self) -> Iterator[Instruction]:
        for node in self.panels.graph.loads():
            operand = self.problem.by_name.get(node.attr.name)
            if not isinstance(operand, TensorInfo):
                self.shapes[node] = ()
                continue
            self.shapes[node] = shape = self.placements[node].shape
            if per_tile(self.stages[node]):
                continue
            # It is read in every tile; an output that shares its storage may be stored before the first.
            if operand.dtype != self.held(node) or node.attr.name in self.overwritten:
                self._whole(node, shape, self.held(node))
                self.copied.add(node)
                yield Instruction(_copied, (given(node),), node)
        for node in self.panels.coordinates:
            self.shapes[node] = self.space.placement((node.attr,)).shape

    # --- between sweeps ----------------------------------------------------------------------------------------

    def _finished(self, sweep: Sweep) -> list[Instruction]:
        """Vectors and scalars that are complete once the sweep is done: evaluated whole, stored if they leave."""
        found = []
        for node, arguments, run, _ in sweep.finished:
            if node in self.shapes:  # complete in a tile
                continue
            read: tuple[Name, ...] = arguments
            if node in sweep.merged:
                run, read = self._accumulator(node).result, self._state(node)
                self.shapes[node] = self.space.shape(self.types[node].factors)
            elif node.op == "debug_print":
                found.append(Instruction(run, arguments, None))
                continue
            else:
                shapes = [torch.Size(self.shapes[arg]) for arg in arguments]
                self.shapes[node] = small_shape(self.panels.context, node, shapes)
            self._whole(node, self.shapes[node], self.held(node))
            found.append(Instruction(run, read, node))
        return found + [Instruction(store, (node, name), None) for name, node, *_ in sweep.left]

    def _accumulator(self, node: Node) -> Accumulator:
        name, gone = node.attr
        return Accumulator(name, self.types[node].kind, self.compute, dim_size(gone, self.problem.extents))

    def _state(self, node: Node) -> tuple[Name, ...]:
        return tuple((node, index) for index in range(len(self._accumulator(node).dtypes)))

    def _starts(self, sweep: Sweep) -> Iterator[Instruction]:
        for node in sweep.merged:
            shape = self.space.shape(self.types[node].factors)
            if node in self._complete(sweep):
                self.shapes[node] = shape
                self._whole(node, shape, self.held(node))
            else:
                accumulator, state = self._accumulator(node), self._state(node)
                for name, dtype in zip(state, accumulator.dtypes, strict=True):
                    self._whole(name, shape, dtype)
                yield Instruction(accumulator.start, state, None)

    def _complete(self, sweep: Sweep) -> frozenset[Node]:
        """Without a tile nothing is complete in one."""
        return frozenset() if self.is_empty else sweep.complete

    # --- a sweep -----------------------------------------------------------------------------------------------

    def _sweep(self, sweep: Sweep) -> TileCode:
        complete = self._complete(sweep)
        direct = self._direct(sweep.stored)
        home = self._home(sweep.stored, direct)
        # Where a value is, if not in a buffer of its own.
        at: dict[Node, Name] = {**direct, **{node: node for node in complete}}
        if home is not None:
            at |= dict.fromkeys(self._at_home(sweep, home), home)
        instructions, buffers, accumulator = [], dict[BufferKey, list[Node]](), None
        cut: dict[Name, None] = dict.fromkeys(sweep.program.sources)
        for node, arguments, run, key in sweep.program.steps:
            if node.op == "load":
                cut[given(node) if key else node] = None
            if key is None and node.op == "load":
                continue
            if key is not None and node not in at:
                buffers.setdefault(key, []).append(node)
            out = None if key is None else at.get(node, node)
            read = tuple([at.get(argument, argument) for argument in arguments])
            if node.op == "accum":
                accumulator = out
                continue
            if node.op == "load":
                run, read = _copied, (given(node),)
            instructions.append(Instruction(run, read, out))
        stores = tuple(
            Instruction(store, (at.get(node, node), name), None)
            for name, node, *_ in sweep.stored
            if at.get(node, node) != name
        )
        merges = tuple(self._merge(node, at) for node in sweep.merged if node not in complete)
        cut |= dict.fromkeys([stored.name for stored in sweep.stored])
        cut |= dict.fromkeys((*complete, *(name for merge in merges for name in merge.instruction.arguments[1:])))
        held = tuple(Buffer(key, self.space.shape(key[1]), tuple(nodes)) for key, nodes in buffers.items())
        return TileCode(tuple(cut), held, tuple(instructions), merges, stores, accumulator, home, [])

    def _at_home(self, sweep: Sweep, home: str) -> list[Node]:
        """The values at home; all of those that may be where a tile's part of it is in one piece, as a buffer is."""
        product = [step.node for step in sweep.program.steps if step.node.op == "accum"]
        if self.columns < self.problem.extents["n"] or not self.destinations[home].in_one_piece:
            return product
        return [*product, *next(stored.passing for stored in sweep.stored if stored.name == home)]

    def _merge(self, node: Node, at: dict[Node, Name]) -> Merge:
        (value,), dims = node.args, self.space.dimensions(node.attr[1])
        run = partial(self._accumulator(node).add, dims)
        axes = self.types[value].axes
        once = tuple(axis for axis in "lmn" if axis not in axes)
        return Merge(Instruction(run, (at.get(value, value), *self._state(node)), None), once)

    def _direct(self, outputs: Iterable[Stored]) -> dict[Node, str]:
        """Values computed where they are stored: the destination has their dtype, whole rows, and no operand in it."""
        found: dict[Node, str] = {}
        for name, node, dtype, direct, *_ in outputs:
            to = self.destinations[name]
            if direct and to.dtype == dtype and name not in self.aliased and to.by_rows:
                found.setdefault(node, name)
        return found

    def _home(self, outputs: Iterable[Stored], direct: dict[Node, str]) -> str | None:
        """A destination that can hold the accumulator until the epilogue overwrites it."""
        floating = self.problem.accumulator.is_floating_point
        accumulator = self.compute if floating else torch.int32  # a float16 one is rounded, but held in float32
        shape = tuple([self.problem.extents[axis] for axis in self.space.axes])
        for name, node, _, _, home, _ in outputs:
            to = self.destinations[name]
            overwritten = direct.get(node) == name
            plain = node.op == "accum" and name not in self.aliased
            same = to.dtype == accumulator and to.placement.shape == shape
            if home and (plain or overwritten) and same and to.by_rows:
                return name
        return None
