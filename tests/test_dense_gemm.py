"""The class form: CUTLASS's documented examples, said as methods."""

import pickle
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError, EpilogueSyntaxError, InternalError, UnsupportedError
from epifuse.forms import dense_gemm
from epifuse.forms.dense_gemm import DenseGemm

L, M, N, K = 2, 33, 40, 16
E4M3 = torch.float8_e4m3fn
MAJORS = [("k", "n", "n"), ("m", "k", "m"), ("k", "k", "n")]


class DenseGemmAlphaBeta(DenseGemm):
    """The example of the documentation, with its own words."""

    def create_arguments(
        self,
        l: int,
        m: int,
        n: int,
        k: int,
        a_major: str,
        b_major: str,
        cd_major: str,
        ab_dtype: torch.dtype,
        c_dtype: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor, ...]:
        std_args = super().create_arguments(l, m, n, k, a_major, b_major, cd_major, ab_dtype)
        c_tensor, x_tensor, d_tensor, y_tensor = (self.matrix(l, m, n, cd_major == "m", c_dtype) for _ in range(4))
        return (*std_args, c_tensor, x_tensor, d_tensor, y_tensor)

    def epilogue_operation(
        self, accumulator: Any, c: Any, x: Any, alpha: float, beta: float, x_factor: float
    ) -> tuple[Any, Any]:
        # Store a copy of the accumulator to Y
        y = accumulator
        d = accumulator * alpha + c * beta + x * x_factor
        return (d, y)


class MultiOutput(DenseGemm):
    def epilogue_operation(self, accumulator: Any, c: Any) -> Any:
        d = accumulator + c
        d_squared = d * d
        d_norm = d / ef.norm(d)
        return (d, d_squared, d_norm)


class Complex(DenseGemm):
    def epilogue_operation(self, accumulator: Any, c: Any, x: Any, bias: Any, scale: Any) -> Any:
        result = (accumulator + bias) * scale
        result = result + c
        result = result + ef.tanh(x)
        result = ef.gelu(result)
        return result


class Debug(DenseGemm):
    def epilogue_operation(self, accumulator: Any, c: Any) -> Any:
        ef.debug_print("accumulator = {}", accumulator)
        return accumulator + c


class WithSelf(DenseGemm):
    """Numbers, functions and methods of the object."""

    slope = 0.5

    def __init__(self, activation: Any = ef.relu, **options: Any) -> None:
        super().__init__(device="cpu", **options)
        self.activation = activation

    def shifted(self, x: Any, by: float) -> Any:
        return x * self.slope + by

    @staticmethod
    def doubled(x: Any) -> Any:
        return x + x

    def epilogue_operation(self, accumulator: Any) -> Any:
        return self.activation(self.doubled(self.shifted(accumulator, 1.0)))


def made(kind: type[DenseGemm], **options: Any) -> tuple[DenseGemm, tuple[torch.Tensor, ...]]:
    gemm = kind(torch.float32, device="cpu", **options)
    return gemm, gemm.create_arguments(L, M, N, K, "k", "n", "n", torch.float32)


SCALARS = {"alpha": 2.0, "beta": 0.5, "x_factor": -1.0}


@pytest.mark.parametrize("majors", MAJORS, ids="".join)
def test_the_documented_example(majors: tuple[str, str, str]) -> None:
    gemm = DenseGemmAlphaBeta(torch.float32, False, None, None, device="cpu")
    a, b, c, x, d, y = arguments = gemm.create_arguments(L, M, N, K, *majors, torch.bfloat16)
    assert a.stride(-1 if majors[0] == "k" else -2) == 1
    assert b.stride(-1 if majors[1] == "n" else -2) == 1
    assert c.stride(-1 if majors[2] == "n" else -2) == 1
    result = gemm.run(*arguments, **SCALARS)
    product = a.float() @ b.float()
    assert result.d is d
    assert torch.equal(d, product * 2.0 + c * 0.5 - x)
    assert torch.equal(y, product)
    assert all(v.wrong == 0 and v.judged == v.total for v in gemm.verify(*arguments, **SCALARS).values())


def test_outputs_that_are_not_given_are_allocated() -> None:
    gemm, arguments = made(DenseGemmAlphaBeta)
    d, y = gemm.run(*arguments[:4], **SCALARS)
    assert torch.equal(y, arguments[0] @ arguments[1])
    assert d.shape == (L, M, N)


