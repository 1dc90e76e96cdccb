"""verify() refuses broken graphs: each rule is broken once, and the pass that did it is named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse import passes
from epifuse.base.errors import InternalError
from epifuse.fusion.operations import NOTHING, OPERATIONS, Operation, broken
from epifuse.ir import Builder, Factor, Graph, Load, Node, Output, Type
from epifuse.passes.verify import verify, verify_written

SOURCE = "def epi(accum, C): r = sum(accum, dim=-1, keepdim=True); D = accum * C + r; return D"
M, N = Factor("m"), Factor("n")


@pytest.fixture
def graph() -> Graph:
    args = ef.GemmArguments(
        torch.empty(4, 3), torch.empty(3, 5), epilogue=ef.EpilogueArguments.partial(SOURCE, {"C": torch.empty(4, 5)})
    )
    return args.graph


def the(graph: Graph, op: str) -> Node:
    return next(node for node in graph.nodes if node.op == op)


def with_type(graph: Graph, op: str, **changes: Any) -> Graph:
    node = the(graph, op)
    return replace(graph, types={**graph.types, node: replace(graph.types[node], **changes)})


def without_type(graph: Graph) -> Graph:
    return replace(graph, types={node: type_ for node, type_ in graph.types.items() if node.op != "mul"})


def with_root(graph: Graph, node: Node, type_: Type | None = None) -> Graph:
    """`node` as the only output, of D's type unless told otherwise."""
    old = graph.outputs[0]
    types = {**graph.types, node: type_ or graph.types[old.node]}
    return replace(graph, outputs=(Output("D", node, old.dims),), types=types)


def wrong_arity(graph: Graph) -> Graph:
    return with_root(graph, Builder().node("add", the(graph, "accum")))


def unknown_operation(graph: Graph) -> Graph:
    return with_root(graph, Builder().node("frobnicate", the(graph, "accum")))


def wrong_arity_of_a_call(graph: Graph) -> Graph:
    accum = the(graph, "accum")
    return with_root(graph, Builder().node("call", accum, accum, attr="relu"))


def unaligned_load(graph: Graph) -> Graph:
    load = Node("load", (), Load("C"))
    return with_root(graph, load)


def load_without_attribute(graph: Graph) -> Graph:
    return with_root(graph, Node("load", (), "C"))


def reduces_what_is_not_there(graph: Graph) -> Graph:
    node = Node("reduce", (the(graph, "accum"),), ("sum", (Factor("l"),)))
    return with_root(graph, node)


def keeps_what_it_reduced(graph: Graph) -> Graph:
    return with_type(graph, "reduce", factors=(M, N))


def wrong_axes(graph: Graph) -> Graph:
    return with_type(graph, "mul", factors=(M,))


def host_in_the_kernel(graph: Graph) -> Graph:
    return with_type(graph, "mul", host=True)


def output_without_dims(graph: Graph) -> Graph:
    return replace(graph, outputs=(graph.outputs[0]._replace(dims=None),))


def output_of_other_dims(graph: Graph) -> Graph:
    return replace(graph, outputs=(graph.outputs[0]._replace(dims=((M,),)),))


BROKEN: dict[Callable[[Graph], Graph], str] = {
    without_type: "has no type",
    wrong_arity: "has 1 arguments, not 2",
    wrong_arity_of_a_call: "has 2 arguments, not 1",
    unknown_operation: "is no operation",
    unaligned_load: "does not say how it is read",
    load_without_attribute: "has the attribute 'C', not a Load",
    reduces_what_is_not_there: "reduces",
    keeps_what_it_reduced: "reduces",
    wrong_axes: "its arguments over",
    host_in_the_kernel: "is a host number among the kernel's values",
    output_without_dims: "output D has dims",
    output_of_other_dims: "output D has dims",
}


def test_the_sound_graph_passes(graph: Graph) -> None:
    verify("none", graph, graph)


@pytest.mark.parametrize("plant", BROKEN)
def test_a_broken_graph_is_refused(graph: Graph, plant: Callable[[Graph], Graph]) -> None:
    broken = plant(graph)
    with pytest.raises(InternalError, match=BROKEN[plant]) as caught:
        verify("planted", graph, broken)
    assert "after the pass 'planted'" in str(caught.value)
    assert str(graph) in str(caught.value)


@pytest.mark.parametrize("op", OPERATIONS)
def test_an_attribute_of_another_form_is_refused(op: str) -> None:
    node = Node(op, (), object())
    for place in OPERATIONS[op].places:
        assert f"not {OPERATIONS[op].form.words}" in str(broken(node, place))


def test_a_row_without_its_properties_is_none() -> None:
    with pytest.raises(TypeError, match="reads_extents"):
        Operation(("written",), 1, NOTHING)  # type: ignore[call-arg]  # what is tested


def test_an_operation_stands_only_where_it_may() -> None:
    node = Node("reduce", (Node("accum"),), ("sum", (N,)))
    assert broken(node, "typed") is None
    with pytest.raises(InternalError, match="does not belong into a written graph"):
        verify_written(Graph((), (Output("D", node),)))


def test_host_expressions_are_verified(graph: Graph) -> None:
    with pytest.raises(InternalError, match="does not belong into a host graph"):
        verify("planted", graph, replace(graph, hosts={"#0": Node("accum")}))


def test_the_pipeline_verifies_what_is_written(graph: Graph) -> None:
    args = ef.GemmArguments(
        torch.empty(4, 3), torch.empty(3, 5), epilogue=ef.EpilogueArguments.partial(SOURCE, {"C": torch.empty(4, 5)})
    )
    with pytest.raises(InternalError, match="after the pass 'parse'"):
        passes.run(graph, args.problem)  # which is typed already


def test_the_pipeline_verifies_after_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted in a pass is found there, not three passes later."""

    def faulty(graph: Graph, problem: Any) -> Graph:
        return wrong_axes(graph)

    args = ef.GemmArguments(
        torch.empty(4, 3), torch.empty(3, 5), epilogue=ef.EpilogueArguments.partial(SOURCE, {"C": torch.empty(4, 5)})
    )
    monkeypatch.setattr(passes, "PIPELINE", (passes.PIPELINE[0], faulty, *passes.PIPELINE[1:]))
    with pytest.raises(InternalError, match="after the pass 'faulty'"):
        passes.run(args.epilogue.parsed.graph, args.problem)
