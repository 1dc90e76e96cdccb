"""Every functor with the formula it stands for, written out in PyTorch; cases for the CPU and the GPU."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.forms import thread
from epifuse.forms.thread import ScaleType
from epifuse.tools.testing import bounded, compare_bounded

M, N, K = 19, 24, 16
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


def scaling(accum_scale: float, source_scale: float) -> Reference:
    """With scale_a * scale_b, and scale_c; D and Aux are scaled after their maxima were taken."""

    def want(a: Any, b: Any, accum: Any, x: Mapping[str, Any]) -> Any:
        z = a(accum_scale * accum) + b(source_scale * x["C"]) + x["bias"]
        d = torch.sigmoid(z)
        return 4.0 * d, 0.25 * z, torch.amax(torch.abs(d)), torch.amax(torch.abs(z))

    return want


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
        scaling(1.0, 1.0),
        ("bias",),
        parameters={"activation": ef.sigmoid, "scale_d": 4.0, "scale_aux": 0.25},
    ),
}


def data(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Whole numbers as factors, which make the accumulator exact, and random operands."""
    full = {name: torch.randn(M, N) for name in ("C", "C0", "C1", "residual1", "residual2", "Z")}
    return {
        **full,
        "A": torch.randint(-2, 3, (M, K)).to(dtype),
        "B": torch.randint(-2, 3, (K, N)).to(dtype),
        "bias": torch.randn(N),
        "mask": torch.randn(M, N) > 0,
    }


class Case(NamedTuple):
    """A functor, what it is handed, and the outputs wanted, with their error bounds."""

    functor: thread.Functor
    a: torch.Tensor
    b: torch.Tensor
    operands: dict[str, torch.Tensor]
    wanted: Any


def case(name: str, scale: ScaleType, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Case:
    """Row `name` in a scale type."""
    row, values, vectors = ROWS[name], data(dtype), (torch.randn(N), torch.randn(N))
    parameters, want = dict(row.parameters), row.want
    if name == "WithScalingAndAbsMax" and "alpha" not in scale.absent:
        scales = {"scale_a": 2.0, "scale_b": 0.25} | ({} if "beta" in scale.absent else {"scale_c": 3.0})
        parameters, want = parameters | scales, scaling(0.5, scales.get("scale_c", 1.0))
    pointers = tuple(vector.to(device) for vector in vectors)
    functor = row.functor(scale=scale, **written(scale, pointers), **parameters)
    alpha, beta = (bounded(x, EPS) for x in per_scale(scale, vectors))
    accum = bounded(values["A"].double() @ values["B"].double(), EPS)
    exact = {n: bounded(x, EPS) for n, x in values.items()}
    wanted = want(lambda x: alpha * x, lambda x: beta * x, accum, exact)
    operands = {"Z" if n == "mask" else n: values[n].to(device) for n in (*row.sources, *row.more)}
    return Case(functor, values["A"].to(device), values["B"].to(device), operands, wanted)


def assert_like(got: Any, want: Any) -> None:
    gots, wants = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for one, other in zip(gots, wants, strict=True):
        verdict = compare_bounded(one, other)
        assert verdict.wrong == 0, verdict.detail
        assert verdict.judged > 0.9 * verdict.total
