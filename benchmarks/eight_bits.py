"""Compare the GPU time of 8-bit products with PyTorch's, which have the same scales and outputs but no other epilogues.

    python benchmarks/eight_bits.py --save results.json [--shapes 4096x4096x4096] [--rounds 15]

`fp8` products have one scale for each row and one for each column. They are added up accurately or fast (`fast_accum`).
The peer is `torch._scaled_mm` with a scale for each row or for each matrix (`use_fast_accum`). `fused` adds a bias,
gelu and an fp8 D; `absmax` also finds the largest absolute value of D; in `SwiGLU` half of N is the gate, half is up.
`fp8 blocks` has DeepSeek's scales, 1 x 128 of A and 128 x 128 of B, beside PyTorch's if the device supports them.
`int8` products are stored as int32, beside `torch._int_mm`, or scaled and stored as bfloat16. All of a shape are
interleaved in one run. The mean error of the fp8 products, relative to the mean value, is measured as well.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gpu_timing import Backlog, interleave, measured, parser_of, timed
from timing import paired_ratio

import epifuse as ef

SHAPES = "8192x8192x8192,4096x14336x4096,4096x4096x4096,16384x4096x1024,4096x7168x2048,64x14336x4096,16x4096x14336"
E4M3, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
Shape = tuple[int, int, int]
Call = Callable[[], Any]


def plain(accum):
    """The product without scales."""
    D = accum
    return D


def scaled(accum, row, column):
    """The product times `row`, a scale for each column of D, and `column`, a scale for each row."""
    D = accum * row * column
    return D


def fused(accum, row, column, bias):
    """The scaled product with bias and gelu: what a quantised layer stores for the next one."""
    D = ef.gelu(accum * row * column + bias, approximate="tanh")
    return D


def with_absmax(accum, row, column, bias):
    """As `fused`, with the largest absolute value, from which the next scale is made."""
    D = ef.gelu(accum * row * column + bias, approximate="tanh")
    largest = ef.absmax(D)
    return D, largest


def swiglu(accum, row, column, bias):
    """As `with_absmax`, with SwiGLU instead of gelu."""
    gate, up = (accum * row * column + bias).chunk(2, dim=-1)
    D = ef.silu(gate) * up
    largest = ef.absmax(D)
    return D, largest


class Own(NamedTuple):
    """One variant of epifuse. `dtype` is that of A and B, `out` that of D, and `fast` whether sums of fp8 are added up
    fast. `blocks` says whether A and B have scales of blocks. `further` names the other outputs, which are float32."""

    epilogue: Callable[..., Any]
    dtype: torch.dtype
    out: torch.dtype
    fast: bool = False
    blocks: bool = False
    further: tuple[str, ...] = ()


OURS: Mapping[str, Own] = {
    "fp8 plain": Own(plain, E4M3, BF16),
    "fp8": Own(scaled, E4M3, BF16),
    "fp8 fused": Own(fused, E4M3, E4M3),
    "fp8 fused, absmax": Own(with_absmax, E4M3, E4M3, further=("largest",)),
    "fp8 SwiGLU, absmax": Own(swiglu, E4M3, E4M3, further=("largest",)),
    "fp8 blocks": Own(plain, E4M3, BF16, blocks=True),
    "fp8 blocks, fused": Own(fused, E4M3, E4M3, blocks=True),
    "fp8 fast, plain": Own(plain, E4M3, BF16, fast=True),
    "fp8 fast": Own(scaled, E4M3, BF16, fast=True),
    "fp8 fast, fused": Own(fused, E4M3, E4M3, fast=True),
    "int8": Own(plain, INT8, torch.int32),
    "int8 scaled": Own(scaled, INT8, BF16),
}
PAIRS = (
    ("fp8", "scaled_mm, by rows"),
    ("fp8 fast", "scaled_mm, by rows, fast"),
    ("fp8", "scaled_mm"),
    ("fp8 fast", "scaled_mm, fast"),
    ("fp8", "fp8 fast"),
    ("fp8 fused", "fp8 plain"),
    ("fp8 fused, absmax", "fp8 plain"),
    ("fp8 SwiGLU, absmax", "fp8 plain"),
    ("fp8 blocks", "fp8 plain"),
    ("fp8 blocks, fused", "fp8 fused"),
    ("fp8 blocks", "scaled_mm, by blocks"),
    ("fp8 fast, fused", "fp8 fast, plain"),
    ("int8", "int_mm"),
    ("int8 scaled", "int8"),
)
"""Pairs of variants whose times are compared round by round."""


class Inputs(NamedTuple):
    """The inputs of one shape.

    `matrices` are A and B by dtype, where B is the transpose of a weight. `operands` are the scales and a bias.
    `blocks` are block scales as PyTorch takes them: those of A are contiguous along M, those of the weight along K.
    """

    matrices: Mapping[torch.dtype, tuple[torch.Tensor, torch.Tensor]]
    operands: Mapping[str, torch.Tensor]
    blocks: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, shape: Shape) -> Inputs:
        """Make random inputs: normal numbers for fp8, and integers over the whole range for int8."""
        m, n, k = shape
        a, weight = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
        eight = (torch.randint(-128, 128, size, dtype=INT8, device="cuda") for size in ((m, k), (n, k)))
        whole, whole_weight = eight
        row, column = torch.rand(n, device="cuda") + 0.5, (torch.rand(m, 1, device="cuda") + 0.5) / k**0.5
        bias = torch.randn(n, device="cuda")
        return cls(
            {E4M3: (a.to(E4M3), weight.to(E4M3).t()), INT8: (whole, whole_weight.t())},
            {"row": row, "column": column, "bias": bias},
            (_rand(-(-k // 128), m).t() / k**0.5, _rand(-(-n // 128), -(-k // 128)).t()),
        )


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") + 0.5


def ours(own: Own, inputs: Inputs) -> tuple[Call, str]:
    """A bound launch of the best kernel, and the kernel's name."""
    a, b = inputs.matrices[own.dtype]
    if own.blocks:
        a, b = (ef.Scaled(*pair) for pair in zip((a, b), inputs.blocks, strict=True))
    names = own.epilogue.__code__.co_varnames[1 : own.epilogue.__code__.co_argcount]
    given = {name: inputs.operands[name] for name in names}
    asked, dtypes = ef.Constraints(fast_accum=own.fast), {"D": own.out, **dict.fromkeys(own.further, torch.float32)}
    made = ef.EpilogueArguments.partial(own.epilogue, given)
    outputs = ef.GemmArguments(a, b, epilogue=made, out_dtypes=dtypes).allocate()
    made = ef.EpilogueArguments(own.epilogue, **given, **{name: outputs[name] for name in dtypes})
    args = ef.GemmArguments(a, b, epilogue=made, constraints=asked)
    kernel = ef.get_kernels(args)[0]
    return kernel.bind(args), kernel.metadata.kernel_name


