"""D = activation(Aux) with Aux = alpha * scale_a * scale_b * A @ B + beta * scale_c * C + bias, both stored.

python examples/activation_custom_epilogue_dense_gemm.py --mnkl 512,256,128,1 --activation gelu --bias 0.5
"""

import argparse
from collections.abc import Sequence
from typing import Any

import common
import torch

import epifuse as ef

ACTIVATIONS = ("identity", "relu", "leaky_relu", "tanh", "sigmoid", "silu", "hardswish", "gelu")


class DenseGemmActivation(ef.DenseGemm):
    """The activation is a function that the object holds."""

    def __init__(self, activation: str, leaky_relu_alpha: float, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self.name, self.slope = activation, leaky_relu_alpha
        self.function = getattr(ef, activation)

    def activation(self, x: Any) -> Any:
        """The function; leaky_relu with the object's slope. Which one it is, is decided while parsing."""
        return ef.leaky_relu(x, self.slope) if self.name == "leaky_relu" else self.function(x)

    def epilogue_operation(
        self,
        accumulator: Any,
        c: Any,
        alpha: float,
        beta: float,
        bias: float,
        scale_a: float,
        scale_b: float,
        scale_c: float,
    ) -> tuple[Any, Any]:
        """The scales are multiplied on the host: what is left is one factor each."""
        aux = (alpha * scale_a * scale_b) * accumulator + (beta * scale_c) * c + bias
        d = self.activation(aux)
        return (d, aux)


def make(options: argparse.Namespace) -> tuple[ef.DenseGemm, tuple[torch.Tensor, ...], dict[str, float]]:
    """The GEMM, its tensors and its numbers."""
    m, n, k, l = options.mnkl
    kernel = (options.acc_dtype, False, options.mma_tiler_mn, options.cluster_shape_mn)
    gemm = DenseGemmActivation(options.activation, options.leaky_relu_alpha, *kernel, device=options.device)
    majors = (options.a_major, options.b_major, options.cd_major)
    standard = gemm.create_arguments(l, m, n, k, *majors, options.ab_dtype)
    dtypes = (options.c_dtype, options.d_dtype, options.aux_dtype)
    more = (gemm.matrix(l, m, n, options.cd_major == "m", dtype) for dtype in dtypes)
    scalars = ("alpha", "beta", "bias", "scale_a", "scale_b", "scale_c")
    return gemm, (*standard, *more), {name: getattr(options, name) for name in scalars}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = common.command_line(str(__doc__).split("\n")[0], "c", "d", "aux")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="relu")
    defaults = {"alpha": 1.0, "beta": 1.0, "bias": 0.0, "scale_a": 1.0, "scale_b": 1.0, "scale_c": 1.0}
    for name, default in {**defaults, "leaky_relu_alpha": 0.01}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    return common.run(parser, arguments, make)


if __name__ == "__main__":
    raise SystemExit(main())
