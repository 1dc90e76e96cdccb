"""Every functor in every scale type, beside formulas written out in PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse import thread
from epifuse.errors import ArgumentError
from epifuse.testing import Bounded, bounded, compare_bounded
from epifuse.thread import ScaleType

M, N, K = 19, 12, 8
ALPHA, BETA = 1.5, 0.75
EPS = torch.finfo(torch.float32).eps

Result = Any
Reference = Callable[[Callable[[Any], Any], Callable[[Any], Any], Any, Mapping[str, Any]], Result]
"""From alpha times ..., beta times ..., the accumulator, and the operands, to the outputs."""


class Row(NamedTuple):
    functor: Callable[..., thread.Functor]
    want: Reference
    more: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("C",)
    parameters: Mapping[str, Any] = {}


def linear(finish: Callable[..., Any]) -> Reference:
    """finish(alpha * accum + beta * C, operands)."""
    return lambda a, b, accum, x: finish(a(accum) + b(x["C"]), x)


def per_scale(scale: ScaleType, vectors: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
    """What alpha and beta are in a scale type; 1 without scaling, 0 without a source."""
    return {
        ScaleType.Default: (ALPHA, BETA),
        ScaleType.NoBetaScaling: (ALPHA, 1.0),
        ScaleType.OnlyAlphaScaling: (ALPHA, 0.0),
        ScaleType.PerChannelScaling: vectors,
        ScaleType.OnlyAlphaPerChannelScaling: (vectors[0], 0.0),
        ScaleType.Nothing: (1.0, 0.0),
    }[scale]


def written(scale: ScaleType, vectors: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """How a person writes them."""
    alpha = {"alpha_ptr": vectors[0]} if scale.per_channel else {"alpha": ALPHA}
    beta = {"beta_ptr": vectors[1]} if scale.per_channel else {"beta": BETA}
    return {**({} if "alpha" in scale.absent else alpha), **({} if "beta" in scale.absent else beta)}


def gelu_by_tanh(x: Any) -> Any:
    """torch's gelu(approximate="tanh"), written out so that the bound knows where it cancels."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def gelu_by_erf(x: Any) -> Any:
    """torch's gelu(approximate="none")."""
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def dgelu(x: Any) -> Any:
    return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5


def residual(unary: Any, first: Any, second: Any, activation: Any) -> Reference:
    return lambda a, b, accum, x: unary(
        second(first(activation(a(accum) + x["bias"]), b(x["residual1"])), b(x["residual2"]))
    )


def scaling(a: Any, b: Any, accum: Any, x: Mapping[str, Any]) -> Any:
    z = a(2.0 * 0.5 * accum) + b(3.0 * x["C"]) + x["bias"]
    d = torch.sigmoid(z)
    return 4.0 * d, 0.25 * z, torch.amax(torch.abs(d)), torch.amax(torch.abs(z))


def unscaled_without_beta(a: Any, b: Any, accum: Any, x: Mapping[str, Any]) -> Any:
    """CUTLASS's code: scale_a and scale_b belong to alpha, scale_c to beta."""
    z = a(accum) + b(x["C"]) + x["bias"]
    return torch.sigmoid(z), z, torch.amax(torch.abs(torch.sigmoid(z))), torch.amax(torch.abs(z))


def bias_elementwise(a: Any, b: Any, accum: Any, x: Mapping[str, Any]) -> Any:
    t = (a(accum) + b(x["C"])) * x["bias"]
    return torch.tanh(t), t


def bias_relu(a: Any, b: Any, accum: Any, x: Mapping[str, Any]) -> Any:
    z = a(accum) + b(x["C"]) + x["bias"]
    return torch.relu(z), z >= 0