def test_numbers_may_stand_by_position_and_tensors_by_name() -> None:
    gemm, (a, b, c, x, d, y) = made(DenseGemmAlphaBeta)
    want = gemm.run(a, b, c, x, **SCALARS).d
    assert torch.equal(gemm.run(a, b, c, x, 2.0, 0.5, -1.0).d, want)
    assert torch.equal(gemm.run(a, b, x=x, c=c, d=d, y=y, **SCALARS).d, want)


def test_three_outputs_and_a_norm_of_the_whole() -> None:
    gemm, (a, b) = made(MultiOutput)
    c = torch.randn(L, M, N)
    result = gemm.run(a, b, c)
    d = a @ b + c
    torch.testing.assert_close(result.d_squared, d * d)
    torch.testing.assert_close(result.d_norm, d / torch.linalg.vector_norm(d))
    assert "the product is computed 2 times" in str(ef.explain(gemm.arguments(a, b, c)))
    assert gemm.constraints.allow_recompute
    assert set(gemm.verify(a, b, c)) == {"d", "d_squared", "d_norm"}


def test_names_may_be_assigned_again() -> None:
    gemm, (a, b) = made(Complex)
    c, x, bias = torch.randn(L, M, N), torch.randn(L, M, N), torch.randn(N)
    want = torch.nn.functional.gelu((a @ b + bias) * 0.1 + c + torch.tanh(x))
    torch.testing.assert_close(gemm.run(a, b, c, x, bias, scale=0.1), want)
    gemm.verify(a, b, c, x, bias, scale=0.1)


def test_debug_printing(capsys: pytest.CaptureFixture[str]) -> None:
    gemm, (a, b) = made(Debug)
    assert torch.equal(gemm.run(a, b, torch.ones(L, M, N)), a @ b + 1.0)
    assert "accumulator = tensor(" in capsys.readouterr().out


def test_what_self_holds() -> None:
    gemm = WithSelf()
    a, b = gemm.create_arguments(1, M, N, K, "k", "n", "n", torch.float32)
    assert torch.equal(gemm.run(a, b), torch.relu(a @ b + 2.0))
    gemm.slope = 1.5  # a number is read again at each call
    assert torch.equal(gemm.run(a, b), torch.relu(3.0 * (a @ b) + 2.0))
    gemm.activation = ef.square  # another function is another graph
    assert torch.equal(gemm.run(a, b), (3.0 * (a @ b) + 2.0) ** 2)
    gemm.verify(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inside_a_compiled_function() -> None:
    gemm = WithSelf()
    a, b = torch.randn(M, K), torch.randn(K, N)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: gemm.run(x * 2, b) + 1, backend="eager")
    torch.testing.assert_close(compiled(a), torch.relu(2 * a @ b + 2.0) + 1)
    torch.compiler.reset()


def test_an_object_is_an_epilogue() -> None:
    gemm = WithSelf(activation=ef.tanh)
    a, b = torch.randn(M, K), torch.randn(K, N)
    torch.testing.assert_close(ef.gemm(a, b, epilogue=gemm), torch.tanh(a @ b + 2.0))


def test_the_base_class_is_a_plain_product() -> None:
    gemm, (a, b) = made(DenseGemm)
    assert torch.equal(gemm.run(a, b), a @ b)


def test_block_scales_run_where_their_arguments_are_made() -> None:
    a, b, of_a = torch.randn(5, 256).to(E4M3), torch.randn(256, 8).to(E4M3), torch.rand(5, 2)
    tensors = ef.Scaled(a, of_a), ef.Scaled(b, torch.rand(2, 1))
    gemm = DenseGemm(device="cpu")
    assert gemm.verify(*tensors)["D"].judged
    assert torch.equal(gemm.run(*tensors), ef.gemm(*tensors))


def test_the_class_and_the_function_are_one_plan() -> None:
    gemm, (a, b, c, x, *_) = made(DenseGemmAlphaBeta)

    def function(accum: Any, c: Any, x: Any, alpha: Any, beta: Any, x_factor: Any) -> Any:
        d = accum * alpha + c * beta + x * x_factor
        return d, accum

    given = {"c": c, "x": x, **SCALARS}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function, given))
    plans = [ef.explain(one).plan for one in (args, gemm.arguments(a, b, c, x, **SCALARS))]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].digest == plans[1].digest


