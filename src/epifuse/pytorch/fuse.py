"""The pass over the graphs of torch.compile, in which each product gets the operations around it as an epilogue.

PyTorch differentiates first: at Inductor's `post_grad_custom_pre_pass` the forward and the backward graph consist of
ATen operations, nearly all of which the epilogue language can express. The other operations stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
import torch._inductor.inductor_prims  # registers prims.fma, which graphs hold
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from epifuse.base import store
from epifuse.frontend.fx import Numerics
from epifuse.pytorch import measure, sites
from epifuse.pytorch.cone import PRODUCTS, is_cast, is_view, is_work, name_of, tensors_of
from epifuse.pytorch.outside import neighbours
from epifuse.pytorch.prediction import predicted
from epifuse.pytorch.report import Report, Row, Times
from epifuse.pytorch.sites import Fused, Known, Unfused
from epifuse.pytorch.sized import Sized
from epifuse.runtime import background

Sites = Literal["predicted", "all", "none"]


@dataclass(eq=False)
class Fuse(CustomGraphPass):
    """The pass. `sites` says which products it takes: those *predicted* to save time, *all* that it can, or *none*.
    With `measure` the saving is measured in place of predicted. Products are left alone if `leave` is true for their
    row of the report. Each graph that the pass is called with adds its products to `report`.

    Passes with equal options are equal, so that models share graphs. With `leave` a pass equals itself alone: what a
    function answers may change.
    """

    numerics: Numerics = "float32"
    sites: Sites = "predicted"
    leave: Callable[[Row], bool] | None = None
    report: Report = field(default_factory=Report)
    measure: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fuse) or self.leave is not None or other.leave is not None:
            return self is other
        return (self.numerics, self.sites, self.measure) == (other.numerics, other.sites, other.measure)

    __hash__ = CustomGraphPass.__hash__

    def uuid(self) -> str | None:
        """The pass's key in PyTorch's caches: epifuse's sources, the options and the device. A function has no such
        key: with `leave` it is None, so that nothing is cached."""
        if self.leave is not None:
            return None
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return store.key_of("fuse", self.numerics, self.sites, str(self.measure), device)

    def __call__(self, graph: FxGraph) -> None:
        """Fuse the products of `graph` in place."""
        sized = Sized.of(graph)
        with sized.as_numbers(graph) as refusals:
            self._fuse(graph, partial(Known.nothing, {**refusals, **_compared(graph)}, sized))
        graph.lint()

    def _fuse(self, graph: FxGraph, nothing: Callable[[], Known]) -> None:
        where = "backward" if any(_is_tangent(node) for node in graph.nodes) else "forward"
        products = [node for node in graph.nodes if node.op == "call_function" and node.target in PRODUCTS]
        mutation = _mutation(graph)
        known: dict[object, Known] = {}
        rows = []
        for product in reversed(products):
            row = _row(where, product)
            if mutation is not None:
                row = replace(row, reason=f"{name_of(mutation)} in its graph writes what other nodes may read")
            else:
                beside = row.dtype == torch.float64, tensors_of(product)[0].device
                row = self._visit(graph, product, row, known.setdefault(beside, nothing()))
            rows.append(row)
        self.report.rows += reversed(rows)
        self.report.graphs += 1

    def _visit(self, graph: FxGraph, product: FxNode, row: Row, known: Known) -> Row:
        if (reason := sites.cannot(product)) is not None:
            return replace(row, reason=reason)
        if self.sites == "none" or (self.leave is not None and self.leave(row)):
            return replace(row, reason="as asked")
        found, times = self._found(product, known)
        row = replace(row, measured=times)
        if isinstance(found, Unfused):
            return replace(row, reason=found.reason)
        row = replace(
            row,
            taken=tuple(name_of(node) for node in found.cone.body if node is not product and is_work(node)),
            left=neighbours(found.cone, known.refusals),
            outputs=len(found.form.outputs),
            bytes_saved=found.site.moved.saved,
            seconds_saved=predicted(found.site).gain,
            plan=found.plan.spec.name,
        )
        background.submit(found.plan)
        if sites.replace(graph, found, known.sized):
            stable_topological_sort(graph)
        return row

    def _found(self, product: FxNode, known: Known) -> tuple[Fused | Unfused, Times | None]:
        """Return what `product` becomes, or why it is left alone, and its times if they were measured."""
        if self.measure and self.sites == "predicted":
            return measure.find(product, known, self.numerics)
        return sites.find(product, known, self.numerics, predicted=self.sites == "predicted"), None


@dataclass
class Passes(CustomGraphPass):
    """Several passes as one, because PyTorch's compiler takes a list of passes only from 2.13 on."""

    passes: tuple[Callable[[FxGraph], None], ...]

    def uuid(self) -> str | None:
        """The keys of all passes as one; None if one of them has no key."""
        known = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return None if None in known else repr(known)

    def __call__(self, graph: FxGraph) -> None:
        """Run the passes one after another."""
        for each in self.passes:
            each(graph)