ROWS: dict[str, Row] = {
    "LinearCombination": Row(thread.LinearCombination, linear(lambda z, x: z)),
    "Relu": Row(thread.LinearCombinationRelu, linear(lambda z, x: torch.relu(z))),
    "Relu threshold": Row(
        thread.LinearCombinationRelu, linear(lambda z, x: torch.clamp(z, min=0.5)), parameters={"threshold": 0.5}
    ),
    "GELU fast": Row(thread.LinearCombinationGELU, linear(lambda z, x: gelu_by_tanh(z))),
    "GELU precise": Row(
        thread.LinearCombinationGELU, linear(lambda z, x: gelu_by_erf(z)), parameters={"is_fast": False}
    ),
    "Sigmoid": Row(thread.LinearCombinationSigmoid, linear(lambda z, x: torch.sigmoid(z))),
    "Silu": Row(thread.LinearCombinationSilu, linear(lambda z, x: F.silu(z))),
    "HardSwish": Row(thread.LinearCombinationHardSwish, linear(lambda z, x: F.hardswish(z))),
    "LeakyRelu": Row(
        thread.LinearCombinationLeakyRelu, linear(lambda z, x: F.leaky_relu(z, 0.25)), parameters={"leaky_alpha": 0.25}
    ),
    "Clamp": Row(
        thread.LinearCombinationClamp,
        linear(lambda z, x: torch.clamp(z, -1.0, 2.0)),
        parameters={"clamp_min": -1.0, "clamp_max": 2.0},
    ),
    "Generic": Row(
        thread.LinearCombinationGeneric, linear(lambda z, x: torch.tanh(z)), parameters={"activation": torch.tanh}
    ),
    "Generic, arguments": Row(
        thread.LinearCombinationGeneric,
        linear(lambda z, x: F.softplus(z, 2.0, 20.0)),
        parameters={"activation": ef.softplus, "activation_args": (2.0, 20.0)},
    ),
    "BiasElementwise": Row(
        thread.LinearCombinationBiasElementwise,
        bias_elementwise,
        ("bias",),
        parameters={"elementwise_op": ef.tanh, "binary_op": ef.mul},
    ),
    "BiasRelu": Row(thread.LinearCombinationBiasRelu, bias_relu, ("bias",)),
    "ResidualBlock": Row(
        thread.LinearCombinationResidualBlock,
        residual(torch.tanh, torch.add, torch.sub, torch.relu),
        ("bias",),
        ("residual1", "residual2"),
        {"activation": ef.relu, "binary_op2": ef.sub, "unary_op": ef.tanh},
    ),
    "TensorBroadcast": Row(
        thread.LinearCombinationTensorBroadcast,
        lambda a, b, accum, x: torch.sigmoid(torch.relu(a(accum) + x["bias"]) + b(x["C0"]) - b(x["C1"])),
        ("bias",),
        ("C0", "C1"),
        {"activation": ef.relu, "binary_op1": ef.sub, "unary_op": ef.sigmoid},
    ),
    "DRelu": Row(
        thread.LinearCombinationDRelu,
        linear(lambda z, x: torch.where(x["Z"] > 0.25, z, torch.zeros_like(z))),
        ("Z",),
        parameters={"threshold": 0.25},
    ),
    "DReluConditionalBits": Row(
        thread.LinearCombinationDReluConditionalBits,
        linear(lambda z, x: torch.where(x["mask"], z, torch.zeros_like(z))),
        ("mask",),
    ),
    "DGelu": Row(thread.LinearCombinationDGelu, linear(lambda z, x: z * dgelu(x["Z"])), ("Z",)),
    "WithScalingAndAbsMax": Row(
        thread.LinearCombinationGenericWithScalingAndAbsMax,
        scaling,
        ("bias",),
        parameters={"activation": ef.sigmoid, "scale_a": 2.0, "scale_b": 0.5, "scale_d": 4.0, "scale_aux": 0.25},
    ),
}


def data() -> dict[str, torch.Tensor]:
    """Integer factors, so that the accumulator is exact."""
    full = {name: torch.randn(M, N) for name in ("C", "C0", "C1", "residual1", "residual2", "Z")}
    return {
        **full,
        "A": torch.randint(-2, 3, (M, K)).float(),
        "B": torch.randint(-2, 3, (K, N)).float(),
        "bias": torch.randn(N),
        "mask": torch.randn(M, N) > 0,
    }


def assert_like(got: Any, want: Any) -> None:
    gots, wants = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for one, other in zip(gots, wants, strict=True):
        verdict = compare_bounded(one, other)
        assert verdict.wrong == 0, verdict.detail
        assert verdict.judged > 0.9 * verdict.total


@pytest.mark.parametrize("scale", ScaleType, ids=lambda scale: scale.name)
@pytest.mark.parametrize("name", ROWS)
def test_functor(name: str, scale: ScaleType) -> None:
    row, values = ROWS[name], data()
    vectors = (torch.randn(N), torch.randn(N))
    parameters, want = dict(row.parameters), row.want
    if want is scaling:
        if scale is ScaleType.Default or scale is ScaleType.PerChannelScaling:
            parameters["scale_c"] = 3.0
        elif "alpha" in scale.absent:
            parameters = {"activation": ef.sigmoid}
            want = unscaled_without_beta
    functor = row.functor(scale=scale, **written(scale, vectors), **parameters)
    names = (*row.sources, *row.more)
    operands = {"Z" if n == "mask" else n: values[n] for n in names}
    got = ef.gemm(values["A"], values["B"], epilogue=functor, **operands)

    alpha, beta = (bounded(x, EPS) for x in per_scale(scale, vectors))
    exact = {n: bounded(x, EPS) for n, x in values.items()}
    accum = bounded(values["A"].double() @ values["B"].double(), EPS)
    unscaled_source = scale is ScaleType.NoBetaScaling and want is scaling
    wanted = want(lambda x: alpha * x, lambda x: beta * (x / 3.0 if unscaled_source else x), accum, exact)
    assert_like(got, wanted)
    assert functor.is_source_needed() == ("source" not in scale.absent)

    host = functor(values["A"] @ values["B"], *(operands[n] for n in functor.operands if n in operands))
    ordered = functor(values["A"] @ values["B"], **operands)
    assert_like(ordered, wanted)
    if functor.operands == tuple(operands):
        assert_like(host, wanted)


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


def test_a_formula_that_needs_its_source_says_so() -> None:
    class Careless(thread.LinearCombination):
        @staticmethod
        def formula(accum: Any, C: Any, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
            return alpha * accum + beta * C

    assert Careless(beta=1.0).is_source_needed()
    with pytest.raises(ArgumentError, match=r"combine by epifuse\.thread\.linear_combination"):
        Careless(beta=0.0)
