"""Block scales: values of every design, side and layout, ragged blocks, what scales of zero and NaN reach, and how
exactly scaled products are added up."""

from typing import Any

import pytest
import torch
from fuzzing.check import function_of
from gpu.harness import Machine, exact_product, judge, run
from gpu.test_eight_bits import E4M3, E5M2, PLAIN, floats

import epifuse as ef
from epifuse.request.scaled import BLOCK, blocks
from epifuse.tools.testing import FP8_MEANS, FP8_SUM_EPS, Bounded, bounded

F32, BF16 = torch.float32, torch.bfloat16
_EPS = torch.finfo(F32).eps
SHAPES = [(1, 8, 16), (17, 40, 1040), (129, 263, 80), (300, 520, 2048)]
"""Few rows; ragged in every axis; N that TMA cannot store by rows, with less than a block of K; several blocks."""
LAYOUTS = ("along K", "along rows", "apart")

FUSED = "def epi(accum, C, bias): D = gelu(accum + bias, approximate='tanh') + C; return D\n"
REDUCED = (
    "def epi(accum):\n"
    "    D = relu(accum)\n"
    "    rows, columns, most = sum(D, 1), amax(accum, 0), absmax(accum)\n"
    "    return D, rows, columns, most\n"
)
WHOLE_ROWS = "def epi(accum): D = softmax(accum * 0.1, dim=-1); return D\n"


def laid_out(machine: Machine, scales: torch.Tensor, layout: str) -> torch.Tensor:
    """In surroundings of NaN: an index too far shows."""
    return machine.laid_out(scales, {"along K": "rows", "along rows": "columns", "apart": "odd"}[layout])


def powers(machine: Machine, shape: tuple[int, int], layout: str = "along K") -> torch.Tensor:
    """Scales by which sums stay exact."""
    return laid_out(machine, 2.0 ** torch.randint(-3, 4, shape).float(), layout)


def scales_of(machine: Machine, a: torch.Tensor, b: torch.Tensor, layout: str = "along K") -> tuple[Any, Any]:
    (m, k), n = a.shape, b.shape[1]
    shapes = (m, blocks(k)), (blocks(k), blocks(n))
    of_a, of_b = (laid_out(machine, torch.rand(shape) + 0.5, layout) for shape in shapes)
    return ef.Scaled(a, of_a), ef.Scaled(b, of_b)


def wide(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B in float64, on the CPU, each block times its scale, which float32 rounds."""
    found = []
    for side, along in ((a, (1,)), (b, (0, 1))):
        matrix, scales = (side.tensor, side.scales) if isinstance(side, ef.Scaled) else (side, None)
        value = matrix.cpu().double()
        if scales is not None:
            spread = scales.cpu().double()
            for dim in along:
                spread = spread.repeat_interleave(BLOCK, dim).narrow(dim, 0, value.shape[dim])
            value = value * spread
        found.append(value)
    return found[0], found[1]


def product(a: Any, b: Any) -> Bounded:
    """With the error that the tensor cores' sums, the product of two scales and a sum in any order may make."""
    first, second = wide(a, b)
    rounding = FP8_SUM_EPS + (first.shape[1] + 4) * _EPS
    made: Bounded = bounded(first @ second, _EPS, rounding * (first.abs() @ second.abs()))
    return made


def check(machine: Machine, source: str, a: Any, b: Any, operands: dict[str, Any], **options: Any) -> None:
    function = function_of(source, {})
    got = run(machine, function, a, b, operands, **options)
    judge(got, ef.reference(function), product(a, b), operands)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sides", ["AB", "A", "B"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_powers_of_two_are_exact(shape: tuple[int, int, int], sides: str, layout: str, machine: Machine) -> None:
    m, n, k = shape
    a: Any = machine.laid_out(machine.whole(m, k, most=1, dtype=E4M3), "padded")
    b: Any = machine.whole(n, k, most=1, dtype=E5M2).t()
    a = ef.Scaled(a, powers(machine, (m, blocks(k)), layout)) if "A" in sides else a
    b = ef.Scaled(b, powers(machine, (blocks(k), blocks(n)), layout)) if "B" in sides else b
    function = function_of(PLAIN, {})
    got = run(machine, function, a, b, {}, out_dtypes=F32)
    judge(got, ef.reference(function), exact_product(*wide(a, b)), {})


@pytest.mark.parametrize("out", [F32, BF16, E4M3], ids=str)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_epilogue_behind_them(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], out: torch.dtype, machine: Machine
) -> None:
    m, n, k = shape
    a, b = scales_of(machine, *floats(machine, dtypes, m, n, k))
    given = {"C": machine.laid_out(machine.normal(m, n, dtype=BF16), "padded"), "bias": machine.normal(n)}
    check(machine, FUSED, a, b, given, out_dtypes=out)