def _is_tangent(node: FxNode) -> bool:
    return node.op == "placeholder" and node.name.startswith("tangents")


def _compared(graph: FxGraph) -> dict[FxNode, str | None]:
    """The nodes that PyTorch has to compute for the derivative of a largest or smallest value, with the reasons.

    The backward pass compares the value with the elements of its argument, which it may compute again. Suppose that a
    kernel of epifuse computes the argument, or a value that leads to it, in only one of the two passes. It may round
    differently there: then no element equals the largest value, and the gradient is 0 / 0.
    """
    if any(map(_is_tangent, graph.nodes)):
        equal = (node for node in graph.nodes if name_of(node) == "eq")
        why = "it compares what the forward pass stored with what is computed again"
        return {node: why for node in equal if any(map(_is_stored, node.all_input_nodes))}
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None or not context.fw_metadata.traced_tangents:  # no gradients
        return {}
    kept: set[object] = set()
    # All outputs count as kept. For a graph that an operation calls, nothing tells which of them the backward reads.
    for node in graph.output_node().all_input_nodes:
        while node not in kept:
            kept.add(node)
            if is_view(node) or is_cast(node):
                node = node.all_input_nodes[0]  # the value behind a view or a cast is kept, too
    found: dict[FxNode, str | None] = {}
    for node in graph.nodes:
        if node in kept and name_of(node) in _EXTREMES and (again := _computed_again(node.args[0], kept)):
            found |= dict.fromkeys((node, *again), _WHY_EXTREMES)
    return found


_EXTREMES = ("amax", "amin", "max", "min")
_WHY_EXTREMES = (
    "the backward pass compares a largest or smallest value with its argument, which is computed again there"
)


def _computed_again(node: FxNode, kept: Container[object]) -> list[FxNode]:
    """The nodes that the backward pass computes again to get `node` from the values that the forward pass `kept`."""
    found: dict[FxNode, None] = {}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in kept and node.op == "call_function" and node.target not in PRODUCTS:
            found[node] = None
            waiting += node.all_input_nodes
    return [*found]


def _is_stored(node: FxNode) -> bool:
    """Whether the node is a floating-point value that the forward pass stored, or a view or cast of one."""
    while is_view(node) or is_cast(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and all(value.is_floating_point() for value in tensors_of(node))


def _mutation(graph: FxGraph) -> FxNode | None:
    """A node that writes to an argument which others may read after it, or None. A `copy_` into an input at the end of
    a graph does not count."""
    at_end = True
    for node in reversed(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload):
            if node.target._schema.is_mutable and not (at_end and name_of(node) == "copy_"):
                return node  # type: ignore[no-any-return]  # of a graph
            at_end = at_end and name_of(node) == "copy_"
    return None


def _row(where: str, product: FxNode) -> Row:
    value, a = tensors_of(product)[0], tensors_of(product.args[PRODUCTS[product.target].a])[0]  # type: ignore[arg-type]
    return Row(where, product.name, name_of(product), tuple(value.shape), a.shape[-1], value.dtype)
