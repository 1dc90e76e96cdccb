"""Each node against PyTorch, alone or in the smallest tree that holds it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.forms.evt import (
    EVT,
    AccFetch,
    AuxLoad,
    AuxStore,
    ColBroadcast,
    ColReduction,
    Compute,
    Operand,
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
from epifuse.tools.testing import assert_close_to_reference
from tests.evt.helpers import product

L, M, N, K = 3, 24, 40, 16


def inputs(batch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    lead = (batch,) if batch else ()
    return torch.randn(*lead, M, K) / 4, torch.randn(*lead, K, N)


def run(tree: Visitor, a: torch.Tensor, b: torch.Tensor, **named: Any) -> dict[str, torch.Tensor]:
    got = ef.gemm(a, b, epilogue=tree, **named)
    return dict(zip(got.names, got, strict=True)) if isinstance(got, tuple) else {"D": got}


def added(node: Visitor) -> Visitor:
    return EVT(Compute(fn.plus), AccFetch(), node)


LOADS: dict[str, tuple[Visitor, tuple[int, ...]]] = {
    "source": (SrcFetch(), (M, N)),
    "source, batched": (SrcFetch(), (L, M, N)),
    "aux": (AuxLoad("C"), (M, N)),
    "row": (RowBroadcast("C"), (N,)),
    "row of two dims": (RowBroadcast("C"), (1, N)),
    "row, batched": (RowBroadcast("C"), (L, 1, N)),
    "column": (ColBroadcast("C"), (M, 1)),
    "column, batched": (ColBroadcast("C"), (L, M, 1)),
    "scalar": (ScalarBroadcast("C"), ()),
    "scalar, batched": (ScalarBroadcast("C"), (L, 1, 1)),
    "scalar as row": (RowBroadcast("C"), (1,)),
    "anything": (Operand("C"), (M, 1)),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_load(name: str) -> None:
    node, shape = LOADS[name]
    (a, b), value = inputs(L), torch.randn(shape)
    assert_close_to_reference(run(added(node), a, b, C=value), lambda accum, C: accum + C, product(a, b), C=value)


def test_a_column_may_be_one_dim_even_where_a_row_would_fit() -> None:
    a, b, value = torch.randn(N, K), torch.randn(K, N), torch.randn(N)
    got = run(added(ColBroadcast("C")), a, b, C=value)
    assert_close_to_reference(got, lambda accum, C: accum + C[:, None], product(a, b), C=value)


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        (SrcFetch(), (M + 1, N)),
        (RowBroadcast("C"), (M, 1)),
        (RowBroadcast("C"), (M, N)),
        (ColBroadcast("C"), (1, N)),
        (ColBroadcast("C"), (M, N)),
        (ScalarBroadcast("C"), (N,)),
        (ScalarBroadcast("C"), (M, 1)),
    ],
    ids=str,
)
def test_a_wrong_operand_shape_is_refused_on_the_nodes_line(node: Visitor, shape: tuple[int, ...]) -> None:
    with pytest.raises(ef.errors.EpilogueTypeError) as caught:
        run(added(node), *inputs(), C=torch.ones(shape))
    assert caught.value.loc is not None
    assert caught.value.loc.text.endswith(node.label)


def test_null_is_the_value_given_for_it() -> None:
    a, b = inputs()
    tree = added(EVT(Compute(fn.multiplies), RowBroadcast("row", 2.0), ColBroadcast("column", 0.5)))
    plain = run(AccFetch(), a, b)["D"]
    assert torch.equal(run(tree, a, b)["D"], plain + 1)
    assert torch.equal(run(tree, a, b, row=None, column=4.0)["D"], plain + 8)


def test_several_scalars_are_joined() -> None:
    a, b = inputs()
    joined = ScalarBroadcast(("x", "y", "z"), (3.0, None, 0.5), fn.plus)
    got = run(EVT(Compute(fn.multiplies), joined, AccFetch()), a, b, y=torch.tensor([2.0]))
    assert_close_to_reference(got, lambda accum: accum * 5.5, product(a, b))


def test_a_scalar_without_a_name_is_a_literal() -> None:
    tree = EVT(Compute(fn.multiplies), ScalarBroadcast(value=2.0), AccFetch())
    assert tree.__epifuse__().parameters == ()
    a, b = inputs()
    digests = {
        ef.explain(ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(form, {}))).plan.digest  # type: ignore[union-attr]
        for form in (tree, "lambda accum: 2.0 * accum")
    }
    assert len(digests) == 1


# --- compute -----------------------------------------------------------------------------------------------------

HALF = 0.5


def halved(x: Any) -> Any:
    return x * HALF


FUNCTIONS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "primitive": (ef.tanh, torch.tanh),
    "by name": ("relu", torch.relu),
    "activation": (ef.silu, F.silu),
    "torch's": (torch.sigmoid, torch.sigmoid),
    "a function": (halved, lambda x: x * 0.5),
    "a lambda": (lambda x: ef.exp(-x * x), lambda x: torch.exp(-x * x)),
    "a macro": (ef.softmax, lambda x: x.softmax(-1)),
    "square": (fn.magnitude_squared, torch.square),
    "filter": (partial(fn.elementwise_filter, value_to_filter=0.0, filtered_value=1.0), lambda x: x),
    "static": (partial(ef.amax, dim=-1, keepdim=True), lambda x: x.amax(-1, True).expand(M, N)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name: str) -> None:
    function, formula = FUNCTIONS[name]
    a, b = inputs()
    tree = EVT(Compute(ef.add), EVT(Compute(function), AccFetch()), EVT(Compute(ef.mul), AccFetch(), Operand("zero")))
    assert_close_to_reference(run(tree, a, b, zero=0.0), lambda accum: formula(accum) + 0 * accum, product(a, b))


def test_a_captured_number_is_read_at_each_call() -> None:
    global HALF
    a, b = inputs()
    tree = EVT(Compute(halved), AccFetch())
    first = run(tree, a, b)["D"]
    try:
        HALF = 2.0
        assert torch.equal(run(tree, a, b)["D"], 4 * first)
    finally:
        HALF = 0.5


def test_arguments_of_a_function_are_operands_or_literals() -> None:
    a, b = inputs()
    tree = EVT(Compute(fn.Clamp, max=0.25), AccFetch())
    assert str(tree).splitlines()[0] == "Compute(clip, min=lower_bound, max=0.25)"
    got = run(tree, a, b, lower_bound=-0.5)
    assert_close_to_reference(got, lambda accum: accum.clamp(-0.5, 0.25), product(a, b))
    assert torch.equal(run(EVT(Compute(fn.LeakyReLU), AccFetch()), a, b)["D"], F.leaky_relu(run(AccFetch(), a, b)["D"]))


def test_an_error_inside_a_function_shows_its_line_and_the_tree() -> None:
    def loops(x: Any) -> Any:
        for _ in range(3):
            x = x * x
        return x

    with pytest.raises(ef.errors.EpilogueSyntaxError) as caught:
        run(EVT(Compute(loops), AccFetch()), *inputs())
    assert "for _ in range(3)" in str(caught.value)
    assert "called from\n  <visitor tree>:1\n    Compute(loops)" in str(caught.value)


# --- stores ------------------------------------------------------------------------------------------------------


def test_a_store_hands_on_what_it_stores() -> None:
    a, b = inputs()
    tree = EVT(Compute(fn.ReLU), EVT(AuxStore("before"), added(SrcFetch())))
    c = torch.randn(M, N)
    got = run(tree, a, b, C=c)
    assert list(got) == ["D", "before"]
    assert_close_to_reference(got, lambda accum, C: (F.relu(accum + C), accum + C), product(a, b), C=c)


REDUCTIONS: dict[str, tuple[Visitor, Callable[..., Any]]] = {
    "sum": (ScalarReduction("r", fn.plus, fn.atomic_add), lambda x: x.sum()),
    "sum of each batch": (ScalarReduction("r", fn.plus, stride=(0, 0, 1)), lambda x: x.sum((1, 2))),
    "absmax": (ScalarReduction("r", fn.maximum_absolute_value_reduction), lambda x: x.abs().amax()),
    "norm": (ScalarReduction("r", ef.norm), lambda x: x.norm()),
    "row sum": (RowReduction("r", fn.plus), lambda x: x.sum((0, 1))),
    "row sum of each batch": (RowReduction("r", fn.plus, stride=(0, 1, N)), lambda x: x.sum(1)),
    "row max": (RowReduction("r", ef.maximum, fn.atomic_maximum), lambda x: x.amax((0, 1))),
    "column sum": (ColReduction("r", "add"), lambda x: x.sum((0, 2))),
    "column sum of each batch": (ColReduction("r", stride=(1, 0, M)), lambda x: x.sum(2)),
    "column min": (ColReduction("r", ef.minimum), lambda x: x.amin((0, 2))),
    "squares": (ColReduction("r", fn.square_and_plus), lambda x: (x * x).sum((0, 2))),
    "max of nothing below": (ColReduction("r", ef.maximum, identity=3.0), lambda x: x.amax((0, 2)).clamp(min=3.0)),
    "neutral": (ScalarReduction("r", ef.maximum, identity=-math.inf), lambda x: x.amax()),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction(name: str) -> None:
    node, formula = REDUCTIONS[name]
    (a, b), c = inputs(L), torch.randn(L, M, N)
    got = run(EVT(Compute(fn.Identity), EVT(node, added(SrcFetch()))), a, b, C=c)
    assert_close_to_reference(got, lambda accum, C: (accum + C, formula(accum + C)), product(a, b), C=c)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_of_a_product_without_batch(name: str) -> None:
    node, formula = REDUCTIONS[name]
    a, b = inputs()
    got = run(EVT(node, AccFetch()), a, b)
    want = formula(product(a, b).reshape(1, M, N))
    assert_close_to_reference(got, lambda accum: want, product(a, b))


SPREAD: dict[str, Any] = {
    "row": (RowBroadcast("x"), (N,)),
    "column": (ColBroadcast("x"), (M, 1)),
    "number": (ScalarBroadcast("x"), ()),
    "batch": (ScalarBroadcast("x"), (L, 1, 1)),
}


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("function", [ef.sum, ef.mean, ef.amax, ef.absmax, ef.norm, ef.sum_of_squares, ef.logsumexp])
@pytest.mark.parametrize("kind", [ScalarReduction, RowReduction, ColReduction])
def test_a_constant_value_is_reduced_once_per_element(spread: str, function: Any, kind: Any) -> None:
    """A visitor tree's values are whole tiles; the reduction is then known, and no tile is reduced."""
    node, shape = SPREAD[spread]
    (a, b), x = inputs(L), torch.randn(shape)
    dims = {"ScalarReduction": (0, 1, 2), "RowReduction": (0, 1), "ColReduction": (0, 2)}[kind.__name__]
    got = run(EVT(kind("r", function), node), a, b, x=x)
    assert_close_to_reference(got, lambda accum, x: function(x.expand(L, M, N), dim=dims), product(a, b), x=x)