def peers(inputs: Inputs) -> dict[str, Call]:
    """Calls of PyTorch's 8-bit products. It takes scales by rows in the shapes (M, 1) and (1, N)."""
    (a, b), (whole, whole_b) = inputs.matrices[E4M3], inputs.matrices[INT8]
    one = torch.ones((), device=a.device)
    by_rows = inputs.operands["column"], inputs.operands["row"][None]

    def product(scales: tuple[torch.Tensor, torch.Tensor], *, fast: bool) -> Call:
        return lambda: torch._scaled_mm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=BF16, use_fast_accum=fast)

    return {
        "scaled_mm, by rows": product(by_rows, fast=False),
        "scaled_mm, by rows, fast": product(by_rows, fast=True),
        "scaled_mm": product((one, one), fast=False),
        "scaled_mm, fast": product((one, one), fast=True),
        "scaled_mm, by blocks": product(inputs.blocks, fast=False),
        "int_mm": lambda: torch._int_mm(whole, whole_b),
    }


def mean_errors(inputs: Inputs) -> dict[str, float]:
    """Mean error relative to the mean value, of fp8 products stored as float32. The first 256 rows are judged."""
    a, b = inputs.matrices[E4M3]
    a = a[:256]
    want = a.double() @ b.double()
    found = {
        name: ef.gemm(a, b, out_dtypes=torch.float32, fast_accum=fast)
        for name, fast in (("fp8", False), ("fp8 fast", True))
    }
    return {name: float((D.double() - want).abs().mean() / want.abs().mean()) for name, D in found.items()}


def measure(shape: Shape, rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Measure one shape: microseconds, ratios with their 95 % intervals, and errors."""
    inputs, calls, kernels = Inputs.of(shape), {}, {}
    for name, own in OURS.items():
        calls[name], kernels[name] = ours(own, inputs)
    skipped = {}
    for name, call in peers(inputs).items():
        try:
            call()
            calls[name] = call
        except (RuntimeError, ValueError) as error:  # _int_mm needs more than 16 rows; not all support blocks
            skipped[name] = str(error).splitlines()[0]
    seconds = interleave({name: [call] for name, call in calls.items()}, rounds, backlog)
    ratios = {
        f"{name} / {base}": [round(x, 4) for x in paired_ratio(seconds, name, base)]
        for name, base in PAIRS
        if base in seconds
    }
    return {
        "shape": list(shape),
        "kernels": kernels,
        "microseconds": {name: round(statistics.median(times) * 1e6, 2) for name, times in seconds.items()},
        "ratios": ratios,
        "mean_errors": mean_errors(inputs),
        "skipped": skipped,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    options = parser_of(__doc__, SHAPES).parse_args(argv)
    return measured(
        options,
        zip(options.shapes),
        measure,
        lambda row: f"{timed(row)}\n  mean errors {row['mean_errors']}, skipped {row['skipped']}",
    )


if __name__ == "__main__":
    sys.exit(main())
