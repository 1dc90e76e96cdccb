"""The binary cross-entropy of a layer's logits, summed to one number inside the layer's GEMM.

With logits f = x @ w + bias, labels C of 0 and 1: loss = -sum((C - 1) * f + log(clamp(sigmoid(f), 0.001, 0.999))) / M.

python examples/binary_cross_entropy.py --mnk 1024,2048,256
"""

import argparse
from collections.abc import Sequence
from typing import Any

import common
import torch

import epifuse as ef


def epilogue(accum: Any, C: Any, bias: Any, count: float) -> Any:
    """The clamp keeps the logarithm finite."""
    f = accum + bias
    loss = -ef.sum((C - 1) * f + ef.log(ef.clamp(ef.sigmoid(f), 0.001, 0.999))) / count
    return loss


def unfused(x: torch.Tensor, w: torch.Tensor, C: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """In PyTorch, one operation at a time."""
    f = x @ w + bias
    return {"loss": -torch.sum((C - 1) * f + torch.log(torch.clamp(torch.sigmoid(f), 0.001, 0.999))) / len(x)}


def make(options: argparse.Namespace) -> common.Layer:
    """The layer and its labels."""
    m, n, k = options.mnk
    x, w = common.normal(m, k, like=options), common.normal(k, n, like=options, scale=k**-0.5)
    C, bias = (torch.rand(m, n) < 0.1).to(w), common.normal(n, like=options)
    size = m * n * x.element_size() / 1e6
    return common.Layer(
        fused=lambda gemm: {"loss": gemm(x, w, epilogue=epilogue, C=C, bias=bias, count=m)},
        eager=lambda: unfused(x, w, C, bias),
        exact=lambda: unfused(x.double(), w.double(), C.double(), bias.double()),
        remark=f"The {m} x {n} logits, {size:.1f} MB of {str(x.dtype).removeprefix('torch.')}, were never written.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    meaning = "samples, labels, features"
    sizes = common.Sizes(checked=(1024, 1024, 256), cpu=(2048, 4096, 256), gpu=(16384, 4096, 1024))
    parser = common.layer_command_line(str(__doc__).split("\n")[0], sizes, meaning)
    return common.run_layer(parser, arguments, make)


if __name__ == "__main__":
    raise SystemExit(main())