def test_counting_masks_that_do_not_vary() -> None:
    a, b = inputs()
    tree = EVT(RowReduction("r", ef.sum), EVT(Compute(ef.gt), RowBroadcast("x"), ScalarBroadcast(value=0.0)))
    x = torch.randn(N)
    assert torch.equal(run(tree, a, b, x=x)["D"], M * (x > 0))


# --- joining -----------------------------------------------------------------------------------------------------


def test_the_diamond_of_figure_5() -> None:
    a, b = inputs()
    nodes = (AccFetch(), Compute(fn.ReLU), Compute(fn.Sigmoid), Compute(fn.plus))
    got = run(TopologicalVisitor(((), (0,), (0,), (1, 2)), *nodes), a, b)
    assert_close_to_reference(got, lambda accum: F.relu(accum) + torch.sigmoid(accum), product(a, b))
    swapped = TopologicalVisitor(((), (0,), (0,), (2, 1)), nodes[0], nodes[2], nodes[1], nodes[3])
    assert torch.equal(run(swapped, a, b)["D"], got["D"])


def test_visitors_nest() -> None:
    a, b, c = *inputs(), torch.randn(M, N)
    inner = TopologicalVisitor(((), (0, 0)), added(SrcFetch()), Compute(fn.multiplies))
    tree = TopologicalVisitor(((), (0,), (0, 1)), inner, Compute(fn.Tanh), Compute(fn.minus))
    square = lambda accum, C: (accum + C) * (accum + C)  # noqa: E731
    assert_close_to_reference(
        run(tree, a, b, C=c), lambda accum, C: square(accum, C) - torch.tanh(square(accum, C)), product(a, b), C=c
    )


