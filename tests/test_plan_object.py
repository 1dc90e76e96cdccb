"""The plan object of the older Python interface."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import EpifuseError, UnsupportedError
from epifuse.forms.gemm_plan import Gemm, LayoutType, TileDescription, trace

M, N, K = 33, 40, 16
ROW, COLUMN = LayoutType.RowMajor, LayoutType.ColumnMajor


def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)


@pytest.mark.parametrize(
    ("activation", "want"),
    [
        (ef.relu, torch.relu),
        ("tanh", torch.tanh),
        ((ef.leaky_relu, 0.1), lambda x: torch.nn.functional.leaky_relu(x, 0.1)),
        (torch.sigmoid, torch.sigmoid),
        ("identity", lambda x: x),
    ],
    ids=["function", "name", "with a number", "torch's", "identity"],
)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_an_activation(activation: Any, want: Callable[[torch.Tensor], torch.Tensor], beta: float) -> None:
    a, b, c = matrices()
    plan = Gemm(element=torch.float32, layout=ROW)
    plan.activation = activation
    assert plan.activation is activation
    source = c if beta else torch.full_like(c, torch.nan)
    torch.testing.assert_close(plan.run(a, b, source, alpha=2.0, beta=beta), want(2.0 * a @ b + beta * c))


def test_tensors_and_scalars_of_the_constructor() -> None:
    a, b, c = matrices()
    d = torch.empty(M, N)
    plan = Gemm(a, b, c, d, alpha=3.0, beta=-1.0)
    assert plan.run() is d
    torch.testing.assert_close(d, 3.0 * a @ b - c)
    torch.testing.assert_close(plan.run(alpha=1.0), a @ b - c)
    torch.testing.assert_close(plan.run(A=-a, beta=torch.tensor([2.0])), -3.0 * a @ b + 2.0 * c)


def test_each_matrix_has_a_dtype_and_a_layout() -> None:
    plan = Gemm(element=torch.bfloat16, layout=ROW, layout_B=COLUMN, element_C=torch.float32, element_D=torch.float32)
    a, b, c = matrices()
    a, b = a.bfloat16(), b.bfloat16().mT.contiguous().mT
    d = plan.run(a, b, c, beta=1.0)
    assert d.dtype == torch.float32
    torch.testing.assert_close(d, a.float() @ b.float() + c)


def test_a_visitor() -> None:
    def epilogue(accum: Any, alpha: Any, C: Any, beta: Any, bias: Any) -> Any:
        F = alpha * accum + beta * C
        D = ef.relu(F + 1.0) + bias
        return D, F

    a, b, c = matrices()
    bias, f = torch.randn(M, 1), torch.empty(M, N)
    examples = {"accum": c, "alpha": 0.5, "C": c, "beta": 1.5, "bias": bias, "D": c, "F": f}
    plan = Gemm(element=torch.float32, layout=ROW)
    plan.epilogue_visitor = trace(epilogue, examples)
    assert "call relu" in str(plan.epilogue_visitor)
    d, _ = plan.run(a, b, visitor_args={"alpha": 0.5, "C": c, "beta": 1.5, "bias": bias, "F": f})
    torch.testing.assert_close(f, 0.5 * a @ b + 1.5 * c)
    torch.testing.assert_close(d, torch.relu(f + 1.0) + bias)
    again = plan.run(a, b, c, alpha=0.5, beta=1.5, visitor_args={"bias": bias})
    assert torch.equal(again.D, d)
    assert torch.equal(ef.gemm(a, b, epilogue=plan.epilogue_visitor, alpha=0.5, C=c, beta=1.5, bias=bias).D, d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float64])
def test_a_trace_is_typed_for_its_accumulator(dtype: torch.dtype) -> None:
    traced = trace("lambda accum: accum * 2", {"accum": torch.empty(2, M, N, dtype=dtype)})
    assert ("int32[l, m, n]" if dtype == torch.int32 else "float[l, m, n]") in str(traced)


def test_any_epilogue_is_a_visitor_and_an_activation_ends_it() -> None:
    a, b, c = matrices()
    plan = Gemm(element=torch.float32)
    plan.epilogue_visitor = ef.thread.LinearCombinationSilu(alpha=2.0, beta=1.0)
    torch.testing.assert_close(plan.run(a, b, c, alpha=1.0, beta=1.0), torch.nn.functional.silu(a @ b + c))
    plan.activation = ef.relu
    assert plan.epilogue_visitor is None
    torch.testing.assert_close(plan.run(a, b), torch.relu(a @ b))


@pytest.mark.parametrize(
    ("constructed", "at_run", "want"),
    [({}, {}, (2.0, 1.0)), ({"alpha": 3.0}, {}, (3.0, 1.0)), ({"alpha": 3.0}, {"alpha": 4.0, "beta": 5.0}, (4.0, 5.0))],
    ids=["the visitor's own", "the plan's", "the run's"],
)
def test_numbers_of_a_visitor(
    constructed: dict[str, float], at_run: dict[str, float], want: tuple[float, float]
) -> None:
    a, b, c = matrices()
    plan = Gemm(element=torch.float32, **constructed)
    plan.epilogue_visitor = ef.thread.LinearCombination(alpha=2.0, beta=1.0)
    alpha, beta = want
    torch.testing.assert_close(plan.run(a, b, c, **at_run), alpha * (a @ b) + beta * c)


def test_what_a_visitor_does_not_have_is_not_dropped() -> None:
    a, b, c = matrices()
    plan = Gemm(element=torch.float32)
    plan.epilogue_visitor = "lambda accum, C, alpha: accum * alpha + C"
    d = torch.empty(M, N)
    given = {"C": c, "alpha": 2.0, "D": d}
    assert plan.run(a, b, c, d, alpha=2.0, visitor_args=given) is d
    with pytest.raises(EpifuseError, match="the epilogue_visitor has no parameter 'beta'; it has C, alpha, D"):
        plan.run(a, b, c, d, beta=2.0, visitor_args=given)
    for named in ({"alpha": 3.0}, {"alpha": torch.tensor(2.0)}, {"C": c.clone()}):
        with pytest.raises(EpifuseError, match=r"Gemm\.run got the parameter '(alpha|C)' twice"):
            plan.run(a, b, **named, visitor_args=given)
    plan.epilogue_visitor = "lambda accum: accum * 2.0"
    torch.testing.assert_close(plan.run(a, b, c), 2 * (a @ b))


def test_print_module(capsys: pytest.CaptureFixture[str]) -> None:
    a, b, _ = matrices()
    plan = Gemm(element=torch.float32)
    plan.activation = ef.gelu
    plan.run(a, b, print_module=True)
    printed = capsys.readouterr().out
    assert "gelu" in printed
    assert "plan " in printed
    plan.run(a, b)
    assert capsys.readouterr().out == ""


def test_the_plan_and_the_function_are_one_plan() -> None:
    a, b, c = matrices()
    plan = Gemm(element=torch.float32)
    plan.activation = ef.relu
    args = plan.arguments({"A": a, "B": b, "C": c}, {"alpha": 2.0, "beta": 0.5})

    def function(accum: Any, C: Any, alpha: Any, beta: Any) -> Any:
        return ef.relu(alpha * accum + beta * C)

    given = {"C": c, "alpha": 2.0, "beta": 0.5}
    other = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function, given))
    one, two = ef.explain(args).plan, ef.explain(other).plan
    assert one is not None
    assert two is not None
    assert one.digest == two.digest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inside_a_compiled_function() -> None:
    a, b, _ = matrices()
    plan = Gemm(element=torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: plan.run(x * 2, b) + 1, backend="eager")
    torch.testing.assert_close(compiled(a), 2 * a @ b + 1)
    torch.compiler.reset()


# --- tiles ----------------------------------------------------------------------------------------------------------


def test_tiles_that_are_listed_are_honoured() -> None:
    a, b, _ = matrices()
    plan = Gemm(element=torch.float32, cc=0)
    tiles = plan.tile_descriptions()
    assert tiles
    for tile in tiles:
        plan.tile_description = tile
        assert plan.tile_description == tile
        torch.testing.assert_close(plan.run(a, b), a @ b)


def test_tiles_of_hopper() -> None:
    tiles = Gemm(element=torch.float16, layout=ROW, cc=90).tile_descriptions()
    assert TileDescription((128, 128), (2, 1), "pingpong") in tiles
    assert len(set(tiles)) == len(tiles) > 5
    assert all(tile.kernel_schedule != "swapped" for tile in tiles), "they are for many rows or for few"
    assert Gemm(element=torch.float64, cc=90).tile_descriptions() == []


def test_a_tile_that_no_kernel_has() -> None:
    a, b, _ = matrices()
    plan = Gemm(element=torch.float32)
    plan.tile_description = {"threadblock_shape": [16, 16], "cluster_shape": [2, 1]}
    with pytest.raises(UnsupportedError, match=r"tile_descriptions\(\) lists the tiles there are"):
        plan.run(a, b)
    plan.tile_description = None
    torch.testing.assert_close(plan.run(a, b), a @ b)


# --- what is refused ------------------------------------------------------------------------------------------------


def assigned(name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(Gemm(element=torch.float32), name, value)


def run(*tensors: torch.Tensor, **named: Any) -> Callable[[], Any]:
    return lambda: Gemm(element=torch.float32, layout=ROW).run(*tensors, **named)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Gemm(), "Gemm needs element_A"),
        (lambda: Gemm(element="float16"), "element_A must be a torch dtype"),
        (lambda: Gemm(element=torch.float32, layout="row"), "layout_A must be a LayoutType"),
        (lambda: Gemm(element=torch.float32, layout_E=ROW), "Gemm has no parameter 'layout_E'"),
        (lambda: Gemm([1.0]), "A must be a torch.Tensor"),
        (assigned("activation", "rellu"), "activation must be a function"),
        (assigned("activation", 3.0), "activation must be a function"),
        (assigned("activation", (ef.leaky_relu, "steep")), "activation must be a function"),
        (assigned("epilogue_visitor", "def f(x): return x"), "accum must be an input"),
        (assigned("tile_description", {"tile": (8, 8)}), "a TileDescription or a dict of threadblock_shape"),
        (assigned("tile_description", {"threadblock_shape": (8, 8, 8)}), "threadblock_shape must be two whole numbers"),
        (assigned("tile_description", (8, 8)), "tile_description must be a TileDescription, a dict or None"),
        (run(), "Gemm.run needs A"),
        (run(torch.ones(M, K)), "Gemm.run needs B"),
        (run(torch.ones(M, K).half(), torch.ones(K, N)), "A is torch.float16, and this plan is for torch.float32"),
        (run(torch.ones(K, M).mT, torch.ones(K, N)), r"A is of strides \(1, 33\), and this plan is for RowMajor"),
        (run(torch.ones(M, K), torch.ones(K, N), beta=1.0), "Argument C is not provided"),
        (run(torch.ones(M, K), torch.ones(K, N), visitor_args={"x": 1.0}), "no parameter 'visitor_args'"),
        (run(torch.ones(M, K), torch.ones(K, N), visitor_args=[1.0]), "visitor_args must be a mapping"),
        (lambda: Gemm(element=torch.float32).arguments({"Q": torch.ones(M, K)}, {}), "no parameter 'Q'"),
        (lambda: trace(lambda accum: accum, {}), r"example_tensors\['accum'\] must be a tensor"),
        (lambda: trace(lambda accum: accum, {"accum": torch.ones(2, 2, M, N)}), "a tensor of two or three dims"),
        (lambda: trace(lambda accum: accum, [1.0]), "trace takes a mapping"),
        *(
            (
                lambda dtype=dtype: trace(lambda accum: accum, {"accum": torch.ones(M, N, dtype=dtype)}),
                "floats or int32",
            )
            for dtype in (torch.bool, torch.complex64, torch.int64)
        ),
        (assigned("activaton", ef.relu), "Gemm has no parameter 'activaton'; it has activation"),
        (assigned("element_accumulator", torch.float16), "Gemm has no parameter 'element_accumulator'"),
        (lambda: trace("lambda accum, C: accum + C", {"accum": torch.ones(M, N)}), "Argument C is not provided"),
        (
            lambda: trace("lambda accum, C: accum + C", {"accum": torch.ones(M, N), "C": torch.ones(M)}),
            "does not broadcast",
        ),
    ],
)
def test_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(EpifuseError, match=says):
        make()


def test_nothing_is_written_when_a_tensor_does_not_fit() -> None:
    d = torch.zeros(M, N)
    with pytest.raises(EpifuseError, match=r"operand 'C' of shape \(33, 41\)"):
        run(torch.ones(M, K), torch.ones(K, N), torch.ones(M, N + 1), d, beta=1.0)()
    assert not d.any()
