"""Split sweeps: an epilogue that needs the product several times becomes several epilogues that need it once.

Vectors and numbers that one sweep finishes and a later one reads are outputs of the first and operands of the later
one. Their names are not Python identifiers, so that no operand of the user can have the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from epifuse.ir import Builder, Graph, Load, Node, Output, Type, rewrite
from epifuse.ir.graph import keep, topological
from epifuse.ir.types import Dims, shape_of
from epifuse.passes.assign_stages import assign_stages, sweeps
from epifuse.passes.canonicalise import constant, typed
from epifuse.passes.prune import prune
from epifuse.passes.spelling import reductions_under
from epifuse.request.problem import Problem, TensorInfo, dense


class SweepPart(NamedTuple):
    """One sweep as an epilogue of its own: its graph and its problem."""

    graph: Graph
    problem: Problem


class Sweep(NamedTuple):
    """The graph of one part, for any extents. `read` are the loads of values that earlier parts hand over."""

    graph: Graph
    read: tuple[Node, ...] = ()


def split_sweeps(graph: Graph, problem: Problem, *, whole_rows: bool = True) -> tuple[SweepPart, ...]:
    """The parts, one for each sweep, in the order in which they run. A graph of one sweep is its own only part.

    Without `whole_rows` no tile holds a whole row: a value that needs a reduction along rows waits for the next sweep.
    """
    sweeps = split(graph, problem, whole_rows=whole_rows)
    return tuple(SweepPart(sweep.graph, part_of(sweep, problem)) for sweep in sweeps)


def split(graph: Graph, problem: Problem, *, whole_rows: bool = True) -> tuple[Sweep, ...]:
    """The graphs of the parts. They depend on the problem only by which outputs share memory with operands."""
    staged = assign_stages(_online(graph, whole_rows), problem, whole_rows=whole_rows)
    count = sweeps(staged)
    if count == 1:
        return (Sweep(graph),)
    parts: list[Sweep] = []
    crossing: dict[Node, str] = {}
    for sweep in reversed(range(count)):
        outputs = [output for output in staged.outputs if _stored_in(output, staged, problem) == sweep]
        outputs += [Output(name, node) for node, name in crossing.items() if _sweep(node, staged) == sweep]
        effects = tuple(node for node in staged.effects if _sweep(node, staged) == sweep)
        for node in _read_before((*(output.node for output in outputs), *effects), staged, sweep):
            crossing.setdefault(node, f"{_word(node)}~{len(crossing)}")
        parts.append(_part(replace(staged, outputs=tuple(outputs), effects=effects), problem, sweep, crossing))
    return tuple(reversed(parts))


def part_of(sweep: Sweep, problem: Problem) -> Problem:
    """The problem of one part: `problem` with values of earlier parts as further operands, and the part's outputs."""
    own, infos, graph = dict(problem.dtypes), dict(problem.outputs), sweep.graph
    names = [output.name for output in graph.outputs]
    held = {o.name: _held(graph.types[o.node].kind, problem) for o in graph.outputs if o.name not in own}
    return problem._replace(
        operands=(*problem.operands, *((node.attr.name, _vector(node, graph, problem)) for node in sweep.read)),
        outputs=tuple((name, infos.get(name)) for name in names),
        dtypes=tuple((name, own[name] if name in own else held[name]) for name in names),
        aliases=tuple(pair for pair in problem.aliases if pair[0] in names),
    )


def crossing_names(part: SweepPart, problem: Problem) -> tuple[str, ...]:
    """The outputs of a part that are not outputs of the whole epilogue. Later parts read them."""
    own = {name for name, _ in problem.dtypes}
    return tuple(output.name for output in part.graph.outputs if output.name not in own)


def _sweep(node: Node, graph: Graph) -> int:
    # A reduction of operands alone (sweep -1) is computed in the first sweep.
    return max(int(graph.stages[node].sweep), 0)


def _stored_in(output: Output, graph: Graph, problem: Problem) -> int:
    """The sweep that stores an output: the earliest that can. If the output overwrites an operand, it is the last one,
    because every sweep may read the operand."""
    aliased = output.name in dict(problem.aliases) and graph.stages[output.node].kind != "finish"
    return sweeps(graph) - 1 if aliased else _sweep(output.node, graph)


def _word(node: Node) -> str:
    return str(node.attr[0]) if node.op == "reduce" else node.op


# --- what crosses ------------------------------------------------------------------------------------------------