def test_a_split_tree_hands_one_value_to_all() -> None:
    a, b, c = *inputs(), torch.randn(M, N)
    tree = SplitTreeVisitor(
        added(SrcFetch()), EVT(Compute(fn.ReLU), AccFetch()), EVT(AuxStore("x"), EVT(Compute(fn.Tanh), AccFetch()))
    )
    got = run(tree, a, b, C=c)
    assert_close_to_reference(got, lambda accum, C: (F.relu(accum + C), torch.tanh(accum + C)), product(a, b), C=c)


def test_an_operand_named_twice_is_one_operand() -> None:
    tree = EVT(
        Compute(fn.multiplies), ScalarBroadcast("alpha"), EVT(Compute(fn.plus), ScalarBroadcast("alpha"), AccFetch())
    )
    assert tree.__epifuse__().parameters == ("alpha",)
    a, b = inputs()
    assert_close_to_reference(run(tree, a, b, alpha=2.0), lambda accum: 2 * (2 + accum), product(a, b))


@pytest.mark.parametrize(("function", "held"), [(F.gelu, {"approximate": "tanh"}), (ef.softmax, {"dim": -1})])
def test_a_parameter_that_must_be_known_is_a_literal(function: Callable[..., Any], held: dict[str, Any]) -> None:
    for operator in (Compute(function, **held), Compute(partial(function, **held))):
        tree = EVT(operator, AccFetch())
        assert tree.__epifuse__().parameters == ()
        a, b = inputs()
        torch.testing.assert_close(run(tree, a, b)["D"], function(a @ b, **held))


