"""Arguments nested as CUTLASS nests them: what each node takes, and what is said where a part does not fit."""

from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError
from epifuse.forms.evt import (
    EVT,
    AccFetch,
    AuxLoad,
    AuxStore,
    ColBroadcast,
    ColReduction,
    Compute,
    RowBroadcast,
    RowReduction,
    ScalarBroadcast,
    ScalarReduction,
    SplitTreeVisitor,
    SrcFetch,
    TopologicalVisitor,
    Visitor,
)
from epifuse.forms.evt import functional as fn

L, M, N = 2, 5, 7


def alone(node: Visitor) -> Visitor:
    return EVT(Compute(fn.plus), AccFetch(), node)


def part(node: Visitor, given: Any) -> Any:
    """What a node's own name is bound to."""
    tree = (
        node if not isinstance(node, (AuxStore, ScalarReduction, RowReduction, ColReduction)) else EVT(node, AccFetch())
    )
    nested = ((), given) if tree is not node else given
    return tree.arguments(nested)["x"]


MATRIX, ROW, COLUMN = torch.randn(M, N), torch.randn(N), torch.randn(M)
NODES: dict[str, tuple[Visitor, Any, Any]] = {
    "a value": (ScalarBroadcast("x"), ((2.0,),), 2.0),
    "a value in plain": (ScalarBroadcast("x"), 2.0, 2.0),
    "a pointer before the value": (ScalarBroadcast("x"), ((2.0,), (ROW[:1],)), ROW[:1]),
    "a null pointer": (ScalarBroadcast("x"), ((2.0,), (None,)), 2.0),
    "the default": (ScalarBroadcast("x", 3.0), ((), ()), 3.0),
    "one a batch": (ScalarBroadcast("x"), ((), (ROW[:L],), ((0, 0, 1),)), ROW[:L].reshape(L, 1, 1)),
    "a row": (RowBroadcast("x"), (ROW, 0.0, (0, 1, 0)), ROW.reshape(1, N)),
    "a row of two dims": (RowBroadcast("x"), (ROW[None], 0.0, (0, 1, 0)), ROW[None]),
    "rows": (RowBroadcast("x"), (MATRIX, 0.0, (0, 1, N)), MATRIX[:, None]),
    "a row by stride 0 is a number": (RowBroadcast("x"), (ROW[:1], 0.0, (0, 0, 0)), ROW[0]),
    "a null row": (RowBroadcast("x"), (None, 1.5, (0, 1, 0)), 1.5),
    "a null row with its own default": (RowBroadcast("x", 2.5), (None,), 2.5),
    "a column": (ColBroadcast("x"), (COLUMN, 0, (1, 0, 0)), COLUMN[:, None]),
    "a column apart": (ColBroadcast("x"), (MATRIX[:, 0], 0, (N, 0, 0)), MATRIX[:, :1]),
    "columns": (ColBroadcast("x"), (MATRIX.t(), 0, (N, 0, 1)), MATRIX.t()[:, :, None]),
    "a matrix": (AuxLoad("x"), (MATRIX, 0.0, (N, 1, 0)), MATRIX),
    "a matrix with a batch stride": (AuxLoad("x"), (MATRIX, 0.0, (N, 1, M * N)), MATRIX),
    "matrices": (AuxLoad("x"), (MATRIX.expand(L, M, N), None, (N, 1, 0)), MATRIX.expand(L, M, N)),
    "a matrix alone": (AuxLoad("x"), MATRIX, MATRIX),
    "a store": (AuxStore("x"), (MATRIX, (N, 1, 0)), MATRIX),
    "a number": (ScalarReduction("x"), (ROW[0], 0, (0, 0, 0)), ROW[0]),
    "a reduced row": (RowReduction("x"), (ROW, 0, (0, 1, 0)), ROW),
    "a reduced column": (ColReduction("x"), (COLUMN,), COLUMN),
    "a largest value": (ScalarReduction("x", ef.amax, identity=0.0), (ROW[0], 0.0), ROW[0]),
    "braces": (ColBroadcast("x", 1.0), {}, 1.0),
}


@pytest.mark.parametrize("name", NODES)
def test_what_a_node_takes(name: str) -> None:
    node, given, want = NODES[name]
    got = part(node, given)
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.shape, got.data_ptr()) == (want.shape, want.data_ptr())
        assert [s for s, e in zip(got.stride(), got.shape, strict=True) if e > 1] == [
            s for s, e in zip(want.stride(), want.shape, strict=True) if e > 1
        ]
    else:
        assert got == want


