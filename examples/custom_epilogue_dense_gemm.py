"""D = alpha * A @ B + beta * C + x_factor * X, and Y = A @ B, in one kernel: an epilogue as a method.

python examples/custom_epilogue_dense_gemm.py --mnkl 512,256,128,1 --alpha 2 --beta 0.5 --x_factor 0.25
"""

import argparse
from collections.abc import Sequence
from typing import Any

import common
import torch

import epifuse as ef


class DenseGemmAlphaBeta(ef.DenseGemm):
    """A batched GEMM with two operands, three numbers and two outputs."""

    def create_arguments(  # type: ignore[override]  # with the dtypes of its own tensors
        self,
        l: int,
        m: int,
        n: int,
        k: int,
        a_major: str,
        b_major: str,
        cd_major: str,
        ab_dtype: torch.dtype,
        *dtypes: torch.dtype,
    ) -> tuple[torch.Tensor, ...]:
        """A, B, and C, X, D, Y of the dtypes given."""
        standard = super().create_arguments(l, m, n, k, a_major, b_major, cd_major, ab_dtype)
        return (*standard, *(self.matrix(l, m, n, cd_major == "m", dtype) for dtype in dtypes))

    def epilogue_operation(
        self, accumulator: Any, c: Any, x: Any, alpha: float, beta: float, x_factor: float
    ) -> tuple[Any, Any]:
        """Written on tensors; it runs on each tile while the tile is at hand."""
        y = accumulator
        d = accumulator * alpha + c * beta + x * x_factor
        return (d, y)


def make(options: argparse.Namespace) -> tuple[ef.DenseGemm, tuple[torch.Tensor, ...], dict[str, float]]:
    """The GEMM, its tensors and its numbers."""
    m, n, k, l = options.mnkl
    gemm = DenseGemmAlphaBeta(
        options.acc_dtype, False, options.mma_tiler_mn, options.cluster_shape_mn, device=options.device
    )
    majors = (options.a_major, options.b_major, options.cd_major)
    dtypes = (options.c_dtype, options.x_dtype, options.d_dtype, options.y_dtype)
    tensors = gemm.create_arguments(l, m, n, k, *majors, options.ab_dtype, *dtypes)
    return gemm, tensors, {"alpha": options.alpha, "beta": options.beta, "x_factor": options.x_factor}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = common.command_line(str(__doc__).split("\n")[0], "c", "x", "d", "y")
    for name, default in (("alpha", 1.0), ("beta", 1.0), ("x_factor", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    return common.run(parser, arguments, make)


if __name__ == "__main__":
    raise SystemExit(main())
