"""16 bits that TMA cannot address, copied before they are multiplied: values on every layout and shape beside float64;
what lies outside A and B is not read, and nothing is written around results."""

import pytest
import torch
from gpu.harness import Machine, check, check_the_same_bits
from gpu.test_full import EPILOGUES, PLAIN, function_of

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS
from epifuse.request.problem import Constraints

BF16, F16 = torch.bfloat16, torch.float16
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


@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_whole_numbers_are_exact(
    shape: tuple[int, int, int], layouts: tuple[str, str], machine: Machine
) -> None:
    for dtype in (BF16, F16):
        check(machine, PLAIN, *pair(machine, *shape, layouts, dtype), {}, out_dtypes=torch.float32)


def test_no_mode_need_be_contiguous(machine: Machine) -> None:
    a, b = machine.whole(70, 200, most=1)[:, ::2], machine.whole(300, 90, most=1)[::3, ::2]
    check(machine, PLAIN, a, b, {})


def test_batches(machine: Machine) -> None:
    """Of both, of one, and one matrix that is handed over as many."""
    a, b = machine.whole(5, 65, 97, most=1), machine.whole(5, 97, 71, most=1)
    check(machine, PLAIN, a, b, {})
    check(machine, PLAIN, a, b[0], {})
    check(machine, PLAIN, a.permute(1, 2, 0).contiguous().permute(2, 0, 1), b[0].expand(5, 97, 71), {})
    check(machine, PLAIN, a[:1], b[:1], {})


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, machine: Machine) -> None:
    for m, n, k in ((300, 528, 515), (5, 272, 4099)):
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
def test_bits_are_those_of_aligned_operands(hopper: Machine) -> None:
    """Zeros behind K change no sum."""
    a, b = hopper.normal(300, 1000, dtype=BF16), hopper.normal(520, 1000, dtype=BF16).t()
    apart = hopper.laid_out(a, "odd"), hopper.laid_out(b.t(), "shifted").t()
    pinned = Constraints(tile=(128, 128), cluster=(2, 1), schedule="cooperative")
    results = []
    for given in ((a, b), apart):
        args = ef.GemmArguments(*given, epilogue=ef.EpilogueArguments.partial(PLAIN, {}), constraints=pinned)
        results.append(ef.get_kernels(args)[0].run(args)["D"])
    assert torch.equal(*results)
