"""What TMA cannot address, copied before it is multiplied: values on every layout and shape beside float64; what lies
outside A and B is not read, and nothing is written around results."""

import math

import pytest
import torch
from gpu.harness import Machine, check, check_the_same_bits
from gpu.test_full import EPILOGUES, PLAIN, function_of

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS
from epifuse.request.problem import Constraints

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TF32 = Constraints(precision="tf32")
SHAPES = [(1, 1, 1), (17, 13, 7), (64, 8, 17), (129, 263, 81), (333, 777, 65), (130, 257, 2047)]
LAYOUT_PAIRS = [
    ("odd", "odd"),
    ("even", "columns"),
    ("padded", "even"),
    ("shifted", "shifted"),
    ("rows", "shifted"),
    ("columns", "odd"),
]
GATED = "def epi(accum): D = (accum * 0.001)[:, 0::2] * relu(accum[:, 1::2]); return D\n"


def pair(machine: Machine, m: int, n: int, k: int, layouts: tuple[str, str], dtype: torch.dtype = BF16) -> list:
    """Whole numbers in surroundings of NaN."""
    shapes = (m, k), (k, n)
    made = [machine.whole(*shape, most=1, dtype=dtype) for shape in shapes]
    return [machine.laid_out(one, layout) for one, layout in zip(made, layouts, strict=True)]


@pytest.mark.sweep
@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_whole_numbers_are_exact(
    shape: tuple[int, int, int], layouts: tuple[str, str], machine: Machine
) -> None:
    for dtype in (BF16, F16, F32):
        for out in (F32, BF16):
            given = pair(machine, *shape, layouts, dtype)
            check(machine, PLAIN, *given, {}, out_dtypes=out, constraints=TF32 if dtype == F32 else None)


def test_no_mode_need_be_contiguous(machine: Machine) -> None:
    for dtype in (BF16, F32):
        a, b = (machine.whole(*shape, most=1, dtype=dtype) for shape in ((70, 200), (300, 90)))
        check(machine, PLAIN, a[:, ::2], b[::3, ::2], {}, constraints=TF32 if dtype == F32 else None)


def test_batches(machine: Machine) -> None:
    """Of both, of one, and one matrix that is handed over as many."""
    a, b = machine.whole(5, 65, 97, most=1), machine.whole(5, 97, 71, most=1)
    check(machine, PLAIN, a, b, {})
    check(machine, PLAIN, a, b[0], {})
    check(machine, PLAIN, a.permute(1, 2, 0).contiguous().permute(2, 0, 1), b[0].expand(5, 97, 71), {})
    check(machine, PLAIN, a[:1], b[:1], {})


def test_rows_that_are_one_and_batches_apart(machine: Machine) -> None:
    b = machine.whole(64, 128, most=1)
    check(machine, PLAIN, machine.whole(1, 64, most=1).expand(64, 64), b, {})
    apart = machine.whole(2 * 4100, most=1).as_strided((2, 64, 64), (4100, 64, 1))
    check(machine, PLAIN, apart, b, {})


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, machine: Machine) -> None:
    for m, n, k in ((300, 528, 515), (5, 272, 259)):
        a, b = pair(machine, m, n, k, ("odd", "shifted"))
        operands = {"bias": machine.whole(n).float()} if "bias" in EPILOGUES[name] else {}
        check(machine, EPILOGUES[name], a, b, operands)


@pytest.mark.parametrize("layout", ["odd", "columns"])
def test_every_second_column(layout: str, machine: Machine) -> None:
    check(machine, GATED, *pair(machine, 200, 528, 301, ("odd", layout)), {})


@pytest.mark.gpu
@pytest.mark.parametrize("design", DESIGNS[::5], ids=str)
def test_designs(design: object, hopper: Machine) -> None:
    tile, cluster, schedule = (getattr(design, name) for name in ("tile", "cluster", "schedule"))
    asked = Constraints(tile=tile, cluster=cluster, schedule=schedule)
    for m, n, k in ((300, 328, 73), (1025, 777, 2049)):
        given = pair(hopper, m, n, k, ("odd", "shifted"))
        if ef.get_kernels(ef.GemmArguments(*given, constraints=asked), cc=90, limit=1):
            check(hopper, PLAIN, *given, {}, constraints=asked, out_dtypes=torch.float32)


@pytest.mark.gpu
def test_the_same_bits_in_every_run_on_two_streams(hopper: Machine) -> None:
    a, b = hopper.normal(513, 1023, dtype=BF16), hopper.normal(1023, 257, dtype=BF16)
    check_the_same_bits(hopper, function_of(PLAIN, {}), a, b, {})


@pytest.mark.gpu
@pytest.mark.parametrize("out", [BF16, F32], ids=str)
def test_bits_are_those_of_aligned_operands(out: torch.dtype, hopper: Machine) -> None:
    """Zeros behind K change no sum, and how D is written no value."""
    a, b = hopper.normal(300, 1000, dtype=BF16), hopper.normal(520, 1000, dtype=BF16).t()
    apart = hopper.laid_out(a, "odd"), hopper.laid_out(b.t(), "shifted").t()
    design = DESIGNS[0]
    pinned = Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule)
    results = []
    for given, layout in (((a, b), "rows"), (apart, "odd")):
        D = hopper.laid_out(torch.full((300, 520), math.nan, dtype=out), layout)
        made = ef.EpilogueArguments(PLAIN, D=D)
        args = ef.GemmArguments(*given, epilogue=made, constraints=pinned)
        ef.get_kernels(args)[0].run(args)
        results.append(D.clone())
    assert torch.equal(*results)
