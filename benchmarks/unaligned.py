"""GPU time on Hopper of products whose A and B TMA cannot address, and of the mma.sync kernel for these and others.

    python benchmarks/unaligned.py --save results.json [--shapes 4095x4095x4097,4096x4096x4096] [--rounds 15]

All is bfloat16; A lies by rows, and B is the transpose of a weight by rows. If K is not a multiple of 8, TMA cannot
address A and B. Then `plain` is compared with `torch.mm`, and `bias gelu` with the same by torch.compile, both with the
kernel that epifuse chooses by itself. `plain` is also compared with `padded`, the same product of A and B whose rows
begin at multiples of 16 bytes; the difference is the time of the copies. `mma.sync` asks for the mma.sync kernel. It is
compared with `torch.mm`, with `plain`, and if A and B are aligned with Triton using mma.sync (triton_mma_sync.py). All
of a shape are interleaved in one run, after epifuse's results were compared with float64. The table shows the largest
ratio that is accepted. The rate of a large copy within the GPU, of bytes read and written, shows what memory reaches.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gemm_cases import CASES, Case, Operands, cublas, shapes
from gemm_variants import compare
from gpu_timing import Backlog, interleave, measured, parser_of
from timing import paired_ratio

import epifuse as ef

Shape = tuple[int, int, int]
Call = Callable[[], Any]
PLAIN, GELU = CASES[:2]
MULTISTAGE = "multistage"
LARGE, SMALL = "4095x4095x4097,8191x5003x1027", "1000x1001x999,333x777x65,4096x4096x61"
ALIGNED = "4096x4096x4096,8192x8192x2048,4096x14336x4096"
SHAPES = f"{LARGE},{SMALL},{ALIGNED}"
ROWS = 256  # the number of rows that are compared with float64


class Own(NamedTuple):
    """One variant of epifuse: its case, the schedule that is asked for, and whether rows of A and B are padded."""

    case: Case
    schedule: str | None = None
    padded: bool = False


class Pair(NamedTuple):
    """Two variants that are compared round by round, and the largest accepted ratio of times, or None."""

    own: str
    peer: str
    most: float | None = None


def is_aligned(shape: Shape) -> bool:
    """Whether TMA can address A and B: their rows begin at multiples of 16 bytes."""
    return shape[2] % 8 == 0


def variants(shape: Shape) -> Mapping[str, Own]:
    """epifuse's variants for a shape, by name."""
    found = {"plain": Own(PLAIN), "mma.sync": Own(PLAIN, MULTISTAGE)}
    return found if is_aligned(shape) else {**found, "bias gelu": Own(GELU), "padded": Own(PLAIN, padded=True)}


def pairs(shape: Shape) -> tuple[Pair, ...]:
    """The comparisons for a shape. For aligned A and B, mma.sync has to reach 0.55 of cuBLAS's rate."""
    if is_aligned(shape):
        return (
            Pair("mma.sync", "torch.mm", round(1 / 0.55, 3)),
            Pair("mma.sync", "Triton", 1.0),
            Pair("mma.sync", "plain"),
        )
    most = 0.28 if shape in shapes(LARGE) else 0.9
    return (
        Pair("plain", "torch.mm", most),
        Pair("bias gelu", "torch.compile", 0.9),
        Pair("plain", "padded"),
        Pair("mma.sync", "torch.mm"),
        Pair("mma.sync", "plain"),
    )