@pytest.mark.parametrize("held", [{"low": -1.0}, {"low": "lower"}, {"x": 2.0, "low": "lower"}])
def test_inputs_are_the_parameters_that_are_not_held(held: dict[str, Any]) -> None:
    def function(x: Any, low: Any, y: Any) -> Any:
        return ef.maximum(x, low) - y

    a, b = inputs()
    tree = EVT(Compute(function, **held), *[AccFetch()] * (3 - len(held)))
    first = torch.full((M, N), 2.0) if "x" in held else a @ b
    given = {"lower": -1.0} if "lower" in held.values() else {}
    torch.testing.assert_close(run(tree, a, b, **given)["D"], first.clamp(min=-1.0) - a @ b)


@pytest.mark.parametrize("default", [1.5, math.inf, math.nan])
def test_any_number_is_a_default(default: float) -> None:
    tree = EVT(Compute(fn.plus), RowBroadcast("x", default), added(RowBroadcast("x", float(str(default)))))
    a, b = inputs()
    for given in ({}, tree.arguments(((None,), ((), (None,), ()), ()))):
        got = run(tree, a, b, **given)["D"]
        torch.testing.assert_close(got, a @ b + default + default, equal_nan=True)


def test_nodes_are_values() -> None:
    assert EVT(Compute(ef.add), AccFetch(), SrcFetch()) == EVT(Compute("add"), AccFetch(), SrcFetch())
    assert ScalarReduction("x", fn.plus) == ScalarReduction("x", ef.sum)
    assert AuxLoad("x") != AuxLoad("y")
    assert len({RowBroadcast("x"), ColBroadcast("x"), RowBroadcast("x")}) == 2


def test_a_tree_as_deep_as_an_epilogue_is_long() -> None:
    tree: Visitor = AccFetch()
    for _ in range(3000):
        tree = EVT(Compute(ef.relu), tree)
    assert len(str(tree).splitlines()) == 3001
    assert [node.op for node in tree.__epifuse__().graph.nodes][-2:] == ["call", "call"]
    assert len(tree.__epifuse__().graph.nodes) == 3001
