"""An epilogue lowered for the panel kernel, for any extents: its sweeps over the product, and their programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from epifuse.base.dtypes import dtype_of
from epifuse.base.lazy import cached_property
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

    If `direct` is set, the value may be computed in the destination. If `home` is set, the accumulator may lie in the
    destination before that. `passing` are the values in between that may lie there too.
    """

    name: str
    node: Node
    dtype: torch.dtype
    direct: bool
    home: bool
    passing: tuple[Node, ...] = ()


class Sweep(NamedTuple):
    """What one pass over the panels computes. The first sweep, number -1, computes no panel.

    `merged` are its reductions; those in `complete` are complete within each tile. `finished` are the vectors and
    scalars that are complete after the sweep, `finished_outputs` are the outputs among them.
    """

    stored: tuple[Stored, ...]
    merged: tuple[Node, ...]
    complete: frozenset[Node]
    program: TileProgram
    finished: tuple[Step, ...]
    finished_outputs: tuple[Output, ...]


@dataclass(frozen=True, eq=False)
class Panels:
    """A lowered epilogue. `space` has the extents of the first problem, but only its factors matter.

    `codes` has the code of a launch for each case; see `code.Case`.
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
        """How the operand of each load lies in the space."""
        return {node: self.space.placing(node.attr.dims or ()) for node in self.graph.loads()}

    @cached_property
    def stores(self) -> tuple[Placing, ...]:
        """How the outputs lie in the space."""
        return tuple(self.space.placing(output.dims or ()) for output in self.graph.outputs)


def panels(typed: Graph, problem: Problem, aliases: Mapping[str, str] | None = None) -> Panels:
    """Lower a typed graph. `aliases` has for an output the operand whose storage it shares; None means no output."""
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
    """Lower `typed` for a problem whose outputs may share storage with operands. `without` is the result if none does,
    which is returned if sharing changes nothing."""
    aliases = dict(problem.aliases)
    return panels(typed, problem, aliases) if aliases and _changes(aliases, without.graph) else without


def _changes(aliases: Mapping[str, str], graph: Graph) -> bool:
    """Whether sharing storage with operands changes when a value of the lowered `graph` is computed."""
    handed = {output.node.attr.name for output in graph.outputs if output.node.op == "load"}
    return sweeps(graph) > 1 or not handed.isdisjoint(aliases.values())


def _converted(graph: Graph, problem: Problem, overwritten: set[str]) -> Iterable[Node]:
    """Yield the loads that are copied: of operands whose dtype is not the one that their kind is computed in, and of
    operands that are outputs themselves, if another output overwrites their memory."""
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
        """The vectors and scalars that a value of their own sweep reads, so that they are complete within each tile."""
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
        """The sweep that stores `output`. One that shares storage with an operand waits for the last sweep, because
        each sweep may read the operand."""
        own: int = self.graph.stages[output.node].sweep
        return sweeps(self.graph) - 1 if output.name in self.aliases else own

    def _stored(self, outputs: Iterable[Output], merged: Iterable[Node], program: TileProgram) -> tuple[Stored, ...]:
        """The outputs that this sweep stores. A destination may hold the accumulator if nothing reads the accumulator
        after the value is computed. Then torch's GEMM can run on larger panels than the epilogue."""
        outputs = tuple(outputs)
        order = {step.node: position for position, step in enumerate(program.steps)}
        last = {arg: position for position, step in enumerate(program.steps) for arg in step.node.args}
        accum = next((step for step in program.steps if step.node.op == "accum"), None)
        # Values that are stored or reduced after the last step.
        left = {output.node for output in outputs} | {arg for node in merged for arg in node.args}
        computed = {step.node for step in program.steps if step.buffer and step.node.args and step.node.op != "reduce"}
        found = []
        for name, node, *_ in outputs:
            held = dtype_of(self.graph.types[node].kind, self.context.compute)
            passing: tuple[Node, ...] = ()
            if node in computed and accum is not None:
                # Values in the accumulator's buffer exist at different times, so they can share the destination too.
                passing = tuple(
                    other
                    for other, _, buffer in program.steps
                    if buffer == accum.buffer and other not in left and last.get(other, order[other]) <= order[node]
                )
            home = node.op == "accum" or (accum is not None and accum.node in passing)
            found.append(Stored(name, node, held, node in computed, home, passing))
        return tuple(found)


_WHOLE = ("const", "load", "index")  # operations whose values exist before the first sweep
