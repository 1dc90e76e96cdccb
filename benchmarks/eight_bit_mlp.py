"""GPU time of the work between the two products of an fp8 MLP: in the first product's epilogue, or in a second kernel.

    python benchmarks/eight_bit_mlp.py --save results.json [--shapes 8192x14336x4096] [--rounds 15]

The first product is of e4m3, with one scale for each row and one for each column. It ends with gelu of N columns, or
with SwiGLU of 2 N columns, and stores e4m3 for the second product. `static` divides by a given scale. `delayed` does
so too, and finds the largest absolute value, from which the next step's scale is made. `1 x 128` finds a scale for each
128 columns of a row and stores it. Each is compared with the same product that stores bfloat16, and one kernel by
`torch.compile` that does the rest. `saved` is the share of the second kernel's time that is saved; 1 is all of it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from gpu_timing import Backlog, interleave, measured, parser_of
from parts import bound
from timing import paired_ratio
from torch.nn import functional as F

import epifuse as ef

SHAPES = "8192x14336x4096,4096x4096x4096,16384x4096x1024,4096x7168x2048"
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
LARGEST, BLOCK = 448.0, 128
Shape = tuple[int, int, int]
Activation = Callable[[Any], Any]


def gelu(x):
    """The tanh form, of all columns."""
    return F.gelu(x, approximate="tanh")


def swiglu(x):
    """Of two halves of the columns: the result has half as many."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: Mapping[str, tuple[Activation, int]] = {"gelu": (gelu, 1), "SwiGLU": (swiglu, 2)}
"""Each activation with the number of columns of the product that it takes for one column of the result."""


def static(activation: Activation) -> Callable[..., Any]:
    """The epilogue that divides by a given scale."""

    def epilogue(accum, row, column, scale):
        D = activation(accum * row * column) / scale
        return D

    return epilogue


def delayed(activation: Activation) -> Callable[..., Any]:
    """The epilogue that divides by a given scale, and finds the largest absolute value for the next one."""

    def epilogue(accum, row, column, scale):
        h = activation(accum * row * column)
        D = h / scale
        largest = ef.absmax(h)
        return D, largest

    return epilogue


def blocks(activation: Activation) -> Callable[..., Any]:
    """The epilogue that finds and stores a scale for each block of 128 columns of a row."""

    def epilogue(accum, row, column):
        of_row = activation(accum * row * column).unflatten(-1, (-1, BLOCK))
        scale = ef.block_scale(ef.absmax(of_row, dim=-1, keepdim=True))
        D = (of_row / scale).flatten(-2, -1)
        return D, scale

    return epilogue


def product(accum, row, column):
    """The scaled product without an activation, which the second kernel reads."""
    D = accum * row * column
    return D


def narrow(x: torch.Tensor) -> torch.Tensor:
    """Convert `x` to e4m3. It is clamped first, because PyTorch converts values that are too large to NaN."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def quantised(kind: str, activation: Activation) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """The function, in PyTorch, that the second kernel between the two products computes."""

    def made(stored: torch.Tensor, scale: torch.Tensor) -> Any:
        h = activation(stored.float())
        if kind == "1 x 128":
            of_row = h.unflatten(-1, (-1, BLOCK))
            scale = of_row.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
            return narrow(of_row / scale).flatten(-2, -1), scale
        return (narrow(h / scale), h.abs().amax()) if kind == "delayed" else narrow(h / scale)

    return made


KINDS: Mapping[str, tuple[Callable[[Activation], Callable[..., Any]], Mapping[str, torch.dtype]]] = {
    "static": (static, {"D": E4M3}),
    "delayed": (delayed, {"D": E4M3, "largest": F32}),
    "1 x 128": (blocks, {"D": E4M3, "scale": F32}),
}
"""For each kind, the function that makes its epilogue, and the dtypes of the outputs."""


def operands(shape: Shape, device: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A, B, and scales with which the product has values of a layer's size."""
    m, n, k = shape
    a, weight = (torch.randn(size, device=device).to(E4M3) for size in ((m, k), (n, k)))
    row, column = torch.rand(n, device=device) + 0.5, (torch.rand(m, 1, device=device) + 0.5) / k**0.5
    return a, weight.t(), {"row": row, "column": column, "scale": torch.full((), 0.02, device=device)}


def calls_of(
    name: str, shape: Shape, device: str = "cuda", kinds: Iterable[str] = (), *, compiled: bool = True
) -> dict[str, Callable[[], Any]]:
    """Calls by name: the product alone, and each kind fused and with a second kernel. No `kinds` are all kinds."""
    activation, parts = ACTIVATIONS[name]
    m, n, k = shape
    a, b, given = operands((m, n * parts, k), device)
    scale = given.pop("scale")
    stored = torch.empty(m, n * parts, dtype=BF16, device=device)
    made = {"product": bound("product", product, a, b, {**given, "D": stored})}
    for kind in kinds or KINDS:
        epilogue, dtypes = KINDS[kind]
        needed = given if kind == "1 x 128" else {**given, "scale": scale}
        made[kind] = bound(kind, epilogue(activation), a, b, needed, out_dtypes=dict(dtypes))
        behind = quantised(kind, activation)
        behind = torch.compile(behind, dynamic=False) if compiled else behind
        made[f"{kind}, separate"] = _followed(made["product"], behind, stored, scale)
    return made


def _followed(first: Callable[[], Any], behind: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
    def both() -> Any:
        first()
        return behind(*inputs)

    return both


def saved(seconds: Mapping[str, Sequence[float]], kind: str) -> tuple[float, float, float]:
    """The share of the second kernel's time that is saved: the median over the rounds, and its 95 % interval."""
    rounds = [*zip(seconds["product"], seconds[kind], seconds[f"{kind}, separate"], strict=True)]
    times = {
        "saved": [apart - fused for _, fused, apart in rounds],
        "all": [apart - alone for alone, _, apart in rounds],
    }
    return paired_ratio(times, "saved", "all")


def measure(name: str, shape: Shape, rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Microseconds of each call, and the share of time that each kind saves."""
    torch._dynamo.reset()  # torch.compile compiles a function for eight shapes; the ninth would run eager
    seconds = interleave({key: [call] for key, call in calls_of(name, shape).items()}, rounds, backlog)
    return {
        "activation": name,
        "shape": list(shape),
        "microseconds": {key: round(statistics.median(times) * 1e6, 2) for key, times in seconds.items()},
        "saved": {kind: [round(x, 4) for x in saved(seconds, kind)] for kind in KINDS},
    }


def told(row: Mapping[str, Any]) -> str:
    """A row of the results as two lines of text."""
    times = ", ".join(f"{name} {time}" for name, time in row["microseconds"].items())
    shares = ", ".join(f"{kind} {share[0]:.3f}" for kind, share in row["saved"].items())
    return f"{row['activation']}, {' x '.join(map(str, row['shape']))}: {times}\n  saved: {shares}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    options = parser_of(__doc__, SHAPES).parse_args(argv)
    places = [(name, shape) for shape in options.shapes for name in ACTIVATIONS]
    return measured(options, places, measure, told)


if __name__ == "__main__":
    sys.exit(main())
