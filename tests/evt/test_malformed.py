"""Trees put together wrongly: each is refused where it is made, by an error of ours that names the node."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.forms.evt import (
    EVT,
    AccFetch,
    AuxLoad,
    AuxStore,
    ColBroadcast,
    ColReduction,
    Compute,
    RowBroadcast,
    ScalarBroadcast,
    ScalarReduction,
    SplitTreeVisitor,
    SrcFetch,
    TopologicalVisitor,
    functional,
    fusion,
    to_tree,
)

M, N, K = 4, 6, 3


def run(tree: Any, **named: Any) -> Any:
    return ef.gemm(torch.ones(M, K), torch.ones(K, N), epilogue=tree, **named)


def adds(node: Any) -> EVT:
    return EVT(Compute(ef.add), AccFetch(), node)


WEIGHT = torch.ones(N)


def any_number(*values: Any) -> Any:
    return values[0]


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a class for a node": (lambda: EVT(Compute, AccFetch()), "not the class ABCMeta|not the class Compute"),
    "a tensor for a node": (lambda: adds(torch.ones(N)), "EVT takes nodes of a visitor tree, not a Tensor"),
    "a function for a node": (lambda: EVT(ef.relu, AccFetch()), "not a function"),
    "a tree for an operator": (
        lambda: EVT(adds(SrcFetch()), AccFetch()),
        r"Compute\(add\) computes nothing|takes 0 inputs",
    ),
    "an operator without inputs": (lambda: adds(Compute(ef.relu)), r"Compute\(relu\) takes 1 inputs, and has 0"),
    "a store without input": (lambda: adds(AuxStore("x")), r"AuxStore\(x\) takes 1 inputs"),
    "two inputs of a reduction": (
        lambda: EVT(ColReduction("x"), AccFetch(), AccFetch()),
        r"ColReduction\(x = sum\) takes 1",
    ),
    "too many inputs": (
        lambda: EVT(Compute(ef.relu), AccFetch(), AccFetch()),
        r"Compute\(relu\) takes 1 inputs, and has 2",
    ),
    "an operator alone": (lambda: run(Compute(ef.relu)), r"Compute\(relu\) takes 1 inputs, and has 0"),
    "an operator in a split tree": (lambda: SplitTreeVisitor(AccFetch(), Compute(ef.relu)), r"Compute\(relu\) takes 1"),
    "edges to a leaf": (
        lambda: TopologicalVisitor(((), (0,)), AccFetch(), SrcFetch()),
        r"SrcFetch\(C\) takes 0 inputs, and has 1",
    ),
    "edges to a tree": (
        lambda: TopologicalVisitor(((), (0,)), AccFetch(), adds(SrcFetch())),
        "takes 0 inputs, and has 1",
    ),
    "an edge too few": (
        lambda: TopologicalVisitor(((), (0,)), AccFetch(), Compute(ef.add)),
        r"Compute\(add\) takes 2 inputs, and has 1",
    ),
    "no nodes": (lambda: TopologicalVisitor(()), "was given edges for 0 nodes and a list of 0 nodes"),
    "edges that are numbers": (
        lambda: TopologicalVisitor((0, 0), AccFetch(), Compute(ef.relu)),
        "edges of TopologicalVisitor must be",
    ),
    "edges that are none": (
        lambda: TopologicalVisitor(AccFetch(), Compute(ef.relu)),
        "edges of TopologicalVisitor must be",
    ),
    "edges of words": (lambda: TopologicalVisitor(((), ("0",)), AccFetch(), Compute(ef.relu)), "takes the value of 0"),
    "a negative edge": (lambda: TopologicalVisitor(((), (-1,)), AccFetch(), Compute(ef.relu)), "takes the value of -1"),
    "an edge to itself": (
        lambda: TopologicalVisitor(((), (1,)), AccFetch(), Compute(ef.relu)),
        r"cycle: 1 Compute\(relu\) -> 1",
    ),
    "a long cycle": (
        lambda: TopologicalVisitor(
            ((), (3,), (1,), (2,)), AccFetch(), *[Compute(f) for f in (ef.relu, ef.tanh, ef.exp)]
        ),
        r"1 Compute\(relu\) -> 3 Compute\(exp\) -> 2 Compute\(tanh\) -> 1 Compute\(relu\)",
    ),
    "no function": (lambda: Compute(None), "None is none"),
    "an unknown name": (lambda: Compute("rellu"), "'rellu' is none"),
    "a module": (lambda: Compute(torch.nn.ReLU()), r"ReLU\(\) is none"),
    "math's function": (lambda: Compute(__import__("math").sqrt), "sqrt is none"),
    "an unknown parameter": (lambda: Compute(ef.clip, low=0.0), "clip.. has no parameter 'low'"),
    "any number of values": (lambda: Compute(any_number), r"any_number cannot be inlined: its parameter \*values"),
    "a tensor for a parameter": (lambda: Compute(ef.clip, min=WEIGHT), "further of Compute must be numbers"),
    "a default that is none": (lambda: Compute(ef.clip, min=("low", "0")), "further of Compute must be numbers"),
    "a partial with values": (lambda: Compute(partial(ef.clip, 1.0)), "holds its arguments by name"),
    "a number for a name": (lambda: RowBroadcast(1), "name of RowBroadcast must be a string, not 1"),
    "a tensor for a name": (lambda: AuxLoad(WEIGHT), r"name of AuxLoad must be a string, not tensor"),
    "a tensor for a default": (lambda: RowBroadcast("x", WEIGHT), "default of RowBroadcast must be a number"),
    "a number first": (lambda: ScalarBroadcast(2.0), "name of ScalarBroadcast must be a string"),
    "values for fewer names": (lambda: ScalarBroadcast(("x", "y"), (1.0,)), "one for each name"),
    "values for no name": (lambda: ScalarBroadcast(value=(1.0,)), "one for each name"),
    "no names": (lambda: ScalarBroadcast(()), "must be a string, or a tuple of strings"),
    "a word for an identity": (
        lambda: ScalarReduction("x", identity="0"),
        "identity of ScalarReduction must be a number",
    ),
    "strides of two": (lambda: ScalarReduction("x", stride=(0, 0)), r"strides of ScalarReduction are \(0, 0, dL\)"),
    "no reduction": (
        lambda: ScalarReduction("x", functional.multiplies),
        "function of ScalarReduction must be a reduction, or one of plus, .*, not mul",
    ),
    "a name that is no name": (lambda: run(adds(AuxLoad("1st")), **{"1st": 1.0}), "'1st' is no name"),
    "an operand called accum": (lambda: run(adds(AuxLoad("accum"))), "'accum' is no name for an operand"),
    "two defaults for a null pointer": (
        lambda: run(EVT(Compute(ef.mul), RowBroadcast("x", 1.0), adds(RowBroadcast("x", 2.0)))),
        "two nodes named 'x' have different defaults for a null pointer, 1 and 2",
    ),
    "a number for a pointer": (
        lambda: run(adds(RowBroadcast("x", 1.0)), x_ptr=0.0),
        r"a pointer of RowBroadcast\(x = 1\) must be a tensor, or None where it is null, not 0.0",
    ),
    "a row by a column's strides": (
        lambda: run(adds(RowBroadcast("x")), x=WEIGHT, dX=(1, 0, 0)),
        r"the strides of RowBroadcast\(x\) are \(0, dN, dL\), and cannot be \(1, 0, 0\)",
    ),
    "a column by a row's strides": (
        lambda: run(adds(ColBroadcast("x")), x=WEIGHT, dX=(0, 1, 0)),
        r"the strides of ColBroadcast\(x\) are \(dM, 0, dL\)",
    ),
    "a number by a row's strides": (
        lambda: run(adds(ScalarBroadcast("x")), x=WEIGHT, dX=(0, 1, 0)),
        r"the strides of ScalarBroadcast\(x\) are \(0, 0, dL\)",
    ),
    "a word for k": (lambda: fusion.LinCombTopKSoftmaxCol("2"), "k must be 1, 2, 3 or 4, got '2'"),
    "true for k": (lambda: fusion.LinCombTopKSoftmaxCol(True), "k must be 1, 2, 3 or 4, got True"),
    "a list for k": (lambda: fusion.LinCombTopKSoftmaxCol([2]), r"k must be 1, 2, 3 or 4, got \[2\]"),
    "a word for a mask": (lambda: fusion.LinCombPerRowBiasEltActAux(ef.relu, mask="no"), "mask must be True or False"),
    "a word for an element": (
        lambda: fusion.ScaledLinCombPerRowBiasEltAct(ef.relu, "fp8"),
        "element must be a torch dtype that can be stored, got 'fp8'",
    ),
    "a word for an aux element": (
        lambda: fusion.ScaledLinCombPerColBiasEltActAmaxAux(ef.relu, torch.float16, "fp8"),
        "element must be a torch dtype that can be stored, got 'fp8'",
    ),
    "an output by name": (lambda: run(adds(SrcFetch()), C=1.0, D=WEIGHT), "'D' is an output .* out="),
    "one name for two things": (
        lambda: run(EVT(AuxStore("x"), adds(AuxLoad("x"))), x=1.0),
        "'x' is an output, and also",
    ),
    "two stores of one name": (
        lambda: run(EVT(AuxStore("x"), EVT(AuxStore("x"), AccFetch()))),
        "'x' is an output, and also",
    ),
    "a captured tensor": (
        lambda: run(EVT(Compute(lambda x: x + WEIGHT), AccFetch())),
        "'WEIGHT' is a tensor from outside",
    ),
    "arithmetic on masks": (
        lambda: run(EVT(Compute(ef.add), *[EVT(Compute(ef.gt), AccFetch(), ScalarBroadcast(value=0.0))] * 2)),
        "add does not work on masks",
    ),
    "an output of a number": (lambda: run(ScalarBroadcast("x"), x=1.0), "the output 'D' is a host number"),
    "no tree": (lambda: to_tree(3), "a function or its source|is a Python function"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_the_nodes_name(name: str) -> None:
    mistake, sentence = MISTAKES[name]
    with pytest.raises(ef.errors.EpifuseError, match=sentence):
        mistake()


def test_nothing_is_written_before_a_mistake_is_found() -> None:
    d, total = torch.full((M, N), 7.0), torch.full((), 7.0)
    tree = EVT(Compute(functional.Identity), EVT(ScalarReduction("total"), adds(RowBroadcast("bias"))))
    with pytest.raises(ef.errors.EpilogueTypeError):
        run(tree, bias=torch.ones(M, 1), out={"D": d, "total": total})
    assert torch.equal(d, torch.full((M, N), 7.0))
    assert total == 7.0


def test_a_tree_is_copied_and_pickled_also_when_it_was_read() -> None:
    tree = EVT(Compute(functional.Clamp), adds(SrcFetch()))
    before = tree.__epifuse__()
    for again in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert again == tree
        assert str(again.__epifuse__().graph) == str(before.graph)
