"""The backward pass of bias and GELU in the GEMM that makes their gradient: dx, and dbias as its column sums.

Of y = gelu(x) @ w with x = ... + bias, and dy given: dx = dgelu(dy @ w.T, x), dbias = dx summed over the rows.

python examples/bias_gradient.py --mnk 1024,2048,512
"""

import argparse
from collections.abc import Sequence
from typing import Any

import common
import torch

import epifuse as ef


def epilogue(accum: Any, x: Any) -> Any:
    """`accum` is the gradient of gelu(x), and `x` is what the forward pass kept."""
    dx = ef.dgelu(accum, x)
    dbias = ef.sum(dx, dim=0)
    return dx, dbias


def fused(gemm: common.Gemm, dy: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sums are those of the float32 values, before dx is stored."""
    dx, dbias = gemm(dy, w.t(), epilogue=epilogue, x=x)
    return {"dx": dx, "dbias": dbias}


def unfused(dy: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """In PyTorch: a product, a pass for the derivative, a pass for the sums."""
    dx = torch.ops.aten.gelu_backward(dy @ w.t(), x)
    return {"dx": dx, "dbias": dx.sum(dim=0)}


def differentiated(dy: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """By autograd, from the forward pass."""
    bias = torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device, requires_grad=True)
    biased = x + bias
    dx, dbias = torch.autograd.grad(torch.nn.functional.gelu(biased), (biased, bias), dy @ w.t())
    return {"dx": dx, "dbias": dbias}


def make(options: argparse.Namespace) -> common.Layer:
    """The second layer of an MLP, and the gradient of what it returned."""
    m, n, k = options.mnk
    dy, x = common.normal(m, k, like=options), common.normal(m, n, like=options)
    w = common.normal(n, k, like=options, scale=k**-0.5)
    size = m * n * x.element_size() / 1e6
    return common.Layer(
        fused=lambda gemm: fused(gemm, dy, w, x),
        eager=lambda: unfused(dy, w, x),
        exact=lambda: differentiated(dy.double(), w.double(), x.double()),
        remark=f"dx, {size:.1f} MB, was written once; eager PyTorch writes it twice and reads it twice.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    meaning = "tokens, hidden width, width of the layer's output"
    sizes = common.Sizes(checked=(512, 1024, 256), cpu=(2048, 4096, 256), gpu=(16384, 4096, 1024))
    parser = common.layer_command_line(str(__doc__).split("\n")[0], sizes, meaning)
    return common.run_layer(parser, arguments, make)


if __name__ == "__main__":
    raise SystemExit(main())
