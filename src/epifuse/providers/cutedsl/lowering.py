"""Lowering: from the typed graph to the one that a kernel walks, and what planning needs of it. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch

from epifuse.base.lazy import cached_property
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.ir import Factor, Graph, Load, Node, Output
from epifuse.ir.graph import topological
from epifuse.ir.types import factors_of
from epifuse.passes.assign_stages import assign_stages, shares_rows
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.lower import lower as inline
from epifuse.passes.split_operators import split_operators
from epifuse.passes.split_sweeps import Sweep, part_of, split
from epifuse.passes.structure import Structure
from epifuse.plan import Reason
from epifuse.plan.destinations import is_read_beside
from epifuse.providers.cpu.space import Space
from epifuse.providers.cutedsl import costs, segments, swap
from epifuse.providers.cutedsl.addresses import Along
from epifuse.providers.cutedsl.log_sums import split_log_sums
from epifuse.providers.cutedsl.online import PLACE, merge_online, of_wide_rows
from epifuse.providers.cutedsl.operand_sums import delay_operand_sums
from epifuse.providers.cutedsl.partials import Reduction, reduction, reductions_of
from epifuse.providers.cutedsl.prints import Print, with_prints
from epifuse.providers.cutedsl.row_as_segment import as_segment, gated_segment
from epifuse.providers.cutedsl.rows import Walk, is_line, nodes_of_other_columns, walks
from epifuse.providers.cutedsl.ways import Use, candidates
from epifuse.providers.cutedsl.weave import Order, Woven, problem_of, woven
from epifuse.providers.regions import Regions
from epifuse.request.problem import Problem

NATIVE = frozenset(costs.FAST)
"""Activations with a fast device form."""


@dataclass(frozen=True, eq=False)
class Lowered:
    """A typed graph, the graph that the kernel walks for it, and what follows from both for any extents.

    - `order`: how the two parts of a row lie in B (`weave.py`), if there are parts; `refused`: why parts are not woven.
    - `is_swapped`: `walked` is of the transposed product.
    - `regions`: regions of N to launch if one launch cannot compute all of N; `is_of_region`: this is one of them.
    - `wide`: the lowered graph for rows that no cluster holds, if it differs; `is_wide`: this is that graph.
    """

    typed: Graph
    walked: Graph
    order: Order = ""
    refused: Reason | None = None
    is_swapped: bool = False
    regions: Regions | None = None
    is_of_region: bool = False
    wide: Lowered | None = None
    is_wide: bool = False
    _splits: dict[tuple[bool, frozenset[str]], tuple[Launch, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def _printing(self) -> tuple[Graph, tuple[Print, ...], Mapping[str, torch.dtype]]:
        return with_prints(self.walked)

    @property
    def stored(self) -> Graph:
        """The walked graph, with the values that are printed among its outputs."""
        return self._printing[0]

    @property
    def prints(self) -> tuple[Print, ...]:
        """The values that are printed after a launch."""
        return self._printing[1]

    @property
    def printed(self) -> Mapping[str, torch.dtype]:
        """The dtypes of outputs that are printed, by name."""
        return self._printing[2]

    @cached_property
    def swapped(self) -> Lowered | Reason:
        """The lowered graph of the transposed product, or why the product cannot be transposed."""
        refused = swap.refused(self.walked, in_parts=bool(self.order))
        return refused or Lowered(self.typed, swap.graph_of(self.walked), is_swapped=True, is_wide=self.is_wide)

    @cached_property
    def loads(self) -> tuple[Node, ...]:
        """The loads, in the order in which the kernel takes them."""
        return self.stored.loads()

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The finest factors of the axes."""
        return Space.of(self.stored, {}).factors

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """The walks over a tile's values (`rows.py`), in order."""
        return walks(self.stored)

    @cached_property
    def exchanged(self) -> int:
        """32-bit words of a row that the CTAs of a cluster send to each other in one exchange."""
        whole = [[node for node in walk.reductions if not segments.width(node)] for walk in self.walks]
        return max(sum(reduction(node, self.stored).words for node in nodes) for nodes in whole)

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """How each load may travel, in the order of `loads`."""
        types = self.stored.types
        early = {node for walk in self.walks for node in (*walk.nodes, *walk.lines)}
        elsewhere = nodes_of_other_columns(self.walks, self.stored)
        uses = [
            Use(
                types[node].axes - {"l"}, leaves=False, late=node not in early, read_for_other_columns=node in elsewhere
            )
            for node in self.loads
        ]
        return tuple(
            Read(node.attr, types[node].axes, candidates(use), Along.of(node.attr.dims, self.factors))
            for node, use in zip(self.loads, uses, strict=True)
        )

    @cached_property
    def writes(self) -> tuple[Write, ...]:
        """How each output may travel. Values that are printed come last."""
        return tuple(_write(output, self.stored, self.factors) for output in self.stored.outputs)

    @cached_property
    def is_plain(self) -> bool:
        """Whether every operand and output is used in its own layout, and no reshape cuts an axis."""
        along = [*[read.along for read in self.reads], *[write.along for write in self.writes]]
        views = any(read.load.views for read in self.reads) or any(write.output.views for write in self.writes)
        return all(one.at is not None for one in along) and not views

    @cached_property
    def ends_in_rows(self) -> bool:
        """Whether the rows of the result run along the last of several dims of an output, as in a transposed output. If
        such an output is allocated, the number of rows is one of its strides."""
        axis = 1 if self.is_swapped else 0
        return any(
            len(write.along.dims) > 1
            and write.along.at is not None
            and write.along.at[axis] == len(write.along.dims) - 1
            for write in self.writes
        )

    @cached_property
    def shares_rows(self) -> bool:
        """Whether some value needs a whole row at once."""
        return shares_rows(self.walked)

    @cached_property
    def span(self) -> int:
        """The columns of a tile must be a multiple of this number, to hold whole segments and all columns that are
        combined; 0 if there are neither."""
        return segments.span(self.walked)

    @cached_property
    def typed_shares_rows(self) -> bool:
        """Whether some value needed a whole row at once before the graph was lowered."""
        return shares_rows(self.typed)

    @cached_property
    def reduces(self) -> bool:
        """Whether anything is reduced."""
        return any(node.op == "reduce" for node in self.stored.nodes)

    @cached_property
    def reduces_axes(self) -> bool:
        """Whether anything is reduced along a whole axis, and so must leave out what lies beyond the result."""
        return any(node.op == "reduce" and not segments.width(node) for node in self.stored.nodes)

    @cached_property
    def adds_along_axes(self) -> bool:
        """Whether floats are added or multiplied along a whole axis, so that bits depend on the order. The bits of a
        largest value, of its place, and of a sum of integers do not."""
        whole = [node for node in self.stored.nodes if node.op == "reduce" and not segments.width(node)]
        return any(
            self.stored.types[node].kind == "float"
            and node.attr[0] != PLACE
            and (node.attr[0] not in REDUCTIONS or REDUCTIONS[node.attr[0]].merge.how not in ("largest", "smallest"))
            for node in whole
        )

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions that are merged after all tiles."""
        return reductions_of(self.stored)

    @cached_property
    def _combined(self) -> Mapping[str, Node]:
        """By name of an operand, the `pick` that reads it in other columns than those that are stored with them."""
        return {
            node.attr.name: pick
            for pick in self.stored.nodes
            if pick.op == "pick"
            for node in topological(pick.args)
            if node.op == "load"
        }

    def overwritten(self, problem: Problem) -> Reason | None:
        """Why an output may not share the memory of an operand, or None. A tile is stored piece by piece, and a later
        piece would read columns that an earlier one wrote. Values of segments are stored before the last walk."""
        for name, operand in problem.aliases:
            output = next(output for output in self.typed.outputs if output.name == name)
            columns = [factor for factor in factors_of(output.dims or ()) if factor.along == "n"]
            is_part = prod(factor.size(problem.extents) for factor in columns) < problem.extents["n"]
            if is_part and is_read_beside(operand, output, self.typed):
                told = f"'{name}' has a value for each segment, and the memory of '{operand}', which other outputs read"
                return Reason(f"{told}: pass another tensor for '{name}'", self.typed.loc(output.node))
            if (pick := self._combined.get(operand)) is not None:
                told = f"'{name}' has the memory of '{operand}', of which a value takes other columns"
                return Reason(f"{told}: pass another tensor for '{name}'", self.stored.loc(pick))
        return None

    def launches(self, problem: Problem, *, whole_rows: bool) -> tuple[Launch, ...]:
        """One launch for each sweep over the product. `whole_rows`: whether a tile may hold whole rows."""
        # Else the launches only depend on which outputs share memory with operands.
        key = whole_rows, frozenset(name for name, _ in problem.aliases)
        if (found := self._splits.get(key)) is None:
            sweeps = split(self.typed, problem, whole_rows=whole_rows)
            made = lower_region if self.is_of_region else lower
            found = self._splits.setdefault(key, tuple(_launch(sweep, problem, made) for sweep in sweeps))
        return found


class Read(NamedTuple):
    """A load, the axes it varies over, the ways in which it may travel (its strides decide), and its dims."""

    load: Load
    axes: frozenset[str]
    ways: tuple[str, ...]
    along: Along


class Write(NamedTuple):
    """An output, the axes it varies over, the ways in which it may travel (its strides decide), and its dims."""

    output: Output
    axes: frozenset[str]
    ways: tuple[str, ...]
    along: Along


def _write(output: Output, graph: Graph, factors: tuple[Factor, ...]) -> Write:
    late, by_line = graph.stages[output.node].kind == "finish", is_line(output, graph)
    axes = (
        graph.types[output.node].axes if late else frozenset(factor.axis for dim in output.dims or () for factor in dim)
    )
    use = Use(axes - {"l"}, leaves=True, late=late, by_line=by_line)
    return Write(output, axes, candidates(use), Along.of(output.dims, factors))


class Launch(NamedTuple):
    """One of several launches: its sweep, the sweep's structure, and what the sweep was lowered to."""

    sweep: Sweep
    structure: Structure
    work: Lowered