def padded(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of the matrix whose rows begin at multiples of 16 bytes."""
    rows, columns = matrix.shape
    return matrix.new_zeros(rows, -(-columns // 8) * 8)[:, :columns].copy_(matrix)


def chosen(own: Own, x: Operands, cc: int | None = None) -> tuple[ef.GemmArguments, ef.Kernel]:
    """The best kernel for the device, or for the compute capability `cc`. Raises `RuntimeError` if there is none."""
    if own.padded:
        x = x._replace(a=padded(x.a), b=padded(x.b.t()).t())
    args = own.case.arguments(x, ef.Constraints(schedule=own.schedule))
    found = ef.get_kernels(args, cc=cc, limit=1)
    if not found:
        raise RuntimeError(str(ef.explain(args, cc=cc)))
    return args, found[0]


def ours(own: Own, x: Operands) -> tuple[Call, str]:
    """A bound launch of the best kernel, and the kernel's name."""
    args, kernel = chosen(own, x)
    return kernel.bind(args), kernel.metadata.kernel_name


def peers(shape: Shape, x: Operands) -> dict[str, Call]:
    """Calls of PyTorch, and of Triton if A and B are aligned, by name."""
    found: dict[str, Call] = {"torch.mm": lambda: cublas(x)}
    if is_aligned(shape):
        found["Triton"] = importlib.import_module("triton_mma_sync").peer(x.a, x.b, torch.empty_like(x.D))
    else:
        torch._dynamo.reset()  # torch.compile compiles a function for eight shapes only
        compiled = torch.compile(GELU.eager, dynamic=False)
        found["torch.compile"] = lambda: compiled(x.a, x.b, x.bias, x.C)
    return found


def error(own: Own, call: Call, x: Operands) -> float:
    """The relative error of random rows against float64. Raises `WrongResultError` above one step of bfloat16."""
    x.D.fill_(float("nan"))
    call()
    rows = torch.randperm(len(x.a), device=x.a.device)[:ROWS]
    want = own.case.eager(*(tensor.double() for tensor in (x.a[rows], x.b, x.bias, x.C[rows])))
    return round(compare((x.D[rows],), want)[0], 6)


def measure(shape: Shape, rounds: int, backlog: Backlog | None, device: str = "cuda") -> dict[str, Any]:
    """Measure one shape: kernels, errors, microseconds, and ratios with their 95 % intervals."""
    x, calls, kernels, errors = Operands.random(*shape, device), {}, {}, {}
    for name, own in variants(shape).items():
        calls[name], kernels[name] = ours(own, x)
        errors[name] = error(own, calls[name], x)
    calls |= peers(shape, x)
    for call in calls.values():
        call()
    seconds = interleave({name: [call] for name, call in calls.items()}, rounds, backlog)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "shape": list(shape),
        "kernels": kernels,
        "errors": errors,
        "microseconds": {name: round(median * 1e6, 2) for name, median in medians.items()},
        "ratios": {
            f"{own} / {peer}": [round(x, 4) for x in paired_ratio(seconds, own, peer)] for own, peer, _ in pairs(shape)
        },
    }


COLUMNS = "{:<16} {:<15} {:<13} {:>9} {:>9} {:>6}  {:<14}  {:<11}  {}"
HEAD = COLUMNS.format("shape", "case", "peer", "us", "peer, us", "ratio", "95 %", "limit", "kernel")


def lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table for a row."""
    shape, times, kernels = row["shape"], row["microseconds"], row["kernels"]
    for own, peer, most in pairs(tuple(shape)):
        middle, low, high = row["ratios"][f"{own} / {peer}"]
        yield COLUMNS.format(
            "x".join(map(str, shape)),
            own,
            peer,
            times[own],
            times[peer],
            f"{middle:.3f}",
            f"{low:.3f} to {high:.3f}",
            "" if most is None else f"{most} {'holds' if low <= most else 'FAILS'}",
            kernels[own],
        )


def copied(rounds: int, backlog: Backlog) -> dict[str, float]:
    """Gigabytes a second, read and written, of a large copy. Prints it with the head of the table."""
    source = torch.empty_like(backlog.buffer).random_()
    target = torch.empty_like(source)
    (times,) = interleave({"copy": [lambda: target.copy_(source)]}, rounds, backlog).values()
    found = round(2 * source.nbytes / statistics.median(times) / 1e9, 1)
    print(f"a copy within the GPU: {found} GB/s, read and written\n{HEAD}", flush=True)
    return {"copy_gigabytes_a_second": found}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    options = parser_of(__doc__, SHAPES).parse_args(argv)
    return measured(options, zip(options.shapes), measure, lambda row: "\n".join(lines(row)), copied)


if __name__ == "__main__":
    sys.exit(main())
