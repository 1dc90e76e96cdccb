"""Compare the GPU time of losses and choices of logits that are not stored with the product that stores the logits, and
with torch.compile.

    python benchmarks/vocabulary.py --save results.json [--shapes 8192x128256x4096] [--rounds 9]

N is the size of a vocabulary. `cross-entropy` has one target for each row, and uses `logsumexp`. `log-probability` is
that of the target, by `log_softmax(x).gather`; `clipped` is a policy's loss made from it. `token` is the index of the
largest logit. `cuBLAS` stores the logits in bfloat16. All of a shape are interleaved in one run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpu_timing import Backlog, beside, measured, parser_of, that_run, told
from projection import ours, read_by

SHAPES = "8192x128256x4096,64x128256x4096,4096x151936x2048"


def cross_entropy(accum, target):
    """The cross-entropy of each row."""
    loss = accum.logsumexp(-1, keepdim=True) - accum.gather(-1, target)
    return loss


def log_probability(accum, target):
    """The log-probability of each row's target."""
    p = torch.log_softmax(accum, dim=-1).gather(-1, target)
    return p


def clipped(accum, target, before, advantage):
    """The clipped loss of a policy, for each row."""
    p = torch.log_softmax(accum, dim=-1).gather(-1, target)
    ratio = torch.exp(p - before)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return loss


def token(accum):
    """The greedy choice of a token in each row."""
    i = accum.argmax(dim=-1)
    return i


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "cross-entropy": cross_entropy,
    "log-probability": log_probability,
    "clipped": clipped,
    "token": token,
}


def peers(a: torch.Tensor, b: torch.Tensor, given: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """The product and each function, compiled by torch.compile."""
    torch._dynamo.reset()  # torch.compile compiles a function for eight shapes only
    found: dict[str, Callable[[], Any]] = {}
    for name, function in FUNCTIONS.items():
        own = read_by(function, given)

        def unfused(a, b, function=function, own=own):
            return function((a @ b).float(), **own)

        compiled = torch.compile(unfused, dynamic=False)
        found[f"torch.compile, {name}"] = lambda compiled=compiled: compiled(a, b)
    return found


def measure(m: int, n: int, k: int, rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Measure one shape: microseconds, and ratios to cuBLAS's product with their 95 % intervals."""
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().t()
    given = {
        "target": torch.randint(n, (m, 1), device="cuda"),
        "before": torch.full((m, 1), -11.0, device="cuda"),
        "advantage": torch.randn(m, 1, device="cuda"),
    }
    logits = torch.empty(m, n, dtype=a.dtype, device="cuda")
    calls: dict[str, Callable[[], Any]] = {"cuBLAS": lambda: torch.mm(a, b, out=logits)}
    calls |= {name: ours(name, function, a, b, given) for name, function in FUNCTIONS.items()}
    calls |= that_run(peers(a, b, given))
    return {"shape": [m, n, k], **beside(calls, "cuBLAS", rounds, backlog)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    options = parser_of(__doc__, SHAPES).parse_args(argv)
    return measured(options, options.shapes, measure, lambda row: f"{'x'.join(map(str, row['shape']))}: {told(row)}")


if __name__ == "__main__":
    sys.exit(main())