def _launch(sweep: Sweep, whole: Problem, made: Callable[[Graph, Problem], Lowered]) -> Launch:
    problem = part_of(sweep, whole)
    return Launch(sweep, Structure.of(sweep.graph, problem), made(sweep.graph, problem))


def lower_region(graph: Graph, whole: Problem) -> Lowered:
    """Lower the graph of one region of N."""
    return replace(lower(graph, whole), is_of_region=True)


def lower(graph: Graph, whole: Problem) -> Lowered:
    """Lower a graph: replace functions that have no device form by their definitions, and assign stages.

    The result is the same for all extents of a class.
    """
    half, order, refused = woven(graph, whole)
    if (order or refused) and (alone := as_segment(graph, whole)) is not graph:
        half, order, refused = Woven(alone)
    problem = problem_of(order, whole)
    half = gated_segment(half, problem) if order else half
    opened = canonicalise(inline(split_operators(half, problem), NATIVE), problem)
    regions = Regions(graph, whole, lower_region, shares=True) if "pick" in graph.ops else None
    walked = assign_stages(split_log_sums(delay_operand_sums(opened, problem)), problem)
    made = Lowered(graph, merge_online(walked, problem), order, refused, regions=regions)
    wide = of_wide_rows(made.walked, problem)
    return made if wide is None else replace(made, wide=replace(made, walked=wide, is_wide=True))