@pytest.mark.parametrize("source", [REDUCED, WHOLE_ROWS], ids=["reductions", "whole rows"])
@pytest.mark.parametrize("shape", [(200, 256, 1024), (130, 200, 400), (40, 256, 1024)], ids=str)
def test_reductions_and_whole_rows(shape: tuple[int, int, int], source: str, machine: Machine) -> None:
    a, b = scales_of(machine, *floats(machine, (E4M3, E4M3), *shape), "along rows")
    check(machine, source, a, b, {}, out_dtypes={"D": BF16}, layouts=("rows",))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_scale_reaches_its_block_alone(value: float, machine: Machine) -> None:
    """Rows and columns of D beside it have the bits that they have without it."""
    m, n, k = 200, 300, 528
    a, b = scales_of(machine, *floats(machine, (E4M3, E4M3), m, n, k))
    plain = run(machine, PLAIN, a, b, {}, out_dtypes=F32)["D"]
    a.scales[70, 4] = value  # the last block of K, which is ragged
    b.scales[1, 2] = value  # the last block of N
    found = run(machine, PLAIN, a, b, {}, out_dtypes=F32)["D"]
    reached = torch.zeros(m, n, dtype=torch.bool)
    reached[70], reached[:, 2 * BLOCK :] = True, True
    assert torch.equal(found[~reached], plain[~reached])
    assert bool(found[reached].isfinite().all()) == (value == 0.0)
    if value == 0.0:
        judge({"D": found}, lambda accum: accum, product(a, b), {})


@pytest.mark.parametrize("one_sign", [False, True])
def test_sums_are_as_exact_as_without_scales(one_sign: bool, machine: Machine) -> None:
    m, n, k = 512, 768, 4096
    a, b = machine.normal(m, k), machine.normal(n, k)
    a, b = (x.abs() if one_sign else x for x in (a, b))
    scaled = scales_of(machine, a.to(E4M3), b.to(E4M3).t())
    for asked in (None, ef.Constraints(fast_accum=True)):
        got = run(machine, PLAIN, *scaled, {}, out_dtypes=F32, constraints=asked)["D"].double()
        first, second = wide(*scaled)
        want = first @ second
        assert float((got - want).abs().mean() / want.abs().mean()) < FP8_MEANS[one_sign]


def test_linear_with_x_of_three_dims(machine: Machine) -> None:
    a, b = scales_of(machine, *floats(machine, (E4M3, E4M3), 96, 264, 640))
    x, of_x = a.tensor.contiguous().view(2, 48, 640), a.scales.contiguous().view(2, 48, 5)
    for _ in range(3):  # a call like an earlier one is launched in another way
        y = ef.linear(ef.Scaled(x, of_x), ef.Scaled(b.tensor.t(), b.scales.t()), out_dtypes=F32)
        judge({"D": y.view(96, 264).cpu()}, lambda accum: accum, product(a, b), {})


def test_nothing_along_k(machine: Machine) -> None:
    a = torch.empty(40, 0, dtype=E4M3, device=machine.device)
    scaled = ef.Scaled(a, a.float()), ef.Scaled(a.t(), torch.empty(0, 1, device=machine.device))
    got = run(machine, "def epi(accum): D = accum + 1; return D", *scaled, {})["D"]
    assert torch.equal(got, torch.ones(40, 40))


