"""Graphs as trees: read again they are the same graph, and topological visitors stand only where values meet again."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse import passes
from epifuse.forms.evt import EVT, SplitTreeVisitor, TopologicalVisitor, Visitor, functional, fusion, to_tree
from tests.evt.test_article import article, as_function, data, loss  # noqa: F401 - a fixture
from tests.passes import test_pipeline
from tests.passes.test_pipeline import problem_for

# What a destination held is the problem's, not the tree's.
EPILOGUES = {name: s for name, s in test_pipeline.EPILOGUES.items() if s not in test_pipeline.DESTINATIONS}


def digest(epilogue: Any) -> str:
    graph, problem = problem_for(epilogue)
    return passes.identity(passes.run(graph, problem), problem).digest


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_tree_read_again_is_the_same_graph(name: str) -> None:
    tree = to_tree(EPILOGUES[name])
    assert digest(tree) == digest(EPILOGUES[name])
    assert digest(to_tree(tree.__epifuse__().graph)) == digest(EPILOGUES[name])


@pytest.mark.parametrize("name", EPILOGUES)
def test_as_printed(name: str, golden: Callable[[str], None]) -> None:
    """As written, and as typed for a problem: then each load is of its kind."""
    graph, problem = problem_for(EPILOGUES[name])
    typed = passes.run(graph, problem)
    golden(f"{to_tree(EPILOGUES[name])}\n\n== typed\n{to_tree(typed)}")


def test_the_functions_graph_is_the_articles_tree(data: dict[str, torch.Tensor]) -> None:  # noqa: F811
    """The loss, written as a function, typed, and drawn as a tree: the article's figure 6."""
    args = ef.GemmArguments(data["A"], data["B"], epilogue=as_function(data))
    tree = to_tree(args.graph)
    assert str(tree).splitlines()[:9] == [*str(article()).splitlines()[:8], "   ├─ 2: Compute(mul) <- 1, 0"]
    named = {name: value for name, value in args.epilogue.parameters.items() if name != "result"}
    again = ef.GemmArguments(data["A"], data["B"], epilogue=ef.EpilogueArguments.partial(tree, named))
    assert ef.explain(again).plan.digest == ef.explain(args).plan.digest  # type: ignore[union-attr]


def visitors(tree: Visitor) -> Iterator[Visitor]:
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack += node.below


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_topological_visitor_is_there_for_a_branch(name: str) -> None:
    """Some value in each is taken twice, or it joins several results; none holds what hangs off on one side."""
    for node in visitors(to_tree(EPILOGUES[name])):
        if isinstance(node, TopologicalVisitor):
            taken = [source for sources in node.edges for source in sources]
            loose = [position for position in range(len(node.nodes) - 1) if position not in taken]
            assert loose or len(taken) > len(set(taken))
        assert not isinstance(node, SplitTreeVisitor)


def test_a_tree_has_none() -> None:
    tree = to_tree("def epi(accum, C, bias): D = relu(accum + bias) * C; return D")
    assert all(isinstance(node, EVT) or not node.below for node in visitors(tree))


def test_only_what_lies_between_branch_and_merge() -> None:
    tree = to_tree("def epi(accum, C, bias): x = accum + bias; y = relu(x) * sigmoid(x); D = tanh(y) - C; return D")
    assert str(tree).splitlines() == [
        "Compute(sub)",
        "├─ Compute(tanh)",
        "│  └─ TopologicalVisitor",
        "│     ├─ 0: Compute(add)",
        "│     │     ├─ AccFetch()",
        "│     │     └─ Operand(bias)",
        "│     ├─ 1: Compute(relu) <- 0",
        "│     ├─ 2: Compute(sigmoid) <- 0",
        "│     └─ 3: Compute(mul) <- 1, 2",
        "└─ Operand(C)",
    ]


def test_branches_that_cross_share_a_visitor() -> None:
    source = "def epi(accum, C): p = accum * C; q = accum + C; D = relu(p) - tanh(p * q) + sigmoid(q); return D"
    tree = to_tree(source)
    assert sum(isinstance(node, TopologicalVisitor) for node in visitors(tree)) == 1
    assert digest(tree) == digest(source)


def test_defaults_and_captured_numbers_become_operands() -> None:
    factor = 3.0

    def epilogue(accum: Any, alpha: float = 2.0) -> Any:
        return alpha * accum * factor

    parsed = to_tree(epilogue).__epifuse__()
    assert (parsed.parameters, parsed.defaults) == (("alpha", "factor"), {"alpha": 2.0})


@pytest.mark.parametrize("name", ["LinCombPerRowBiasEltActAux", "LinCombDeEltActDePerRowBias"])
def test_a_trees_own_graph_as_a_tree(name: str) -> None:
    tree = vars(fusion)[name](functional.ReLU if name.endswith("Aux") else functional.dReLU)
    given = {"C": torch.empty(8, 12), "bias": torch.empty(8, 1), "aux": torch.empty(8, 12), "alpha": 1.0, "beta": 1.0}
    given = {name: given[name] for name in tree.__epifuse__().parameters}
    graph, problem = problem_for(tree, given)
    again, problem_again = problem_for(to_tree(graph), given)
    identities = [passes.identity(passes.run(*pair), pair[1]) for pair in ((graph, problem), (again, problem_again))]
    assert identities[0].digest == identities[1].digest
