"""What the panel kernel knows of an epilogue whatever the extents: its sweeps over the product, and their programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from epifuse.base.dtypes import dtype_of
from epifuse.ir import Graph, Node, Output
from epifuse.passes.assign_stages import assign_stages, has_row_stage, sweeps
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.lower import lower
from epifuse.providers.cpu.primitives import FAST
from epifuse.providers.cpu.program import (
    Context,
    Step,
    TileProgram,
    compile_tile,
    constants,
    operation,
    per_tile,
)
from epifuse.providers.cpu.space import Placing, Space
from epifuse.request.problem import Problem, TensorInfo


class Stored(NamedTuple):
    """An output that is stored tile by tile, from a value held in `dtype`.

    `direct` where the value may be computed in the destination, `home` where the accumulator may lie there before, and
    `passing` are the values between the two that may as well.
    """

    name: str
    node: Node
    dtype: torch.dtype
    direct: bool
    home: bool
    passing: tuple[Node, ...] = ()


class Sweep(NamedTuple):
    """What one pass over the panels computes; the one before the first computes no panel.

    Of the reductions in `merged`, those in `complete` are complete within each tile. `finished` are vectors and
    scalars that are complete afterwards, `left` those that are outputs.
    """

    stored: tuple[Stored, ...]
    merged: tuple[Node, ...]
    complete: frozenset[Node]
    program: TileProgram
    finished: tuple[Step, ...]
    left: tuple[Output, ...]


@dataclass(frozen=True, eq=False)
class Panels:
    """A lowered epilogue. `space` has the extents of the first problem, of which only the factors count.

    `codes` holds by case what a launch runs, see `code`.
    """

    graph: Graph
    context: Context
    constants: Mapping[Node, torch.Tensor]
    coordinates: tuple[Node, ...]
    sweeps: tuple[Sweep, ...]
    whole_rows: bool
    codes: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def space(self) -> Space:
        """The iteration space."""
        return self.context.space

    @cached_property
    def placings(self) -> Mapping[Node, Placing]:
        """How operands lie in the space, by their loads."""
        return {node: self.space.placing(node.attr.dims or ()) for node in self.graph.loads()}

    @cached_property
    def stores(self) -> tuple[Placing, ...]:
        """How the outputs lie in the space."""
        return tuple(self.space.placing(output.dims or ()) for output in self.graph.outputs)


def panels(typed: Graph, problem: Problem, aliases: Mapping[str, str] | None = None) -> Panels:
    """Lower a typed graph. `aliases` are operands by the output that shares their storage, none unless given."""
    graph = assign_stages(canonicalise(lower(typed, frozenset(FAST)), problem), problem)
    space = Space.of(graph, problem.extents, "lmn" if problem.batched else "mn")
    compute = problem.float_dtype
    aliases = aliases or {}
    context = Context(graph, space, compute, frozenset(_converted(graph, problem, set(aliases.values()))))
    lowering = _Lowering(context, aliases)
    whole_rows = has_row_stage(typed) or space.inner["n"] > 1
    coordinates = tuple(node for node in graph.nodes if node.op == "index")
    every = tuple(map(lowering.sweep, range(-1, sweeps(graph))))
    return Panels(graph, context, constants(graph, compute), coordinates, every, whole_rows)


def panels_for(typed: Graph, problem: Problem, without: Panels) -> Panels:
    """What `typed` is lowered to for a problem whose outputs may share storage, given what it is `without` that."""
    aliases = dict(problem.aliases)
    return panels(typed, problem, aliases) if aliases and _changes(aliases, without.graph) else without


def _changes(aliases: Mapping[str, str], graph: Graph) -> bool:
    """Whether sharing storage with operands changes what of a lowered `graph` is computed when."""
    handed = {output.node.attr.name for output in graph.outputs if output.node.op == "load"}
    return sweeps(graph) > 1 or not handed.isdisjoint(aliases.values())


def _converted(graph: Graph, problem: Problem, overwritten: set[str]) -> Iterable[Node]:
    """Full-size loads that each tile copies: operands of another dtype than their kind is computed in, and what an
    output takes over from an operand that another output overwrites."""
    roots = {output.node for output in graph.outputs}
    for node in graph.loads():
        held = dtype_of(graph.types[node].kind, problem.float_dtype)
        operand = problem.by_name.get(node.attr.name)
        taken_over = node in roots and node.attr.name in overwritten
        if isinstance(operand, TensorInfo) and (operand.dtype != held or taken_over):
            yield node


@dataclass(frozen=True, eq=False)
class _Lowering:
    context: Context
    aliases: Mapping[str, str]

    @property
    def graph(self) -> Graph:
        return self.context.graph

    def sweep(self, number: int) -> Sweep:
        graph = self.graph
        outputs = [o for o in graph.outputs if per_tile(graph.stages[o.node]) and self._store_sweep(o) == number]
        merged = tuple(node for node in graph.nodes if self._is_merged(node) and self._sweep_of(node) == number)
        complete = self._read_in_tile.intersection(merged)
        prints = [n for n in graph.effects if per_tile(graph.stages[n]) and self._sweep_of(n) == number]
        roots = [output.node for output in outputs] + prints
        roots += [node if node in complete else node.args[0] for node in merged]
        program = compile_tile(self.context, roots, number)
        left = tuple(o for o in graph.outputs if self._is_finished(o.node, number))
        finished = tuple(
            Step(node, operation(self.context, node), None)
            for node in graph.nodes
            if node.op not in _WHOLE and self._is_finished(node, number)
        )
        return Sweep(self._stored(outputs, merged, program), merged, complete, program, finished, left)

    def _is_finished(self, node: Node, number: int) -> bool:
        stage = self.graph.stages[node]
        return not per_tile(stage) and stage.sweep == number

    def _sweep_of(self, node: Node) -> int:
        sweep: int = self.graph.stages[node].sweep
        return max(sweep, 0)

    def _is_merged(self, node: Node) -> bool:
        stages = self.graph.stages
        return node.op == "reduce" and not per_tile(stages[node]) and per_tile(stages[node.args[0]])

    @cached_property
    def _read_in_tile(self) -> frozenset[Node]:
        """Small values that a value of their own sweep reads: complete within each tile."""
        stages = self.graph.stages
        read: set[Node] = set()
        for node in reversed(self.graph.nodes):
            if per_tile(stages[node]) or node in read:
                read.update(
                    arg
                    for arg in node.args
                    if stages[arg].kind == "finish" and stages[arg].sweep == self._sweep_of(node)
                )
        return frozenset(read)

    def _store_sweep(self, output: Output) -> int:
        """An output that shares storage with an operand waits for the last sweep: each sweep may read the operand."""
        own: int = self.graph.stages[output.node].sweep
        return sweeps(self.graph) - 1 if output.name in self.aliases else own

    def _stored(self, outputs: Iterable[Output], merged: Iterable[Node], program: TileProgram) -> tuple[Stored, ...]:
        """A destination holds the accumulator where nobody reads the accumulator after the value is computed, so that
        torch's GEMM runs on larger panels than the epilogue."""
        outputs = tuple(outputs)
        order = {step.node: position for position, step in enumerate(program.steps)}
        last = {arg: position for position, step in enumerate(program.steps) for arg in step.node.args}
        accum = next((step for step in program.steps if step.node.op == "accum"), None)
        # Stored or reduced after the last step.
        left = {output.node for output in outputs} | {arg for node in merged for arg in node.args}
        computed = {step.node for step in program.steps if step.buffer and step.node.args and step.node.op != "reduce"}
        found = []
        for name, node, *_ in outputs:
            held = dtype_of(self.graph.types[node].kind, self.context.compute)
            passing: tuple[Node, ...] = ()
            if node in computed and accum is not None:
                # Values that take over the accumulator's buffer are there at different times.
                passing = tuple(
                    other
                    for other, _, buffer in program.steps
                    if buffer == accum.buffer and other not in left and last.get(other, order[other]) <= order[node]
                )
            home = node.op == "accum" or (accum is not None and accum.node in passing)
            found.append(Stored(name, node, held, node in computed, home, passing))
        return tuple(found)


_WHOLE = ("const", "load", "index")  # there before the first sweep
