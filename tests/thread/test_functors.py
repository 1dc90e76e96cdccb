"""Every functor in every scale type, beside formulas written out in PyTorch; parameters, partitions, refusals."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.base.errors import ArgumentError
from epifuse.forms import thread
from epifuse.forms.thread import ScaleType
from epifuse.tools.testing import Bounded, bounded, compare_bounded
from tests.thread.rows import EPS, ROWS, K, M, N, assert_like, case, data, dgelu, gelu_by_erf, gelu_by_tanh

SCALES = pytest.mark.parametrize("scale", ScaleType, ids=lambda scale: scale.name)


@SCALES
@pytest.mark.parametrize("name", ROWS)
def test_functor(name: str, scale: ScaleType) -> None:
    functor, a, b, operands, wanted = case(name, scale)
    assert_like(ef.gemm(a, b, epilogue=functor, **operands), wanted)
    assert functor.is_source_needed() == ("source" not in scale.absent)
    # On tensors it is its own reference, by name and by position.
    assert_like(functor(a @ b, **operands), wanted)
    assert_like(functor(a @ b, *(operands.get(name) for name in functor.operands)), wanted)


@SCALES
@pytest.mark.parametrize("name", ROWS)
def test_hopper_takes_every_functor(name: str, scale: ScaleType) -> None:
    functor, a, b, operands, _ = case(name, scale, "cpu", torch.bfloat16)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(functor, operands))
    assert ef.get_kernels(args, cc=90), ef.explain(args, cc=90)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
@SCALES
@pytest.mark.parametrize("name", ROWS)
def test_functor_in_bfloat16(name: str, scale: ScaleType, device: str) -> None:
    functor, a, b, operands, wanted = case(name, scale, device, torch.bfloat16)
    assert_like(ef.gemm(a, b, epilogue=functor, **operands), wanted)


def test_convert() -> None:
    values = data()
    got = ef.gemm(values["A"], values["B"], epilogue=thread.Convert(torch.int8))
    assert got.dtype == torch.int8
    assert torch.equal(got, (values["A"] @ values["B"]).to(torch.int8))


def test_every_functor_is_here() -> None:
    functors = {
        value for value in vars(thread).values() if isinstance(value, type) and issubclass(value, thread.Functor)
    }
    assert functors - {thread.Functor, thread.Convert} == {row.functor for row in ROWS.values()}


def test_the_written_gelu_is_torchs() -> None:
    x = torch.randn(100, dtype=torch.float64)
    torch.testing.assert_close(gelu_by_tanh(x), F.gelu(x, approximate="tanh"))
    torch.testing.assert_close(gelu_by_erf(x), F.gelu(x))
    x.requires_grad_()
    F.gelu(x).sum().backward()
    torch.testing.assert_close(x.grad, dgelu(x.detach()))


def test_bounded_means_something() -> None:
    """The comparison fails for a result that is off by a part in ten thousand."""
    want = bounded(torch.randn(M, N).double(), EPS)
    assert isinstance(want, Bounded)
    assert compare_bounded((want.as_subclass(torch.Tensor) * 1.0001).float(), want).wrong > 0


# --- one graph ------------------------------------------------------------------------------------------------------


def digest(epilogue: Any, **named: Any) -> str:
    values = data()
    args = ef.GemmArguments(values["A"], values["B"], epilogue=ef.EpilogueArguments.partial(epilogue, named))
    plan = ef.explain(args).plan
    assert plan is not None
    return plan.digest


def test_a_functor_and_a_function_are_one_plan() -> None:
    def function(accum: Any, C: Any, alpha: Any, beta: Any) -> Any:
        return ef.relu(beta * C + accum * alpha)

    C = torch.randn(M, N)
    functor = thread.LinearCombinationRelu(alpha=2.0, beta=0.5)
    assert digest(functor, C=C) == digest(function, C=C, alpha=2.0, beta=0.5)
    assert digest(functor, C=C) == digest(thread.LinearCombinationGeneric(activation=ef.relu, beta=1.0), C=C)
    assert digest(functor, C=C) != digest(thread.LinearCombinationSilu(alpha=2.0, beta=0.5), C=C)


def test_functors_of_one_structure_are_typed_once() -> None:
    values = data()
    graphs = [
        ef.GemmArguments(
            values["A"],
            values["B"],
            epilogue=ef.EpilogueArguments.partial(thread.LinearCombinationSilu(alpha=a, beta=2.0), {"C": values["C"]}),
        ).graph
        for a in (1.0, 3.0)
    ]
    assert graphs[0] is graphs[1]


class LinearCombinationTanh(thread.LinearCombination):
    """The custom functor of CUTLASS's documentation."""

    @staticmethod
    def formula(accum: Any, C: Any, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
        return thread.linear_combination(ef.tanh(accum), C, alpha, beta)


class Plain(thread.Functor):
    """Written without the helper: its source is always read."""

    def formula(accum: Any, C: Any, alpha: Any = 1.0, beta: Any = 0.0) -> Any:  # noqa: N805 - a formula has no self
        return alpha * ef.tanh(accum) + beta * C


@pytest.mark.parametrize("functor", [LinearCombinationTanh, Plain])
def test_a_custom_functor(functor: Callable[..., thread.Functor]) -> None:
    values = data()
    got = ef.gemm(values["A"], values["B"], epilogue=functor(alpha=2.0, beta=0.5), C=values["C"])
    want = 2.0 * torch.tanh(values["A"] @ values["B"]) + 0.5 * values["C"]
    torch.testing.assert_close(got, want)
    assert digest(functor(alpha=2.0, beta=0.5), C=values["C"]) == digest(Plain(beta=1.0), C=values["C"])


def test_a_custom_functor_is_not_split_unless_it_says_how() -> None:
    with pytest.raises(ArgumentError, match="LinearCombinationTanh is not defined for a split of K"):
        LinearCombinationTanh(beta=1.0).set_k_partition(0, 2)
    assert Plain(beta=0.0).is_source_needed()
    assert not LinearCombinationTanh(beta=0.0).is_source_needed()


# --- parameters -----------------------------------------------------------------------------------------------------


def test_a_python_beta_of_zero_reads_no_source() -> None:
    values = data()
    broken = torch.full((M, N), torch.nan)
    functor = thread.LinearCombination(beta=0.0)
    assert not functor.is_source_needed()
    product = values["A"] @ values["B"]
    assert torch.equal(ef.gemm(values["A"], values["B"], epilogue=functor, C=broken), product)
    assert torch.equal(functor(product, broken), product)
    assert torch.equal(ef.gemm(values["A"], values["B"], epilogue=functor), product)


def test_a_beta_in_memory_reads_the_source_whatever_it_holds() -> None:
    values = data()
    functor = thread.LinearCombination(beta_ptr=torch.zeros(1))
    assert functor.is_source_needed()
    got = ef.gemm(values["A"], values["B"], epilogue=functor, C=torch.full((M, N), torch.nan))
    assert bool(got.isnan().all())


def test_a_pointer_is_read_at_each_launch() -> None:
    values = data()
    alpha = torch.tensor([2.0])
    functor = thread.LinearCombination(alpha_ptr=alpha)
    first = ef.gemm(values["A"], values["B"], epilogue=functor)
    alpha.fill_(-1.0)
    assert torch.equal(ef.gemm(values["A"], values["B"], epilogue=functor), -first / 2.0)


@pytest.mark.parametrize("as_list", [True, False])
def test_an_array_of_pointers_holds_one_number_a_batch(as_list: bool) -> None:
    a, b = torch.randint(-2, 3, (3, M, K)).float(), torch.randint(-2, 3, (K, N)).float()
    alphas = torch.tensor([1.0, 2.0, -3.0])
    functor = thread.LinearCombination(alpha_ptr_array=list(alphas) if as_list else alphas)
    assert torch.equal(ef.gemm(a, b, epilogue=functor), alphas[:, None, None] * (a @ b))


def test_a_parameter_may_change_with_a_call() -> None:
    values = data()
    functor = thread.LinearCombinationClamp(clamp_min=-1.0, clamp_max=1.0)
    got = ef.gemm(values["A"], values["B"], epilogue=functor, alpha_ptr=torch.tensor([2.0]), clamp_max=3.0)
    assert torch.equal(got, (2.0 * (values["A"] @ values["B"])).clamp(-1.0, 3.0))


def test_stores_chooses_outputs() -> None:
    values = data()
    functor = thread.LinearCombinationBiasRelu(stores=("D",), element_output=torch.float16)
    got = ef.gemm(values["A"], values["B"], epilogue=functor, bias=values["bias"])
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float16
    assert isinstance(functor(values["A"] @ values["B"], bias=values["bias"]), torch.Tensor)


def test_the_clamp_of_an_integer_output_is_its_range() -> None:
    values = data()
    functor = thread.LinearCombinationClamp(torch.int8, alpha=1000.0)
    host = functor(values["A"] @ values["B"])
    assert host.min() == -128.0
    assert host.max() == 127.0
    got = ef.gemm(values["A"], values["B"], epilogue=functor)
    assert got.dtype == torch.int8
    assert torch.equal(got, host.to(torch.int8))


def test_explain_says_what_is_only_a_hint() -> None:
    values = data()
    functor = thread.LinearCombination(torch.float16, 8, element_compute=torch.float16, scale=ScaleType.Nothing)
    epilogue = ef.EpilogueArguments.partial(functor, {"C": values["C"]})
    text = str(ef.explain(ef.GemmArguments(values["A"], values["B"], epilogue=epilogue)))
    assert "element_compute is torch.float16; the epilogue is computed in float32" in text
    assert "count is 8" in text
    assert "C is not read: ScaleType.Nothing has no source" in text


# --- K split in series ----------------------------------------------------------------------------------------------

SPLIT = [name for name, row in ROWS.items() if row.sources == ("C",) and name != "WithScalingAndAbsMax"]


@pytest.mark.parametrize("name", SPLIT)
def test_partitions_of_k_add_up(name: str) -> None:
    row, values = ROWS[name], data()
    more = {"Z" if n == "mask" else n: values[n] for n in row.more}

    def made() -> thread.Functor:
        return row.functor(alpha=2.0, beta=1.5, **row.parameters)

    whole = ef.gemm(values["A"], values["B"], epilogue=made(), C=values["C"], **more)
    total, half = values["C"], K // 2
    for index in range(2):
        functor, part = made(), slice(index * half, (index + 1) * half)
        functor.set_k_partition(index, 2)
        given = {name: value for name, value in more.items() if index == 1}
        total = ef.gemm(values["A"][:, part], values["B"][part], epilogue=functor, C=total, **given)
    for got, want in zip(
        total if isinstance(total, tuple) else [total], whole if isinstance(whole, tuple) else [whole], strict=True
    ):
        if got.dtype != torch.bool:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# --- what is refused ------------------------------------------------------------------------------------------------

L = thread.LinearCombination


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: L(gamma=1.0), "has no parameter 'gamma'; it has alpha, beta"),
        (lambda: L(alpha=1.0, alpha_ptr=torch.ones(1)), "got the parameter 'alpha' twice"),
        (lambda: L(alpha="two"), "alpha must be a number, a tensor or a function"),
        (lambda: L(alpha_ptr=2.0), "alpha_ptr must be a tensor"),
        (lambda: L(alpha_ptr_array=torch.ones(2, 2)), r"alpha_ptr_array must be a tensor \(L,\)"),
        (lambda: L(alpha_ptr_array=[]), r"alpha_ptr_array must be a tensor \(L,\)"),
        (lambda: L(scale=ScaleType.NoBetaScaling, beta=2.0), "not defined for beta in ScaleType.NoBetaScaling"),
        (lambda: L(scale=ScaleType.PerChannelScaling, alpha=2.0), "PerChannelScaling without a vector"),
        (lambda: L(alpha_ptr=torch.ones(N)), "a vector alpha in ScaleType.Default"),
        (lambda: L(scale="Default"), "scale must be a ScaleType"),
        (lambda: L(count=0), "count must be a whole number above 0"),
        (lambda: L(round=thread.FloatRoundStyle.round_toward_zero), "round must be FloatRoundStyle.round_to_nearest"),
        (lambda: L(element_compute=torch.int32), "element_compute must be a float dtype"),
        (lambda: L(element_compute=torch.float64), "float64 only with element_accumulator"),
        (lambda: L("float16"), "element_output must be a torch dtype that can be stored"),
        (lambda: L(torch.complex64), "element_output must be a torch dtype that can be stored"),
        (lambda: L(stores=("Aux",)), "stores names 'Aux', but the outputs are D"),
        (
            lambda: thread.LinearCombinationSilu(activation=ef.relu),
            "LinearCombinationSilu has no parameter 'activation'",
        ),
        (
            lambda: thread.LinearCombinationGELU(activation=ef.relu),
            "LinearCombinationGELU has no parameter 'activation'",
        ),
        (lambda: L(stores="D"), "stores must be a tuple of names"),
        (lambda: thread.Functor(), "a formula that is no function"),
        (lambda: thread.LinearCombinationGeneric(activation=2.0), "activation must be a function"),
        (
            lambda: thread.LinearCombinationGeneric(activation=torch.nn.Linear(2, 2)),
            "'activation' is a Linear from outside",
        ),
        (lambda: thread.LinearCombinationGeneric(activation=ef.relu, activation_args=(1.0,)), "got 2 arguments"),
        (lambda: L(torch.float32, 4).set_k_partition(2, 2), "k_partition must be below k_partition_count"),
        (lambda: thread.Convert().set_k_partition(0, 2), "Convert is not defined for a split of K"),
        (lambda: L(scale=ScaleType.Nothing).set_k_partition(1, 2), "it has no source C"),
        (lambda: thread.Convert(scale=ScaleType.Nothing), "its formula is not a linear combination"),
        (lambda: thread.LinearCombinationClamp(), "pass element_output, clamp_min or clamp_max"),
        (lambda: thread.LinearCombinationGELU(is_fast="yes"), "is_fast must be True or False"),
        (lambda: thread.LinearCombinationGeneric(activation_args=(1.0, 2.0, 3.0)), "a tuple of two numbers at most"),
        (
            lambda: thread.LinearCombinationTensorBroadcast(binary_op0=ef.mul, scale=ScaleType.OnlyAlphaScaling),
            "its binary_op0 needs C0",
        ),
        (
            lambda: thread.LinearCombinationGenericWithScalingAndAbsMax(scale=ScaleType.Nothing, scale_a=2.0),
            "scale_a in ScaleType.Nothing: it would not be read",
        ),
    ],
)
def test_refused_when_constructed(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()


@pytest.mark.parametrize(
    ("functor", "named", "says"),
    [
        (L(beta=1.0), {}, "Argument C is not provided"),
        (L(torch.float16), {"out": torch.empty(M, N)}, "'D' has dtype torch.float32"),
        (L(element_source=torch.float16, beta=1.0), {"C": torch.ones(M, N)}, "'C' has dtype torch.float32"),
        (L(element_accumulator=torch.float64), {}, "accumulator_type torch.float64 does not go with inputs"),
        (L(), {"beta": 2.0, "C": torch.ones(M, N)}, "beta at a call"),
        (L(), {"bias": torch.ones(N)}, "Unexpected argument 'bias'"),
        (L(), {"alpha_ptr": 2.0}, "alpha_ptr must be a tensor"),
        (L(), {"alpha": 2.0, "alpha_ptr": torch.ones(1)}, "got the parameter 'alpha' twice"),
    ],
    ids=["no source", "output", "source", "accumulator", "beta of zero", "unknown", "no pointer", "twice"],
)
def test_refused_when_called(functor: thread.Functor, named: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        ef.gemm(torch.ones(M, K), torch.ones(K, N), epilogue=functor, **named)


def test_refused_on_tensors() -> None:
    product = torch.ones(M, N)
    with pytest.raises(ArgumentError, match="has no parameter 'gamma'; it has alpha"):
        L()(product, gamma=2.0)
    with pytest.raises(ArgumentError, match="Argument C is not provided"):
        L(beta=1.0)(product)
    with pytest.raises(ArgumentError, match="takes accum, C by position, not 3 arguments"):
        L()(product, product, product)


def test_a_class_is_no_epilogue_yet() -> None:
    with pytest.raises(ef.errors.ArgumentTypeError, match=r"make an object: LinearCombination\(\.\.\.\)"):
        ef.gemm(torch.ones(M, K), torch.ones(K, N), epilogue=L)


def test_a_functor_survives_pickling() -> None:
    values = data()
    functor = thread.LinearCombinationSilu(alpha=2.0, beta=0.5)
    again = pickle.loads(pickle.dumps(functor))
    assert repr(again) == repr(functor) == "LinearCombinationSilu(alpha=2.0, beta=0.5)"
    got = ef.gemm(values["A"], values["B"], epilogue=again, C=values["C"])
    assert torch.equal(got, ef.gemm(values["A"], values["B"], epilogue=functor, C=values["C"]))


def test_a_formula_that_needs_its_source_says_so() -> None:
    class Careless(thread.LinearCombination):
        @staticmethod
        def formula(accum: Any, C: Any, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
            return alpha * accum + beta * C

    assert Careless(beta=1.0).is_source_needed()
    with pytest.raises(ArgumentError, match=r"combine by epifuse\.thread\.linear_combination"):
        Careless(beta=0.0)


def test_a_vector_of_the_only_column() -> None:
    a, b, ones = torch.ones(M, K), torch.ones(K, 1), torch.ones(1)
    functor = L(scale=ScaleType.PerChannelScaling, alpha_ptr=2 * ones, beta_ptr=3 * ones)
    assert torch.equal(ef.gemm(a, b, epilogue=functor, C=torch.ones(M, 1)), torch.full((M, 1), 2.0 * K + 3.0))
    with pytest.raises(ArgumentError, match="OnlyAlphaPerChannelScaling without a vector"):
        L(scale=ScaleType.OnlyAlphaPerChannelScaling, alpha_ptr=torch.tensor(2.0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8])
def test_a_mask_of_bytes(dtype: torch.dtype) -> None:
    """What BiasRelu stores as T, in any dtype, is what the gradient takes as Z."""
    values, bias = data(), torch.randn(N)
    out_dtypes = {"T": dtype}
    _, mask = ef.gemm(
        values["A"], values["B"], epilogue=thread.LinearCombinationBiasRelu(), bias=bias, out_dtypes=out_dtypes
    )
    product = values["A"] @ values["B"]
    functor = thread.LinearCombinationDReluConditionalBits()
    want = torch.where(product + bias >= 0, product, 0.0)
    assert mask.dtype == dtype
    torch.testing.assert_close(ef.gemm(values["A"], values["B"], epilogue=functor, Z=mask), want)
    torch.testing.assert_close(functor(product, Z=mask), want)


@pytest.mark.parametrize("name", ["__call__", "is_source_needed", "set_k_partition"])
def test_what_follows_from_the_formula_is_not_written(name: str) -> None:
    """CUTLASS's `operator()` word for word would be ignored by every kernel."""
    with pytest.raises(ArgumentError, match=f"Tanh is not defined for its own {name}: write a formula"):
        type("Tanh", (L,), {name: lambda self, accum, C: ef.tanh(accum)})


def test_a_class_that_does_not_call_the_bases_constructor() -> None:
    class Careless(thread.LinearCombination):
        def __init__(self, params: dict[str, float]) -> None:
            self.params = params

    product = torch.ones(M, N)
    for use in (lambda: ef.gemm(product, product.mT, epilogue=Careless({})), lambda: Careless({})(product)):
        with pytest.raises(ArgumentError, match="Careless was not initialised"):
            use()