# --- designs ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(61, 1000, 4096), (9, 328, 4240), (1000, 1290, 528), (700, 1500, 1168)], ids=str)
def test_designs_of_the_same_bits_have_them(shape: tuple[int, int, int], hopper: Machine) -> None:
    """Every design that is offered, those of parts of K too, with a stage that ends behind the last block."""
    a, b = scales_of(hopper, *floats(hopper, (E4M3, E5M2), *shape), "apart")
    D = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(PLAIN, {})).allocate()["D"]
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(PLAIN, D=D))
    kernels = ef.get_kernels(args)
    assert len(kernels) > 10
    found: dict[Any, torch.Tensor] = {}
    for kernel in kernels:
        for _ in range(2):
            D.fill_(float("nan"))  # compute-sanitizer does not see what TMA writes, and would report what reads D
            kernel.run(args)
            bits = found.setdefault(kernel.plan.allocation.bits, D.clone())
            assert torch.equal(D, bits), kernel.metadata.kernel_name
    for D in found.values():
        judge({"D": D.cpu()}, lambda accum: accum, product(a, b), {})


PARTS = {
    "stacked": "def epi(accum): gate, up = accum.chunk(2, dim=-1); D = gate - 2 * up; return D",
    "interleaved": "def epi(accum): D = accum[..., 0::2] - 2 * accum[..., 1::2]; return D",
}


@pytest.mark.parametrize("order", PARTS)
@pytest.mark.parametrize("sides", ["AB", "A", "B"])
@pytest.mark.parametrize("shape", [(17, 256, 80), (200, 512, 528), (520, 1280, 2048)], ids=str)
def test_parts_of_a_row(shape: tuple[int, int, int], sides: str, order: str, machine: Machine) -> None:
    """By every design that is offered; scales of neighbouring blocks and of both halves differ."""
    m, n, k = shape
    a: Any = machine.whole(m, k, most=1, dtype=E4M3)
    b: Any = machine.whole(n, k, most=1, dtype=E4M3).t()
    a = ef.Scaled(a, powers(machine, (m, blocks(k)))) if "A" in sides else a
    b = ef.Scaled(b, powers(machine, (blocks(k), blocks(n)))) if "B" in sides else b
    function = function_of(PARTS[order], {})
    D = torch.empty(m, n // 2, device=machine.device)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(function, D=D))
    for kernel in ef.get_kernels(args):
        D.fill_(float("nan"))
        kernel.run(args)
        judge({"D": D.cpu()}, ef.reference(function), exact_product(*wide(a, b)), {})


RANGES = {
    "in one launch": "def epi(accum): q, k = accum.split([384, 256], dim=-1); D = q * 2; E = -k; return D, E",
    "in one each": (
        "def epi(accum):\n"
        "    q, k = accum.split([384, 256], dim=-1)\n"
        "    D, E, most = q * 2, -k, absmax(k)\n"
        "    return D, E, most\n"
    ),
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("m", [1, 40, 300])
def test_ranges_of_columns(m: int, name: str, machine: Machine) -> None:
    a: Any = machine.whole(m, 528, most=1, dtype=E4M3)
    b: Any = machine.whole(640, 528, most=1, dtype=E4M3).t()
    a, b = ef.Scaled(a, powers(machine, (m, 5))), ef.Scaled(b, powers(machine, (5, 5)))
    function = function_of(RANGES[name], {})
    got = run(machine, function, a, b, {}, out_dtypes=F32)
    judge(got, ef.reference(function), exact_product(*wide(a, b)), {})


@pytest.mark.gpu
def test_scales_of_one_have_the_bits_of_none(hopper: Machine) -> None:
    a, b = floats(hopper, (E4M3, E4M3), 300, 520, 2048)
    ones = [torch.ones(shape, device="cuda") for shape in ((300, 16), (16, 5))]
    scaled = run(hopper, PLAIN, ef.Scaled(a, ones[0]), ef.Scaled(b, ones[1]), {}, out_dtypes=F32)["D"]
    split = ef.Constraints(split=1)
    plain = run(hopper, PLAIN, a, b, {}, out_dtypes=F32, constraints=split)["D"]
    alone = run(hopper, PLAIN, ef.Scaled(a, ones[0]), b, {}, out_dtypes=F32, constraints=split)["D"]
    assert torch.equal(alone, plain)
    torch.testing.assert_close(scaled, plain)
