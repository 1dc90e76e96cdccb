"""Make each row of the result one segment (`segments.py`), as where N is a single head whose columns are combined.

Otherwise the halves of the head are two parts of a row, which TMA weaves (`weave.py`), and its norm is a reduction of
whole rows (`rows.py`). No kernel supports both, but kernels do within segments. Rows with segments have one more factor
of N, which counts the segments. So this module adds that factor, with an extent of one. Imports no cutlass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from epifuse.ir import Builder, Dims, Factor, Graph, Node, Output
from epifuse.ir.graph import keep, rewrite
from epifuse.ir.types import Dim, canonical
from epifuse.passes.assign_stages import assign_stages, shares_rows
from epifuse.providers.cutedsl import pairs
from epifuse.providers.cutedsl.designs import DESIGNS
from epifuse.request.problem import Problem

_WIDEST = max(design.tile[1] for design in DESIGNS)


def as_segment(graph: Graph, problem: Problem) -> Graph:
    """Return the graph with one segment a row, if a thread then holds all columns that are combined; else `graph`."""
    made = _counted(graph, problem) if "pick" in graph.ops else None
    return made if made is not None and pairs.threads_hold_picks(made, problem) else graph


def gated_segment(graph: Graph, problem: Problem) -> Graph:
    """Return a graph over the columns of one part (`weave.py`) with one segment a row, if its values need whole rows;
    else `graph`. An example is a gated activation whose row is one block of scales, as in an expert of few columns."""
    if not shares_rows(assign_stages(graph, problem)):
        return graph
    made = _counted(graph, problem)
    return made if made is not None and not shares_rows(made) else graph


def _counted(graph: Graph, problem: Problem) -> Graph | None:
    """Return the graph with the counting factor and its stages; None if no tile holds a row, or if it has effects."""
    n = problem.extents["n"]
    made = _Counting(graph, n).graph() if 0 < n <= _WIDEST and not graph.effects else None
    return None if made is None else assign_stages(made, problem)


class _Counting:
    """Rewrites one graph with `n` columns. `count` is the factor that counts the segments of a row."""

    def __init__(self, old: Graph, n: int) -> None:
        self.old, self.n, self.count = old, n, Factor("n", n)

    def graph(self) -> Graph | None:
        """Return the new graph; None if an output with one value a row has no dim of extent one to count segments."""
        made = rewrite(self.old, self._made)
        outputs = [self._output(output, made) for output in made.outputs]
        found = tuple(output for output in outputs if output is not None)
        return replace(made, outputs=found) if len(found) == len(outputs) else None

    def _output(self, output: Output, made: Graph) -> Output | None:
        dims = self._counted(output.dims or ())
        if self.count in made.types[output.node].factors and self.count not in _all(dims):
            if () not in dims:
                return None
            at = len(dims) - 1 - dims[::-1].index(())
            dims = (*dims[:at], (self.count,), *dims[at + 1 :])
        return output._replace(dims=dims)

    def _made(self, old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        attr, known = old.attr, self.old.types.get(old)
        match old.op:
            case "load" if attr.dims is not None:
                attr = attr._replace(dims=self._counted(attr.dims))
            case "index" | "one_hot" | "expand":
                attr = self._bounded(attr)
            case "reduce":
                attr = attr[0], self._bounded(attr[1])
            case "pick":
                attr = tuple((self._bounded((factor,))[0], place) for factor, place in attr)
        if attr == old.attr and known is None:
            return keep(old, args, builder)
        made = builder.node(old.op, *args, attr=attr)
        if known is not None:
            factors = [*self._bounded(known.factors)]
            is_counted = old.op == "accum" or (old.op == "load" and self.count in _all(attr.dims or ()))
            if is_counted or any(self.count in builder.types[arg].factors for arg in args if arg in builder.types):
                factors.append(self.count)
            builder.types[made] = replace(known, factors=canonical(factors))
        return made

    def _bounded(self, factors: Iterable[Factor]) -> Dim:
        """The factors, of which the outermost of N gets an extent, because it now ends with the segment."""
        return tuple(
            factor._replace(extent=self.n // factor.stride) if factor.axis == "n" and factor.extent is None else factor
            for factor in factors
        )

    def _counted(self, dims: Dims) -> Dims:
        """The dims, with the counting factor placed before the outermost factor of N."""
        found = []
        for dim in map(self._bounded, dims):
            at = next((i for i, f in enumerate(dim) if f.axis == "n" and f.stride * (f.extent or 1) == self.n), None)
            found.append(dim if at is None else (*dim[:at], self.count, *dim[at:]))
        return tuple(found)


def _all(dims: Dims) -> set[Factor]:
    return {factor for dim in dims for factor in dim}