@pytest.mark.parametrize("tile", [(8, 16), (33, 40)])
def test_a_tile_is_honoured(tile: tuple[int, int]) -> None:
    gemm, (a, b) = made(DenseGemm, mma_tiler_mn=tile, cluster_shape_mn=(1, 1))
    assert ef.get_kernels(gemm.arguments(a, b))[0].metadata.tile_shape == tile
    assert torch.equal(gemm.run(a, b), a @ b)


def test_hopper_has_these_tiles() -> None:
    gemm = DenseGemm(None, False, (128, 256), (2, 1), device="meta")
    a, b = gemm.create_arguments(1, 512, 512, 512, "k", "k", "n", torch.bfloat16)
    kernels = ef.get_kernels(gemm.arguments(a, b), cc=90)
    assert {kernel.metadata.tile_shape for kernel in kernels} == {(128, 256)}
    other = DenseGemm(None, False, (100, 256), (2, 1), device="meta")
    assert ef.get_kernels(other.arguments(a, b), cc=90) == []


def test_a_norm_of_the_whole_computes_the_product_twice() -> None:
    gemm = MultiOutput(device="meta")
    a, b = gemm.create_arguments(2, 512, 256, 128, "k", "k", "n", torch.bfloat16)
    args = gemm.arguments(a, b, torch.empty(2, 512, 256, device="meta"))
    first, second = ef.get_kernels(args, cc=90)[0].plan.allocation.launches
    assert [output.name for output in first.graph.outputs] == ["d", "d_squared", "norm~0"]
    assert [output.name for output in second.graph.outputs] == ["d_norm"]

    class Once(MultiOutput):
        allow_recompute = False

    args = Once(device="meta").arguments(a, b, torch.empty(2, 512, 256, device="meta"))
    assert ef.get_kernels(args, cc=90) == []
    assert "store norm(x) and apply it in the next GEMM's epilogue" in str(ef.explain(args, cc=90))


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, (a, b) = made(DenseGemm)
    monkeypatch.setattr(dense_gemm, "launch", lambda call, _: {"D": (call.request.a @ call.request.b) * 1.001})
    with pytest.raises(InternalError, match="output 'D' differs from PyTorch"):
        gemm.verify(a, b)