class _Finished:
    """A container of the values that sweeps before `sweep` can hand over.

    A value computed from reductions of different extents is not handed over but computed again from these reductions,
    because a value that leaves a kernel has one extent.
    """

    def __init__(self, graph: Graph, sweep: int) -> None:
        self.graph, self.sweep = graph, sweep

    def __contains__(self, node: object) -> bool:
        if not isinstance(node, Node) or self.graph.stages[node].kind != "finish":
            return False
        return _sweep(node, self.graph) < self.sweep and (node.op == "reduce" or self._has_one_extent(node))

    def _has_one_extent(self, node: Node) -> bool:
        types = self.graph.types
        return {types[below].factors for below in reductions_under(node)} == {types[node].factors}


def _read_before(roots: Iterable[Node], graph: Graph, sweep: int) -> tuple[Node, ...]:
    """The values that `sweep` reads from earlier sweeps, each once."""
    finished = _Finished(graph, sweep)
    read = (arg for node in topological(roots, known=finished) for arg in node.args)
    return tuple(dict.fromkeys(arg for arg in read if arg in finished))


# --- one part ----------------------------------------------------------------------------------------------------


def _part(graph: Graph, problem: Problem, sweep: int, crossing: Mapping[Node, str]) -> Sweep:
    """The sweep's outputs and effects as a graph of its own. Values `crossing` from earlier sweeps are its operands."""
    own = {output.name for output in graph.outputs} - set(crossing.values())
    loads = {node: name for node, name in crossing.items() if _sweep(node, graph) < sweep}
    made = _reading(graph, loads)
    outputs = tuple(output if output.name in own else _handed_over(output, made) for output in made.outputs)
    made = assign_stages(prune(replace(made, outputs=outputs), problem), problem)
    loaded = {node.attr.name: node for node in made.loads()}
    made = replace(made, inputs=tuple(name for name in graph.inputs if name in loaded))
    return Sweep(made, tuple(loaded[name] for name in loads.values() if name in loaded))


def _reading(graph: Graph, loads: Mapping[Node, str]) -> Graph:
    """The graph in which the nodes of `loads` are loaded under these names instead of computed."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old not in loads:
            return keep(old, args, builder)
        type_ = graph.types[old]
        node = builder.node("load", attr=Load(loads[old], (), _dims(type_)))
        builder.types[node] = replace(type_, kind="float") if type_.kind == "mask" else type_
        return node if type_.kind != "mask" else typed(builder, "ne", (node, constant(0.0, builder)))

    return rewrite(graph, rule)


def _handed_over(output: Output, graph: Graph) -> Output:
    """An output for later sweeps. A mask is stored as ones and zeros, because every kernel can store these."""
    type_ = graph.types[output.node]
    if type_.kind != "mask":
        return output._replace(dims=_dims(type_))
    builder = Builder(dict(graph.locs), graph.types)  # type: ignore[arg-type]  # a dict, which `rewrite` made
    node = typed(builder, "where", (output.node, constant(1.0, builder), constant(0.0, builder)))
    return output._replace(node=node, dims=_dims(type_))


def _dims(type_: Type) -> Dims:
    return tuple((factor,) for factor in type_.factors)


def _held(kind: str, problem: Problem) -> torch.dtype:
    return {"int32": torch.int32, "int64": torch.int64}.get(kind, problem.float_dtype)


def _vector(node: Node, graph: Graph, problem: Problem) -> TensorInfo:
    """The operand that a value of an earlier sweep becomes: dense, in the order of its dims. `node` is its load."""
    shape = shape_of(node.attr.dims, problem.extents)
    return TensorInfo(shape, dense(shape), _held(graph.types[node].kind, problem), problem.a.device)


# --- one sweep less ----------------------------------------------------------------------------------------------


def _online(graph: Graph, whole_rows: bool) -> Graph:
    """The graph with sums of exp(x - amax(x)), as in softmax, as exp(logsumexp(x) - amax(x)): one sweep then gives
    both.

    Sums along rows that tiles hold whole are not rewritten. The exponent is rounded to float32 once more, as x was when
    it was accumulated.
    """

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        match old, args:
            case Node("reduce", _, ("sum", gone)), (Node("exp", (Node("sub", (x, largest)),)),) if (
                largest.op == "reduce"
                and largest.attr == ("amax", gone)
                and largest.args == (x,)
                and not (whole_rows and all(factor.axis == "n" for factor in gone))
            ):
                known = builder.node("reduce", x, attr=("logsumexp", gone))
                builder.types.setdefault(known, graph.types[old])
                return typed(builder, "exp", (typed(builder, "sub", (known, largest)),))
        return keep(old, args, builder)

    return rewrite(graph, rule)
