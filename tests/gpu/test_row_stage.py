"""Values that need their whole row, on the Hopper kernel: softmax, normalisations, and what else a row reduces to."""

import itertools
from typing import Any

import pytest
import torch
from fuzzing.check import function_of
from gpu.harness import Machine, check, check_the_same_bits, refusal

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS, ROW_DESIGNS, rows
from epifuse.request.problem import Constraints

BODIES = {
    "softmax": "x = accum * 0.0625 + C; D = softmax(x, dim=-1); return D",
    "log softmax": "x = accum * 0.0625; D = log_softmax(x, dim=-1); return D",
    "logsumexp": "D = accum * 0.0625 - logsumexp(accum * 0.0625, dim=-1, keepdim=True); return D",
    "norm": "D = accum / (norm(accum, dim=-1, keepdim=True) + eps); return D",
    "rms norm": "r = rsqrt(mean(accum * accum, dim=-1, keepdim=True) + eps); D = accum * r * w; return D, r",
    "layer norm": (
        "x = accum * 0.25 + C; mu = mean(x, dim=-1, keepdim=True); y = x - mu; "
        "rstd = rsqrt(mean(y * y, dim=-1, keepdim=True) + eps); D = y * rstd * w + b; return D, mu, rstd"
    ),
    "largest": "D = accum / absmax(accum + 0.5, dim=-1, keepdim=True) * column; return D",
    "masks": (
        "hit = any(accum > 12.0, dim=-1, keepdim=True); low = amin(accum, dim=-1, keepdim=True); "
        "D = where(hit, accum - low, amax(accum, dim=-1, keepdim=True)); return D"
    ),
    "counts": "hits = sum(accum > 4.0, dim=-1, keepdim=True); D = accum * hits; return D",
    "beside": "D = softmax(accum * 0.0625, dim=-1); sums = sum(D, dim=-2); total = sum(D * C); return D, sums, total",
}
COLUMNS = (8, 128, 136, 200, 256, 512, 1000, 1024, 2048)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((0, 129, 64), (3, 70, 72), (0, 1, 64), (0, 333, 136))
"""L (0: no batch), M and K."""


def source_of(body: str) -> str:
    names = [name for name in ("C", "w", "b", "column", "eps") if f"{name}" in _words(body)]
    lines = "".join(f"    {line.strip()}\n" for line in body.split(";"))
    return f"def epi({', '.join(['accum', *names])}):\n{lines}"


def _words(body: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in body).split())


def inputs(machine: Machine, body: str, shape: tuple[int, int, int], n: int) -> tuple[Any, Any, dict[str, Any]]:
    """A, B and the operands that `body` reads; products and their sums are exact."""
    l, m, k = shape
    lead = (l,) if l else ()
    C = machine.laid_out(torch.randint(-8, 9, (*lead, m, n)) / 4)
    vectors = {"w": machine.normal(n), "b": machine.normal(n, dtype=torch.bfloat16), "column": machine.normal(m, 1)}
    given = {"C": C, **vectors, "eps": 1e-3}
    operands = {name: value for name, value in given.items() if name in _words(body)}
    return machine.whole(*lead, m, k), machine.whole(*lead, k, n), operands


CASES = [
    (name, n, SHAPES[i % len(SHAPES)], DTYPES[i % len(DTYPES)])
    for i, (n, name) in enumerate(itertools.product(COLUMNS, BODIES))
]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "n", "shape", "dtype"), CASES, ids=str)
def test_each_function_over_rows_of_every_width(
    name: str, n: int, shape: tuple[int, int, int], dtype: torch.dtype, machine: Machine
) -> None:
    a, b, operands = inputs(machine, BODIES[name], shape, n)
    check(machine, source_of(BODIES[name]), a, b, operands, out_dtypes=dtype)


HOLDERS = [design for design in (*DESIGNS, *ROW_DESIGNS) if design.rows * design.tile[1] <= 128**2]
"""Its accumulator leaves too few registers for reductions."""


@pytest.mark.sweep
@pytest.mark.parametrize("design", HOLDERS, ids=str)
@pytest.mark.parametrize("name", ["layer norm", "logsumexp"])
def test_every_design_holds_rows_as_wide_as_its_cluster(name: str, design: Any, machine: Machine) -> None:
    """More tiles than one wave of them, the last row and columns ragged."""
    n = rows.columns(design) - 8
    a, b, operands = inputs(machine, BODIES[name], (0, 777 if machine.gpu else 130, 64), n)
    asked = Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule)
    check(
        machine,
        source_of(BODIES[name]),
        a,
        b,
        operands,
        out_dtypes=torch.float32,
        constraints=asked if machine.gpu else None,
    )
    described = ef.EpilogueArguments.partial(function_of(source_of(BODIES[name]), {}), operands)
    args = ef.GemmArguments(a, b, epilogue=described, constraints=asked)
    assert ef.get_kernels(args, cc=90, providers=["cutedsl"])[0].spec.design == design


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf], ids=str)
@pytest.mark.parametrize("n", [136, 1000])
@pytest.mark.parametrize("name", ["softmax", "layer norm", "finite beside"])
def test_what_is_not_finite_stays_in_its_row(name: str, n: int, broken: float, machine: Machine) -> None:
    """One element at each end of a row, and rows that hold nothing else."""
    body = BODIES.get(name, "x = accum * 0.0625 + C; D = x - logsumexp(x, dim=-1, keepdim=True); return D")
    a, b, operands = inputs(machine, body, (0, 70, 64), n)
    C = operands["C"]
    C[3], C[5, 0], C[-1, -1] = broken, broken, broken
    found = check(machine, source_of(body), a, b, operands, out_dtypes=torch.float32)
    assert found["D"][4].isfinite().all()
    assert found["D"][6].isfinite().all()
    assert not found["D"][3].isfinite().all()


def test_a_result_by_rows_needs_no_second_kernel(machine: Machine) -> None:
    a, b, operands = inputs(machine, BODIES["layer norm"], (3, 70, 64), 512)
    described = ef.EpilogueArguments.partial(function_of(source_of(BODIES["layer norm"]), {}), operands)
    args = ef.GemmArguments(a, b, epilogue=described)
    kernel = machine.planned(args)
    assert kernel.get_workspace_size(args) == 0
    assert str(kernel.plan).count("once a row, by the CTA that holds where it starts") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("n", [256, 1000, 2048])
def test_the_same_bits_on_two_streams_at_once(n: int, hopper: Machine) -> None:
    body = BODIES["layer norm"]
    a, b = hopper.normal(1000, 512, dtype=torch.bfloat16), hopper.normal(512, n, dtype=torch.bfloat16)
    _, _, operands = inputs(hopper, body, (0, 1000, 512), n)
    check_the_same_bits(hopper, function_of(source_of(body), {}), a, b, operands)


@pytest.mark.parametrize("n", [2056, 50264])
def test_a_row_no_cluster_holds_is_refused_with_the_ways_out(n: int, machine: Machine) -> None:
    a, b, operands = inputs(machine, BODIES["softmax"], (0, 8, 64), n)
    described = ef.EpilogueArguments.partial(function_of(source_of(BODIES["softmax"]), {}), operands)
    reasons = refusal(ef.GemmArguments(a, b, epilogue=described))
    assert reasons.startswith(
        f"softmax over N = {n} does not fit one cluster's 2048 columns; store x and logsumexp(x, dim=-1), and apply "
        "it where x is read next (softmax(x) is exp(x - logsumexp(x))), or pass allow_recompute=True: a second launch "
        "recomputes the product, 2.0 x the FLOPs"
    )
