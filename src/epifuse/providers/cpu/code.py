"""The code of a launch of the panel kernel, for any extents: instructions on named tensors, for tiles and in between.

The name of a value is its node, that of a destination is a string. Other tensors of a launch have pairs as names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from epifuse.base.dtypes import dtype_of
from epifuse.ir import Node
from epifuse.ir.types import Dim, shape_of
from epifuse.providers.cpu.lowered import Panels, Stored, Sweep
from epifuse.providers.cpu.program import BufferKey, per_tile, small_mask
from epifuse.providers.cpu.reduce import Accumulator
from epifuse.providers.cpu.space import Mask, Placement, Space
from epifuse.providers.cpu.store import store
from epifuse.request.problem import Problem, TensorInfo, dense

Name = Hashable


class Instruction(NamedTuple):
    """A call of `run(*arguments, out=out)`, without `out` if it is None."""

    run: Callable[..., Any]
    arguments: tuple[Name, ...]
    out: Name | None


class Buffer(NamedTuple):
    """Memory that the values `names` use one after the other. `mask` says which dims of the space they vary along."""

    key: BufferKey
    mask: Mask
    names: tuple[Name, ...]


class Merge(NamedTuple):
    """An instruction that adds a tile to a reduction. The value does not vary along the axes `once`, so that only the
    first tile along each of them runs the instruction."""

    instruction: Instruction
    once: tuple[str, ...]


class TileCode(NamedTuple):
    """The code of one sweep. `cut` are the whole tensors of which each tile takes its part.

    If the sweep reads the product, it is computed first and written to `product`. If `home` is set, it is the
    destination that holds the product. `after` runs after the last tile.
    """

    cut: tuple[Name, ...]
    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]
    merges: tuple[Merge, ...]
    stores: tuple[Instruction, ...]
    product: Name | None
    home: str | None
    after: list[Instruction]


class Source(NamedTuple):
    """An operand: its name here, its node, and the dtype that it gets if it is a number."""

    name: Name
    node: Node
    dtype: torch.dtype


class Code(NamedTuple):
    """All of a launch: `memory` is allocated, `before` runs, then the sweeps.

    `counts` has the names of numbers, each with the dim whose size it is: how many values a reduction combines. `whole`
    has for each sweep the instructions that it runs if the result is one tile.
    """

    loads: tuple[Source, ...]
    memory: tuple[tuple[Name, Mask, torch.dtype], ...]
    counts: tuple[tuple[Name, Dim], ...]
    before: list[Instruction]
    sweeps: tuple[TileCode, ...]
    whole: tuple[tuple[Instruction, ...], ...]


def of_one_tile(sweep: TileCode) -> tuple[Instruction, ...]:
    """The instructions of a sweep if the result is one tile."""
    merges = [merge.instruction for merge in sweep.merges]
    return (*sweep.instructions, *merges, *sweep.stores, *sweep.after)


# --- what else the code depends on -----------------------------------------------------------------------------------


class Destination(NamedTuple):
    """An output: its dtype, whether its rows are contiguous, whether all of it is (`in_one_piece`), and whether it has
    the full shape of the result (`full`)."""

    dtype: torch.dtype
    by_rows: bool
    in_one_piece: bool
    full: bool


class Case(NamedTuple):
    """Problems of one layout class that have an equal `Case` have the same code.

    `whole_columns`: each tile has all columns. `aliases`: pairs of an output and the operand whose storage it shares.
    """

    whole_columns: bool
    aliases: tuple[tuple[str, str], ...]
    destinations: tuple[Destination, ...]


class Sink(NamedTuple):
    """Where an output goes: the shape of its tensor, and how that lies in the space."""

    name: str
    shape: tuple[int, ...]
    placement: Placement


def sinks(panels: Panels, problem: Problem, space: Space) -> tuple[Sink, ...]:
    """The sinks of all outputs of a problem. `space` must have the extents of the problem."""
    found = []
    for output, placing in zip(panels.graph.outputs, panels.stores, strict=True):
        placement = placing.within(space)
        shape = placement.shape if placing.own else shape_of(output.dims or (), problem.extents)
        found.append(Sink(output.name, shape, placement))
    return tuple(found)


def case_of(problem: Problem, to: Iterable[Sink], axes: Iterable[str], columns: int) -> Case:
    """The case of a problem whose tiles have this number of columns."""
    extents, dtypes, handed = problem.extents, dict(problem.dtypes), dict(problem.outputs)
    full = tuple([extents[axis] for axis in axes])
    found = []
    for name, shape, placement in to:
        position, times = placement.picks[-1]
        info, contiguous = handed.get(name), dense(shape)
        strides = contiguous if info is None or info.shape != shape else info.strides
        by_rows = times > 0 and strides[position] * times == 1
        in_one_piece = placement.own and strides == contiguous
        found.append(Destination(dtypes[name], by_rows, in_one_piece, placement.shape == full))
    return Case(columns >= extents["n"], problem.aliases, tuple(found))


def code_of(panels: Panels, problem: Problem, case: Case) -> Code:
    """The code of a problem. It is made from the first problem of each case, and kept in `panels.codes`."""
    found: Code | None = panels.codes.get(case)
    if found is None:
        found = panels.codes[case] = _Coder(panels, problem, case).code()
    return found


# --- how it is made --------------------------------------------------------------------------------------------------


def _copied(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(x)


def uncopied_name(node: Node) -> Name:
    """The name of an operand as it is passed, if the name `node` is that of a copy."""
    return node, "given"


class _Coder:
    """Makes the code of one case from its first problem."""

    def __init__(self, panels: Panels, problem: Problem, case: Case) -> None:
        self.panels, self.problem, self.case = panels, problem, case
        self.space, self.types, self.stages = panels.space, panels.graph.types, panels.graph.stages
        self.compute = panels.context.compute
        self.aliased = dict(case.aliases)
        self.overwritten = frozenset(self.aliased.values())
        self.memory: list[tuple[Name, Mask, torch.dtype]] = []
        self.counts: dict[Name, Dim] = {}
        self.masks: dict[Node, Mask] = dict.fromkeys(panels.constants, ())
        self.copied: set[Node] = set()
        multiplies = [any(step.node.op == "accum" for step in sweep.program.steps) for sweep in panels.sweeps]
        # The last bits of a sum depend on how many rows are multiplied at once, and argmax compares sums of two sweeps.
        # So if several sweeps multiply, all of them multiply the same panels, into buffers.
        self.multiplies_again = sum(multiplies) > 1
        names = [output.name for output in panels.graph.outputs]
        self.destinations = dict(zip(names, case.destinations, strict=True))

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
        whole = tuple(map(of_one_tile, sweeps))
        return Code(loads, tuple(self.memory), tuple(self.counts.items()), before, tuple(sweeps), whole)

    def _load(self, node: Node) -> Source:
        name = uncopied_name(node) if node in self.copied or node in self.panels.context.converted else node
        return Source(name, node, self.held(node))

    def held(self, node: Node) -> torch.dtype:
        """The dtype in which the values of a node are held."""
        return dtype_of(self.types[node].kind, self.compute)

    def _whole(self, name: Name, mask: Mask, dtype: torch.dtype) -> None:
        self.memory.append((name, mask, dtype))

    # --- before the first sweep --------------------------------------------------------------------------------

    def _inputs(self) -> Iterator[Instruction]:
        for node in self.panels.graph.loads():
            operand = self.problem.by_name.get(node.attr.name)
            if not isinstance(operand, TensorInfo):
                self.masks[node] = ()
                continue
            self.masks[node] = mask = self.panels.placings[node].mask
            if per_tile(self.stages[node]):
                continue
            # Each tile reads the operand. It is copied if an output that may be stored earlier shares its storage.
            if operand.dtype != self.held(node) or node.attr.name in self.overwritten:
                self._whole(node, mask, self.held(node))
                self.copied.add(node)
                yield Instruction(_copied, (uncopied_name(node),), node)
        for node in self.panels.coordinates:
            self.masks[node] = self.space.mask(node.attr)

    # --- between sweeps ----------------------------------------------------------------------------------------

    def _finished(self, sweep: Sweep) -> list[Instruction]:
        """The instructions after a sweep: they evaluate the vectors and scalars that are complete then, and store
        those that are outputs."""
        found = []
        for node, run, _ in sweep.finished:
            if node in self.masks:  # it was complete within a tile
                continue
            read: tuple[Name, ...] = node.args
            if node in sweep.merged:
                run, read = self._accumulator(node).result, (self._count(node), *self._state(node))
                self.masks[node] = self.space.mask(self.types[node].factors)
            elif node.op == "debug_print":
                found.append(Instruction(run, node.args, None))
                continue
            else:
                self.masks[node] = small_mask(self.panels.context, node, [self.masks[arg] for arg in node.args])
            self._whole(node, self.masks[node], self.held(node))
            found.append(Instruction(run, read, node))
        return found + [Instruction(store, (node, name), None) for name, node, *_ in sweep.finished_outputs]

    def _accumulator(self, node: Node) -> Accumulator:
        return Accumulator(node.attr[0], self.types[node].kind, self.compute)

    def _count(self, node: Node) -> Name:
        """The name of the number of values that each result of a reduction combines."""
        name = node, "count"
        self.counts[name] = node.attr[1]
        return name

    def _state(self, node: Node) -> tuple[Name, ...]:
        return tuple((node, index) for index in range(len(self._accumulator(node).dtypes)))

    def _starts(self, sweep: Sweep) -> Iterator[Instruction]:
        for node in sweep.merged:
            mask = self.space.mask(self.types[node].factors)
            if node in self._complete(sweep):
                self.masks[node] = mask
                self._whole(node, mask, self.held(node))
            else:
                accumulator, state = self._accumulator(node), self._state(node)
                for name, dtype in zip(state, accumulator.dtypes, strict=True):
                    self._whole(name, mask, dtype)
                yield Instruction(accumulator.start, (self._count(node), *state), None)

    def _complete(self, sweep: Sweep) -> frozenset[Node]:
        """The reductions that are complete within a tile; none if there are no tiles."""
        return frozenset() if self.problem.is_empty else sweep.complete

    # --- a sweep -----------------------------------------------------------------------------------------------

    def _sweep(self, sweep: Sweep) -> TileCode:
        complete = self._complete(sweep)
        direct = self._direct(sweep.stored)
        home = self._home(sweep.stored, direct)
        # The names of the memory of values that have no buffer of their own.
        at: dict[Node, Name] = {**direct, **{node: node for node in complete}}
        if home is not None:
            at |= dict.fromkeys(self._at_home(sweep, home), home)
        buffered = {node: key for node, _, key in sweep.program.steps if key is not None and node not in at}
        # A value that is evaluated again as a whole after the sweep has another name within a tile.
        at |= {node: (node, "tile") for node in buffered if not per_tile(self.stages[node])}
        instructions, buffers, accumulator = [], dict[BufferKey, list[Name]](), None
        for node, buffer in buffered.items():
            buffers.setdefault(buffer, []).append(at.get(node, node))
        cut: dict[Name, None] = dict.fromkeys(sweep.program.sources)
        for node, run, key in sweep.program.steps:
            if node.op == "load":
                cut[uncopied_name(node) if key else node] = None
            if key is None and node.op == "load":
                continue
            out = None if key is None else at.get(node, node)
            read = tuple([at.get(argument, argument) for argument in node.args])
            if node.op == "accum":
                accumulator = out
                continue
            if node.op == "load":
                run, read = _copied, (uncopied_name(node),)
            instructions.append(Instruction(run, read, out))
        stores = tuple(
            Instruction(store, (at.get(node, node), name), None)
            for name, node, *_ in sweep.stored
            if at.get(node, node) != name
        )
        merges = tuple(self._merge(node, at) for node in sweep.merged if node not in complete)
        cut |= dict.fromkeys([stored.name for stored in sweep.stored])
        cut |= dict.fromkeys((*complete, *(name for merge in merges for name in merge.instruction.arguments[1:])))
        held = tuple(Buffer(key, self.space.mask(key[1]), tuple(nodes)) for key, nodes in buffers.items())
        return TileCode(tuple(cut), held, tuple(instructions), merges, stores, accumulator, home, [])

    def _at_home(self, sweep: Sweep, home: str) -> list[Node]:
        """The values in the destination `home`: the product, and if a tile's part of `home` is in one piece, as
        a buffer is, also those in `Stored.passing`."""
        product = [step.node for step in sweep.program.steps if step.node.op == "accum"]
        if not (self.case.whole_columns and self.destinations[home].in_one_piece):
            return product
        return [*product, *next(stored.passing for stored in sweep.stored if stored.name == home)]

    def _merge(self, node: Node, at: dict[Node, Name]) -> Merge:
        (value,), dims = node.args, self.space.dimensions(node.attr[1])
        run = partial(self._accumulator(node).add, dims)
        axes = self.types[value].axes
        once = tuple(axis for axis in "lmn" if axis not in axes)
        return Merge(Instruction(run, (at.get(value, value), *self._state(node)), None), once)

    def _direct(self, outputs: Iterable[Stored]) -> dict[Node, str]:
        """Values that are computed in their destination: it has their dtype, contiguous rows, no operand in it."""
        found: dict[Node, str] = {}
        for name, node, dtype, direct, *_ in outputs:
            to = self.destinations[name]
            usable = to.dtype == dtype and name not in self.aliased and to.by_rows
            if direct and usable and not (node.op == "accum" and self.multiplies_again):
                found.setdefault(node, name)
        return found

    def _home(self, outputs: Iterable[Stored], direct: dict[Node, str]) -> str | None:
        """A destination that can hold the accumulator until the epilogue overwrites it, or None."""
        if self.multiplies_again:
            return None
        floating = self.problem.accumulator.is_floating_point
        accumulator = self.compute if floating else torch.int32  # a float16 one is rounded, but held in float32
        for name, node, _, _, home, _ in outputs:
            to = self.destinations[name]
            overwritten = direct.get(node) == name
            plain = node.op == "accum" and name not in self.aliased
            if home and (plain or overwritten) and to.dtype == accumulator and to.full and to.by_rows:
                return name
        return None
