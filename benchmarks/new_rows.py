"""Measure what a new number of rows costs the host: a call with its gradients on the CPU, and planning for Hopper.

    python benchmarks/new_rows.py --save results.json
    PYTHONPATH=/tmp/before/src python benchmarks/new_rows.py    # another tree

Matrices are small, so that the host's work is most of the time. Each figure is the median, in milliseconds, over 15
numbers of rows that an epilogue gets for the first time, and over the same numbers once more. The epilogue itself has
been called before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import command, machine, save
from torch.nn import functional as F

import epifuse as ef

K, N = 32, 64
BEFORE, ROWS = (40, 41), range(70, 85)


def loss(accum, labels):
    """The mean loss of a classifier."""
    return F.cross_entropy(accum, labels)


def losses(accum, labels):
    """The loss of each row."""
    return F.cross_entropy(accum, labels, reduction="none")


def turned(accum):
    """A rotation of pairs of neighbouring columns."""
    x, y = accum.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([x - y, x + y], -1).flatten(-2)


def dropped(accum):
    """Dropout, whose mask depends on the number of an element."""
    return ef.dropout(accum, 0.1, 3)


def gate(accum):
    """SwiGLU of two halves."""
    g, u = accum.chunk(2, -1)
    return F.silu(g) * u


def heads(accum):
    """RMSNorm of each head."""
    h = accum.unflatten(-1, (-1, 16))
    return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)).flatten(-2)


def rotated(x, cos, sin):
    """Rotate heads of 128 columns."""
    a, b = x.unflatten(-1, (-1, 128)).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def projection(accum, cos, sin):
    """q, k and v stored by heads; q and k are rotated."""
    q, k, v = accum.split([2048, 512, 512], -1)
    Q, P = rotated(q, cos, sin).transpose(0, 1), rotated(k, cos, sin).transpose(0, 1)
    V = v.unflatten(-1, (-1, 128)).transpose(0, 1)
    return Q, P, V


def biased(accum, bias):
    """SwiGLU of halves with a bias, in bfloat16."""
    g, u = (accum + bias).chunk(2, -1)
    return F.silu(g) * u


def normed(accum, scale):
    """q with RMSNorm of its heads, and k and v of fewer columns."""
    q, k, v = accum.split([32, 16, 16], -1)
    h = q.unflatten(-1, (-1, 16))
    x, y = (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * scale).chunk(2, -1)
    Q, P = torch.cat((-y, x), -1), torch.tanh(k)
    return Q, P, v


def unbound(accum):
    """SwiGLU of two halves that `unbind` takes apart."""
    g, u = accum.unflatten(-1, (2, -1)).unbind(-2)
    D = F.silu(g) * u
    return D


def trained(epilogue: Callable[..., Any]) -> Callable[[int], Any]:
    """A function of M: one call with its gradients."""
    dtype = torch.bfloat16 if epilogue is biased else torch.float32
    weight = torch.randn(N, K, dtype=dtype, requires_grad=True)
    own = {"bias": torch.randn(N, dtype=dtype), "scale": torch.randn(16)}
    taken = {name: own[name].requires_grad_() for name in epilogue.__code__.co_varnames if name in own}

    def call(m: int) -> None:
        given = {"labels": torch.zeros(m, dtype=torch.long)} if epilogue in (loss, losses) else taken
        made = ef.linear(torch.randn(m, K, dtype=dtype), weight, epilogue=epilogue, **given)
        torch.autograd.backward([x.sum() for x in ([made] if isinstance(made, torch.Tensor) else made)])

    return call


def planned(epilogue: Callable[..., Any], n: int) -> Callable[[int], Any]:
    """A function of M: find the best kernel for Hopper, with `n` columns."""

    def call(m: int) -> None:
        a, b = (torch.empty(rows, 1024, dtype=torch.bfloat16, device="meta") for rows in (m, n))
        angles = torch.empty(m, 1, 64, dtype=torch.bfloat16, device="meta")
        given = {"cos": angles, "sin": angles.clone()} if epilogue is projection else {}
        args = ef.GemmArguments(a, b.t(), epilogue=ef.EpilogueArguments.partial(epilogue, given))
        assert ef.get_kernels(args, cc=90, limit=1)

    return call


TRAINED = (loss, losses, dropped, gate, biased, heads, turned, normed)
CASES = {
    **{f"{each.__name__}, with gradients": trained(each) for each in TRAINED},
    "projection, planned": planned(projection, 3072),
    "unbound, planned": planned(unbound, 4096),
}


def taken(call: Callable[[int], Any]) -> float:
    """The median of a call over all `ROWS`, in milliseconds."""
    seconds = []
    for m in ROWS:
        start = time.perf_counter()
        call(m)
        seconds.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(seconds), 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {}
    for name, call in CASES.items():
        for m in BEFORE:
            call(m)
        found[name] = {"new": taken(call), "once more": taken(call)}
        print(f"{name:26} {found[name]}", flush=True)
    if given.save is not None:
        save(given.save, {**machine("cpu"), "command": command(sys.argv), "milliseconds": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