WRONG: dict[str, tuple[Visitor, Any, str]] = {
    "a number for a tree": (alone(RowBroadcast("x")), 1.0, "tree_arguments"),
    "a child too few": (alone(RowBroadcast("x")), ((), ((ROW,),)), "tree_arguments"),
    "a child too many": (alone(RowBroadcast("x")), ((), (ROW,), (), ()), "tree_arguments"),
    "something for AccFetch": (alone(RowBroadcast("x")), ((1.0,), (ROW,), ()), "tree_arguments"),
    "something for plus": (alone(RowBroadcast("x")), ((), (ROW,), (1.0,)), "tree_arguments"),
    "something for SrcFetch": (alone(SrcFetch()), ((), (MATRIX,), ()), "tree_arguments"),
    "something for a literal": (alone(ScalarBroadcast(value=1.0)), ((), ((2.0,),), ()), "tree_arguments"),
    "clamp with one bound": (EVT(Compute(fn.Clamp), AccFetch()), ((), (0.5,)), "tree_arguments"),
    "clamp without": (EVT(Compute(fn.Clamp), AccFetch()), ((), ()), "tree_arguments"),
    "two values for one scalar": (alone(ScalarBroadcast("x")), ((), ((1.0, 2.0),), ()), "tree_arguments"),
    "four fields of a row": (alone(RowBroadcast("x")), ((), (ROW, 0, (0, 1, 0), 1), ()), "tree_arguments"),
    "a null row": (alone(RowBroadcast("x")), ((), (None, None, (0, 1, 0)), ()), "tree_null"),
    "a null scalar": (alone(ScalarBroadcast("x")), ((), ((None,), (None,)), ()), "tree_null"),
    "a null store": (EVT(AuxStore("x"), AccFetch()), ((), (None,)), "tree_null"),
    "a null result": (EVT(ScalarReduction("x"), AccFetch()), ((), (None, 0, (0, 0, 0))), "tree_null"),
    "another stride": (alone(RowBroadcast("x")), ((), (ROW, 0, (0, 2, 0)), ()), "tree_pointer"),
    "a column's stride": (alone(RowBroadcast("x")), ((), (MATRIX, 0, (1, 0, 0)), ()), "tree_stride"),
    "a number for a pointer": (alone(RowBroadcast("x", 1.0)), ((), (0, 1.0, (0, 1, 0)), ()), "tree_field"),
    "a number for a pointer to a scalar": (alone(ScalarBroadcast("x", 1.0)), ((), ((), (0,)), ()), "tree_field"),
    "a number for a result": (EVT(ScalarReduction("x"), AccFetch()), ((), (0.0,)), "tree_field"),
    "a word for an identity": (
        EVT(ScalarReduction("x", ef.amax), AccFetch()),
        ((), (ROW[0], "0", (0, 0, 0))),
        "tree_arguments",
    ),
    "two strides": (alone(RowBroadcast("x")), ((), (ROW, 0, (0, 1)), ()), "tree_pointer"),
    "a stride of another reduction": (
        EVT(RowReduction("x"), AccFetch()),
        ((), (ROW, 0, (1, 0, 0))),
        "tree_stride",
    ),
    "an identity that counts": (EVT(RowReduction("x"), AccFetch()), ((), (ROW, 1.0, (0, 1, 0))), "tree_identity"),
    "a sum of each batch of a node that sums all": (
        EVT(ScalarReduction("x"), AccFetch()),
        ((), (ROW[:2], 0, (0, 0, 1))),
        "tree_batches",
    ),
    "a sum of all of a node that sums each batch": (
        EVT(ScalarReduction("x", stride=(0, 0, 1)), AccFetch()),
        ((), (ROW[:2], 0, (0, 0, 0))),
        "tree_batches",
    ),
    "another stride of a result": (EVT(RowReduction("x"), AccFetch()), ((), (ROW, 0, (0, 3, 0))), "tree_pointer"),
    "an edge's node": (
        TopologicalVisitor(((), (0,)), AccFetch(), Compute(fn.ReLU)),
        ((), (1.0,)),
        "tree_arguments",
    ),
    "a topological visitor has no own": (
        TopologicalVisitor(((), (0,)), AccFetch(), Compute(fn.ReLU)),
        ((), (), ()),
        "tree_arguments",
    ),
    "a split tree of two": (SplitTreeVisitor(AccFetch(), AccFetch()), ((),), "tree_arguments"),
    "one name, two values": (
        alone(EVT(Compute(fn.plus), ScalarBroadcast("x"), ScalarBroadcast("x"))),
        ((), (((1.0,),), ((2.0,),), ()), ()),
        "tree_argument_twice",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_that_does_not_fit_is_refused_with_its_node(name: str) -> None:
    tree, nested, key = WRONG[name]
    with pytest.raises(ef.errors.EpifuseError) as caught:
        tree.arguments(nested)
    assert caught.value.key == key, str(caught.value)
    assert caught.value.loc is not None
    assert caught.value.loc.text in str(tree).splitlines()


def test_a_whole_tree() -> None:
    tree = EVT(
        Compute(fn.Clamp), EVT(Compute(fn.homogeneous_multiply_add), ScalarBroadcast("beta"), SrcFetch(), AccFetch())
    )
    got = tree.arguments(((((2.0,), (None,)), (), (), ()), (-1.0, 1.0)))
    assert got == {"beta": 2.0, "lower_bound": -1.0, "upper_bound": 1.0}


def test_what_is_missing_is_missed_by_name() -> None:
    a, b = torch.randn(M, 3), torch.randn(3, N)
    with pytest.raises(ef.errors.ArgumentError, match="Argument x is not provided"):
        ef.gemm(a, b, epilogue=alone(RowBroadcast("x")))
    with pytest.raises(ef.errors.ArgumentError, match="Unexpected argument 'y'"):
        ef.gemm(a, b, epilogue=alone(RowBroadcast("x")), x=ROW, y=ROW)
    with pytest.raises(ef.errors.ArgumentError, match="Argument D is not provided"):
        ef.EpilogueArguments(alone(RowBroadcast("x")), x=ROW)


def test_hints_of_transport_stay_on_what_they_are_of() -> None:
    hinted = ef.Load(COLUMN, via="tma")
    got = part(ColBroadcast("x"), (hinted, 0, (1, 0, 0)))
    assert (got.via, tuple(got.tensor.shape)) == ("tma", (M, 1))


def test_the_size_of_the_workspace() -> None:
    a, b = torch.randn(M, 3), torch.randn(3, N)
    tree = EVT(ScalarReduction("x"), AccFetch())
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(tree, x=torch.empty(())))
    assert tree.get_workspace_size(args) == ef.get_kernels(args)[0].get_workspace_size(args)


def test_strides_leave_the_rest_of_a_hint_as_it_is() -> None:
    aux, D = torch.ones(M, N), torch.empty(M, N)
    tree = EVT(Compute(ef.relu), EVT(AuxStore("aux"), AccFetch()))
    epilogue = ef.EpilogueArguments(tree, aux=ef.Store(aux, accumulate=True), dAux=(N, 1, 0), D=D)
    args = ef.GemmArguments(torch.ones(M, 3), torch.ones(3, N), epilogue=epilogue)
    ef.get_kernels(args)[0].run(args)
    assert torch.equal(aux, torch.full((M, N), 4.0))


def test_one_operand_has_one_tensor() -> None:
    tree = alone(RowBroadcast("bias"))
    with pytest.raises(ArgumentError, match="the argument 'bias' is given twice"):
        ef.gemm(torch.ones(M, 3), torch.ones(3, N), epilogue=tree, bias=torch.ones(N), bias_ptr=torch.ones(N))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("hint", [lambda tensor: tensor, ef.Load], ids=["a tensor", "a hint"])
def test_an_operand_may_be_given_to_each_of_its_nodes(hint: Any, device: str) -> None:
    tree = EVT(Compute(fn.plus), alone(RowBroadcast("bias")), RowBroadcast("bias"))
    bias, other = (torch.ones(N, device=device) for _ in range(2))

    def nested(*pointers: torch.Tensor) -> Any:
        first, second = ((hint(pointer), 0, (0, 1, 0)) for pointer in pointers)
        return (((), first, ()), second, ())

    assert list(tree.arguments(nested(bias, bias))) == ["bias"]
    for pointers in ((bias, other), (bias, bias[1:])):
        with pytest.raises(ArgumentError, match="the argument 'bias' is given twice, and differently"):
            tree.arguments(nested(*pointers))


@pytest.mark.parametrize("shape", [(1, M, 1), (1, 1, M, 1)])
def test_a_batch_of_one_is_reduced_over_like_none(shape: tuple[int, ...]) -> None:
    tree = EVT(ScalarReduction("total", fn.plus), alone(ColBroadcast("bias")))
    total = ef.gemm(torch.ones(M, 3), torch.ones(3, N), epilogue=tree, bias=torch.ones(shape))
    assert total.item() == 4 * M * N