def test_verify_reads_an_operand_before_an_output_overwrites_it() -> None:
    gemm, (a, b, c, x, _, y) = made(DenseGemmAlphaBeta)
    verdicts = gemm.verify(a, b, c, x, c, y, **SCALARS)
    assert verdicts["d"].judged == verdicts["d"].total


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_verify_knows_every_accumulator(dtype: torch.dtype) -> None:
    gemm = MultiOutput(device="cpu") if dtype != torch.int8 else DenseGemm(device="cpu")
    a, b = gemm.create_arguments(L, M, N, K, "k", "n", "n", dtype)
    if dtype.is_floating_point:  # not whole: the product has a bound of its own
        a, b = torch.randn(a.shape).to(dtype), torch.randn(b.shape).to(dtype)
    c = [] if dtype == torch.int8 else [torch.randn(L, M, N).to(dtype)]
    assert all(v.judged > 0.9 * v.total for v in gemm.verify(a, b, *c).values())


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"acc_dtype": torch.int8}, "acc_dtype must be None or one of"),
        ({"use_2cta_instrs": True}, "use_2cta_instrs must be False"),
        ({"mma_tiler_mn": (128,)}, "mma_tiler_mn must be two whole numbers"),
        ({"mma_tiler_mn": (128, -1)}, "mma_tiler_mn must be two whole numbers"),
        ({"cluster_shape_mn": "2x1"}, "cluster_shape_mn must be two whole numbers"),
    ],
)
def test_refused_when_constructed(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        DenseGemm(**options)


def test_a_tile_that_no_kernel_has() -> None:
    gemm, arguments = made(DenseGemmAlphaBeta, cluster_shape_mn=(2, 1))
    untouched = arguments[-1].clone()
    with pytest.raises(UnsupportedError, match=r"no cluster to choose, and \(2, 1\) was asked for"):
        gemm.run(*arguments, **SCALARS)
    assert torch.equal(arguments[-1], untouched)


def test_refused_when_called() -> None:
    gemm, arguments = made(DenseGemmAlphaBeta)
    with pytest.raises(ArgumentError, match=r"takes A, B, c, x, and then d and y or nothing, by position, not 5"):
        gemm.run(*arguments[:5], **SCALARS)
    with pytest.raises(ArgumentError, match="Unexpected argument 'gamma'"):
        gemm.run(*arguments[:4], **SCALARS, gamma=1.0)
    with pytest.raises(ArgumentError, match="a_major must be 'm' or 'k'"):
        gemm.create_arguments(L, M, N, K, "n", "n", "n", torch.float32)
    with pytest.raises(ArgumentError, match="dtype must be a torch dtype that can be stored"):
        gemm.create_arguments(L, M, N, K, "k", "n", "n", torch.complex64)


@pytest.mark.parametrize("extent", [-1, "33", 1.5])
def test_extents_that_are_none(extent: Any) -> None:
    with pytest.raises(ArgumentError, match="rows must be a whole number"):
        DenseGemm(device="cpu").create_arguments(1, extent, N, K, "k", "n", "n", torch.float32)


def test_a_device_that_is_none() -> None:
    with pytest.raises(ArgumentError, match="device must be a device of torch, got 'nowhere'"):
        DenseGemm(device="nowhere")
    with pytest.raises(ArgumentError, match="device must be a device that this machine has, got 'cuda:99'"):
        DenseGemm(device="cuda:99")


def test_an_object_survives_pickling() -> None:
    gemm = WithSelf()
    a, b = torch.ones(M, K), torch.ones(K, N)
    first = gemm.run(a, b)
    again = pickle.loads(pickle.dumps(gemm))
    again.slope = 0.0
    assert torch.equal(again.run(a, b), torch.full((M, N), 2.0))
    assert torch.equal(gemm.run(a, b), first)


class Unfinished(DenseGemm):
    def __init__(self) -> None:
        self.slope = 2.0


def test_a_class_that_does_not_call_the_bases_constructor() -> None:
    with pytest.raises(ArgumentError, match=r"call super\(\).__init__\(\)"):
        Unfinished().run(torch.ones(M, K), torch.ones(K, N))


class NoAccumulator(DenseGemm):
    def epilogue_operation(self) -> Any:  # type: ignore[override]
        return self


class NoMethod(DenseGemm):
    epilogue_operation = "relu"  # type: ignore[assignment]


class UsesAProperty(DenseGemm):
    @property
    def slope(self) -> float:
        raise AssertionError("a property must not run")

    def epilogue_operation(self, accumulator: Any) -> Any:
        return accumulator * self.slope


class UsesATensor(DenseGemm):
    def epilogue_operation(self, accumulator: Any) -> Any:
        return accumulator * self.weight  # type: ignore[attr-defined]


class UsesNothingThere(DenseGemm):
    def epilogue_operation(self, accumulator: Any) -> Any:
        return accumulator * self.slop  # type: ignore[attr-defined]


class UsesItself(DenseGemm):
    def epilogue_operation(self, accumulator: Any) -> Any:
        return accumulator * self


@pytest.mark.parametrize("kind", [NoAccumulator, NoMethod])
def test_an_epilogue_that_is_none(kind: type[DenseGemm]) -> None:
    with pytest.raises(ArgumentError, match="epilogue_operation must be a method that takes self and an accumulator"):
        made(kind)[0].run(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (UsesAProperty, "'self.slope' is a property"),
        (UsesATensor, "'self.weight' is a tensor from outside the epilogue"),
        (UsesNothingThere, "self has no 'slop'"),
        (UsesItself, "the object self cannot be used as a value here"),
    ],
)
def test_an_epilogue_outside_the_language(kind: type[DenseGemm], says: str) -> None:
    gemm = kind(device="cpu")
    gemm.weight = torch.ones(3)  # type: ignore[attr-defined]
    with pytest.raises(EpilogueSyntaxError, match=says) as caught:
        gemm.run(torch.ones(2, 2), torch.ones(2, 2))
    assert caught.value.loc is not None
    assert "test_dense_gemm.py" in caught.value.loc.file
