"""A kernel as text: all that its code is generated from, as canonical JSON that another process can read back.

Code is generated from what was read back and from nothing else. Equal texts are therefore the same kernel, and nothing
that shapes a kernel can be missing from its text. Names of operands and outputs are not in it. Imports no cutlass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from epifuse.base.errors import fail
from epifuse.ir import Factor, Graph, Load, Node, Output, Type
from epifuse.passes.assign_stages import Stage
from epifuse.providers.cutedsl.design import Design, Rewriting
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.ways import Access
from epifuse.request.problem import Problem


class KernelSource(NamedTuple):
    """What one kernel is generated from. `dtypes` and `by_rows` (contiguous along the last mode) are those of A and B,
    `arch` is the architecture it is compiled for, and `others` are the programs of further regions of N.
    """

    program: Program
    design: Design
    dtypes: tuple[torch.dtype, torch.dtype]
    by_rows: tuple[bool, bool]
    accumulator: torch.dtype
    batched: bool
    arch: str
    others: tuple[Program, ...] = ()

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of all regions of N; a single one if N is not divided."""
        return (self.program, *self.others)

    @classmethod
    def of(cls, problem: Problem, program: Program, design: Design) -> KernelSource:
        """The kernel of a problem with `filled` inputs."""
        a, b = problem.a, problem.b
        majors = a.strides[-1] == 1, b.strides[-1] == 1
        arch = problem.target.name
        return cls(program, design, (a.dtype, b.dtype), majors, problem.accumulator, problem.batched, arch)


def written(source: KernelSource) -> str:
    """The text of a kernel, the same in every process. Raises `InternalError` for a value that has no text."""
    form = {
        "design": replace(source.design, raster=0),  # an argument of the launch
        "dtypes": source.dtypes,
        "by_rows": source.by_rows,
        "accumulator": source.accumulator,
        "batched": source.batched,
        "arch": source.arch,
        **_form(source.program),
    }
    plain = {name: _plain(value) for name, value in form.items()}
    if source.others:
        plain["others"] = [[_plain(value) for value in _form(program).values()] for program in source.others]
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def _form(program: Program) -> dict[str, Any]:
    graph = program.graph
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    nodes = [
        (
            node.op,
            None if isinstance(node.attr, Load) else node.attr,  # how an operand lies is in its access
            tuple(numbers[arg] for arg in node.args),
            graph.types[node],
            graph.stages[node],
            program.accuracies.get(node),
        )
        for node in graph.nodes
    ]
    return {
        "edges": program.edges,
        "order": program.order,
        "nodes": tuple(nodes),
        "loads": tuple((numbers[node], _nameless(access)) for node, access in program.loads),
        "stores": tuple(map(_nameless, program.stores)),
        "outputs": tuple(numbers[output.node] for output in graph.outputs),
        "columns": program.columns,
    }


def read(text: str) -> KernelSource:
    """The kernel that `written` wrote."""
    form = {name: _value(plain) for name, plain in json.loads(text).items()}
    names = ("edges", "order", "nodes", "loads", "stores", "outputs", "columns")
    others = tuple(_program(*own) for own in form.get("others", ()))
    return KernelSource(
        _program(*(form[name] for name in names)),
        form["design"],
        form["dtypes"],
        form["by_rows"],
        form["accumulator"],
        form["batched"],
        form["arch"],
        others,
    )


def _program(edges: Any, order: Any, rows: Any, loads: Any, stores: Any, outputs: Any, columns: Any) -> Program:
    nodes: list[Node] = []
    for op, attr, args, *_ in rows:
        # Not by a `Builder`, which would make loads without names into one.
        nodes.append(Node(op, tuple(nodes[arg] for arg in args), attr))
    graph = Graph(
        inputs=(),
        outputs=tuple(Output("", nodes[number]) for number in outputs),
        types=_column(nodes, rows, 3),
        stages=_column(nodes, rows, 4),
    )
    arriving = tuple((nodes[number], access) for number, access in loads)
    return Program(graph, arriving, stores, _column(nodes, rows, 5), edges, order=order, columns=columns)


def _column(nodes: Iterable[Node], rows: Iterable[tuple[Any, ...]], place: int) -> Mapping[Node, Any]:
    return {node: row[place] for node, row in zip(nodes, rows, strict=True) if row[place] is not None}


def _nameless(access: Access) -> Access:
    return replace(access, name="", why="", pairs=access.pairs and access.travels.in_place)


_RECORDS: Mapping[str, type] = {record.__name__: record for record in (Access, Design, Factor, Rewriting, Stage, Type)}


def _tuple(value: Any) -> object:
    return list(map(_plain, value))


def _record(kind: Any) -> Callable[[Any], object]:
    name = kind.__name__
    names = kind._fields if issubclass(kind, tuple) else [field.name for field in fields(kind)]
    parts = attrgetter(*names)
    return lambda value: {name: _tuple(parts(value))}


_AS_IT_IS = frozenset({str, int, bool, type(None)})
_WRITERS: Mapping[type, Callable[[Any], object]] = {
    tuple: _tuple,
    float: lambda value: {"float": value.hex()},
    frozenset: lambda value: {"set": sorted(value)},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    **{kind: _record(kind) for kind in _RECORDS.values()},
}


def _plain(value: object) -> object:
    """A value as JSON: a list stands for a tuple, and an object's only member has a type's name and holds its parts."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind not in _WRITERS:
        raise fail("kernel_text", None, value=repr(value), type=kind.__name__)
    return _WRITERS[kind](value)


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(map(_value, plain))
    if not isinstance(plain, dict):
        return plain
    ((name, inside),) = plain.items()
    if name == "float":
        return float.fromhex(inside)
    if name == "set":
        return frozenset(inside)
    if name == "dtype":
        return getattr(torch, inside)
    return _RECORDS[name](*map(_value, inside))
