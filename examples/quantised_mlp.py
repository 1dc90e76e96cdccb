"""Dynamic quantisation per tensor: one GEMM makes the activations and their largest size, the next uses it as scale.

h = gelu(x @ w1 + bias) and absmax(h) in one GEMM; q = h scaled to 8 bits; then (q @ q2) * scale in the second, where q2
are the second weights in 8 bits. The scale stays on the device: nobody waits for it.

python examples/quantised_mlp.py --mnk 512,1024,512 --quantised float8_e4m3fn
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import common
import torch

import epifuse as ef

TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest number of each."""


class Quantised(NamedTuple):
    """Values of 8 bits, and the number that makes them the values they stand for."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> "Quantised":
        """One elementwise pass: the largest size is known."""
        scaled = x.float() * (TOP[dtype] / largest)
        return Quantised((scaled if dtype.is_floating_point else scaled.round()).to(dtype), largest / TOP[dtype])

    def held_as(self, dtype: torch.dtype) -> "Quantised":
        """The same values in a dtype that holds them; nothing happens where they have it."""
        return Quantised(self.values.to(dtype), self.scale)


def activate(accum: Any, bias: Any) -> Any:
    """The activations, and the largest absolute value among them."""
    h = ef.gelu(accum + bias)
    largest = ef.absmax(h)
    return h, largest


def rescale(accum: Any, scale: Any, weight_scale: Any) -> Any:
    """Both scales are one number each, read from the device."""
    D = accum * (scale * weight_scale)
    return D


class Mlp(NamedTuple):
    """Two linear layers."""

    x: torch.Tensor
    first: torch.Tensor
    bias: torch.Tensor
    second: torch.Tensor

    def double(self) -> "Mlp":
        """In float64."""
        return Mlp(*(tensor.double() for tensor in self))


def fused(gemm: common.Gemm, mlp: Mlp, weights: Quantised, narrow: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights have the dtype in which they are multiplied: `narrow` itself, or one that holds its values."""
    h, largest = gemm(mlp.x, mlp.first, epilogue=activate, bias=mlp.bias)
    q = Quantised.of(h, largest, narrow).held_as(weights.values.dtype)
    scales = {"scale": q.scale, "weight_scale": weights.scale}
    return {"D": gemm(q.values, weights.values, epilogue=rescale, out_dtypes=h.dtype, **scales)}


def unfused(mlp: Mlp, weights: Quantised, narrow: torch.dtype) -> dict[str, torch.Tensor]:
    """In PyTorch, which multiplies the 8-bit values in a dtype that holds their sums too."""
    h = torch.nn.functional.gelu(mlp.x @ mlp.first + mlp.bias)
    q = Quantised.of(h, h.abs().amax().float(), narrow).held_as(weights.values.dtype)
    return {"D": ((q.values @ weights.values) * (q.scale * weights.scale)).to(h.dtype)}


def exact(mlp: Mlp) -> dict[str, torch.Tensor]:
    """Without quantisation: its error is most of what is shown."""
    return {"D": torch.nn.functional.gelu(mlp.x @ mlp.first + mlp.bias) @ mlp.second}


def multiplied_as(weights: Quantised, x: torch.Tensor) -> torch.dtype:
    """The 8-bit dtype itself where some kernel multiplies it, else bfloat16, which holds each of its values exactly."""
    narrow = weights.values.dtype
    q = torch.empty(len(x), len(weights.values), dtype=narrow, device=x.device)
    named = {"scale": weights.scale, "weight_scale": weights.scale}
    explanation = ef.explain(common.described(q, weights.values, epilogue=rescale, out_dtypes=x.dtype, **named))
    if explanation.plan:
        return narrow
    print(f"multiplied as bfloat16, for no kernel multiplies {narrow} here:")
    print(*(f"  {reason}" for reason in explanation.selection.reasons), sep="\n")
    return torch.bfloat16


def make(options: argparse.Namespace) -> common.Layer:
    """An MLP whose second weights are quantised once."""
    m, n, k = options.mnk
    x, bias = common.normal(m, k, like=options), common.normal(n, like=options, scale=0.1)
    first, second = (common.normal(*shape, like=options, scale=shape[0] ** -0.5) for shape in ((k, n), (n, k)))
    second = second.t().contiguous().t()  # as Hopper multiplies 8 bits: stored as (N, K)
    mlp, weights = Mlp(x, first, bias, second), Quantised.of(second, second.abs().amax().float(), options.quantised)
    ours = weights.held_as(multiplied_as(weights, x))
    theirs = weights.held_as(torch.bfloat16 if x.dtype == torch.float16 else x.dtype)
    size = m * n * x.element_size() / 1e6
    return common.Layer(
        fused=lambda gemm: fused(gemm, mlp, ours, options.quantised),
        eager=lambda: unfused(mlp, theirs, options.quantised),
        exact=lambda: exact(mlp.double()),
        remark=f"Finding the largest of {m} x {n} activations cost no pass over their {size:.1f} MB.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    meaning = "tokens, hidden width, width of input and output"
    sizes = common.Sizes(checked=(512, 1024, 256), cpu=(2048, 4096, 256), gpu=(16384, 4096, 1024))
    parser = common.layer_command_line(str(__doc__).split("\n")[0], sizes, meaning)
    parser.add_argument("--quantised", type=common.dtype, choices=tuple(TOP), default=torch.int8, metavar="dtype")
    return common.run_layer(parser, arguments, make)


if __name__ == "__main__":
    raise SystemExit(main())
