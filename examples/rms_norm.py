"""RMSNorm between two GEMMs without a pass of its own: the first sums the squares, the second applies the root.

x = residual + a @ w1 and the sum of squares of each row in one GEMM; then (x * rsqrt(ss / K + eps) * weight) @ w2 is
(x @ (weight[:, None] * w2)) * rsqrt(ss / K + eps), for a factor of a row commutes with the product.

python examples/rms_norm.py --mnk 512,2048,1024
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import common
import torch

import epifuse as ef

EPS = 1e-6


class Weights(NamedTuple):
    """Of the two products, and of the norm between them."""

    first: torch.Tensor
    norm: torch.Tensor
    second: torch.Tensor

    def double(self) -> "Weights":
        """In float64."""
        return Weights(*(weight.double() for weight in self))


def add_and_sum(accum: Any, residual: Any) -> Any:
    """The squares are those of the float32 values, before x is stored."""
    x = accum + residual
    ss = ef.sum_of_squares(x, dim=-1, keepdim=True)
    return x, ss


def normalise(accum: Any, ss: Any, width: float, eps: float) -> Any:
    """`ss` is a column: one factor a row."""
    D = accum * ef.rsqrt(ss / width + eps)
    return D


def fused(
    gemm: common.Gemm, a: torch.Tensor, residual: torch.Tensor, first: torch.Tensor, folded: torch.Tensor
) -> dict[str, torch.Tensor]:
    """`folded` is the second weight with the norm's, made once."""
    x, ss = gemm(a, first, epilogue=add_and_sum, residual=residual)
    return {"x": x, "D": gemm(x, folded, epilogue=normalise, ss=ss, width=x.shape[-1], eps=EPS)}


def unfused(a: torch.Tensor, residual: torch.Tensor, weights: Weights) -> dict[str, torch.Tensor]:
    """In PyTorch."""
    x = residual + a @ weights.first
    normal = torch.nn.functional.rms_norm(x, x.shape[-1:], weights.norm, EPS)
    return {"x": x, "D": normal @ weights.second}


def make(options: argparse.Namespace) -> common.Layer:
    """The end of one block and the beginning of the next."""
    m, n, k = options.mnk
    a, residual = (common.normal(m, k, like=options) for _ in range(2))
    first, second = (common.normal(k, extent, like=options, scale=k**-0.5) for extent in (k, n))
    weights = Weights(first, common.normal(k, like=options, scale=0.1) + 1, second)
    folded = weights.norm[:, None] * weights.second
    size = m * k * a.element_size()
    return common.Layer(
        fused=lambda gemm: fused(gemm, a, residual, first, folded),
        eager=lambda: unfused(a, residual, weights),
        exact=lambda: unfused(a.double(), residual.double(), weights.double()),
        remark=f"The norm read {m * 4 / 1e3:.1f} KB of sums; its own pass reads and writes {2 * size / 1e6:.1f} MB.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    sizes = common.Sizes(checked=(512, 1024, 512), cpu=(4096, 2048, 512), gpu=(16384, 4096, 2048))
    parser = common.layer_command_line(str(__doc__).split("\n")[0], sizes, "tokens, outputs, hidden width")
    return common.run_layer(parser, arguments, make)


if __name__ == "__main__":
    raise SystemExit(main())
