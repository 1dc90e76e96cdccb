"""Inputs of 8 bits: values of every mixture, scales, biases and narrow outputs; how exactly floats are added up; the
same bits from all designs."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine, check, judge, product, run

import epifuse as ef
from epifuse.tools.testing import FP8_FAST_SUM_EPS, FP8_MEANS, FP8_SUM_EPS, store_reference

E4M3, E5M2, INT8, UINT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
F32, BF16, INT32 = torch.float32, torch.bfloat16, torch.int32
FLOATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
INTEGERS = [(INT8, INT8), (UINT8, INT8), (INT8, UINT8), (UINT8, UINT8)]
SHAPES = [(1, 8, 16), (17, 40, 1040), (129, 263, 80), (300, 520, 2048)]
"""Of few rows, whose products are swapped; ragged in every axis; N that TMA cannot store by rows; long."""
FAST = ef.Constraints(fast_accum=True)

PLAIN = "def epi(accum): D = accum; return D\n"
SCALED = (
    "def epi(accum, row, column, bias):\n    D = gelu(accum * row * column + bias, approximate='tanh')\n    return D\n"
)
REQUANTISED = (
    "def epi(accum, sums, zero_a, zero_d, scale):\n"
    "    D = round((accum - zero_a * sums) * scale) + zero_d\n"
    "    return D\n"
)
OF_INTEGERS = (
    "def epi(accum, C, column):\n"
    "    D = accum + C\n"
    "    E = where(D > 0, D * column, D // 3)\n"
    "    sums, largest, total = sum(accum, dim=-1), amax(D, dim=0), absmax(accum)\n"
    "    return D, E, sums, largest, total\n"
)
WHOLE_ROWS = "def epi(accum, row): D = softmax(accum * row, dim=-1); return D\n"
GATED = "def epi(accum): gate, up = (accum * 0.01).chunk(2, dim=-1); D = silu(gate) * up; return D\n"


def floats(machine: Machine, dtypes: tuple[torch.dtype, torch.dtype], m: int, n: int, k: int) -> tuple[Any, Any]:
    """Normal numbers, A's rows padded."""
    a = machine.laid_out(machine.normal(m, k, dtype=dtypes[0]), "padded")
    return a, machine.normal(n, k, dtype=dtypes[1]).t()


def integers(machine: Machine, dtypes: tuple[torch.dtype, torch.dtype], m: int, n: int, k: int) -> tuple[Any, Any]:
    """Of all sizes that there are."""
    found = []
    for dtype, shape in zip(dtypes, ((m, k), (n, k)), strict=True):
        limits = torch.iinfo(dtype)
        found.append(torch.randint(limits.min, limits.max + 1, shape, dtype=dtype).to(machine.device))
    return found[0], found[1].t()


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in 64-bit integers."""
    return a.cpu().long() @ b.cpu().long()


def scales(machine: Machine, m: int, n: int) -> dict[str, torch.Tensor]:
    row, column = torch.rand(n) + 0.5, (torch.rand(m, 1) + 0.5) * 0.01
    return {"row": row.to(machine.device), "column": column.to(machine.device), "bias": machine.normal(n)}


# --- floats ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("asked", [None, FAST], ids=["accurate", "fast"])
@pytest.mark.parametrize("dtypes", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_small_whole_numbers_are_exact(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], asked: Any, machine: Machine
) -> None:
    m, n, k = shape
    a = machine.laid_out(machine.whole(m, k, most=1, dtype=dtypes[0]), "padded")
    b = machine.whole(n, k, most=1, dtype=dtypes[1]).t()
    check(machine, PLAIN, a, b, {}, out_dtypes=F32, constraints=asked)


@pytest.mark.sweep
@pytest.mark.parametrize("out", [F32, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtypes", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_bias_and_gelu(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], out: torch.dtype, machine: Machine
) -> None:
    m, n, k = shape
    a, b = floats(machine, dtypes, m, n, k)
    check(machine, SCALED, a, b, scales(machine, m, n), exact=False, out_dtypes=out)


@pytest.mark.parametrize("batches", [2, 5])
def test_batches(batches: int, machine: Machine) -> None:
    a, b = machine.whole(batches, 65, 96, dtype=E4M3), machine.whole(batches, 72, 96, dtype=E5M2).mT
    check(machine, PLAIN, a, b, {}, out_dtypes=BF16)


@pytest.mark.parametrize("source", [WHOLE_ROWS, GATED], ids=["whole rows", "gated"])
def test_whole_rows_and_gated_products(source: str, machine: Machine) -> None:
    a, b = floats(machine, (E4M3, E4M3), 200, 256, 1024)
    given = {"row": torch.rand(256).to(machine.device) * 0.1} if source is WHOLE_ROWS else {}
    check(machine, source, a, b, given, exact=False, out_dtypes=BF16, layouts=("rows",))


def mean_error(machine: Machine, a: torch.Tensor, b: torch.Tensor, asked: Any) -> float:
    """Mean size of an error beside the mean size of a value."""
    got = run(machine, PLAIN, a, b, {}, out_dtypes=F32, constraints=asked)["D"].double()
    want = a.cpu().double() @ b.cpu().double()
    return float((got - want).abs().mean() / want.abs().mean())


@pytest.mark.parametrize("one_sign", [False, True])
@pytest.mark.parametrize("shape", [(512, 768, 4096), (16, 768, 4096)], ids=str)
def test_accurate_sums_are_and_fast_ones_are_not(shape: tuple[int, int, int], one_sign: bool, machine: Machine) -> None:
    m, n, k = shape
    a, b = machine.normal(m, k), machine.normal(n, k)
    a, b = (x.abs() if one_sign else x for x in (a, b))
    a, b = a.to(E4M3), b.to(E4M3).t()
    accurate, fast = (mean_error(machine, a, b, asked) for asked in (None, FAST))
    assert accurate < FP8_MEANS[one_sign]
    if machine.gpu:
        assert fast > 3 * accurate


# --- integers --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("dtypes", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_products_are_exact(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], machine: Machine
) -> None:
    a, b = integers(machine, dtypes, *shape)
    got = run(machine, PLAIN, a, b, {})["D"]
    assert got.dtype == INT32
    assert torch.equal(got.long(), exact(a, b))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_through_the_vocabulary(shape: tuple[int, int, int], machine: Machine) -> None:
    m, n, k = shape
    a, b = integers(machine, (INT8, INT8), m, n, k)
    C = machine.laid_out(torch.randint(-1000, 1000, (m, n), dtype=INT32), "odd")
    column = torch.randint(1, 3, (m, 1), dtype=INT32).to(machine.device)
    got = run(machine, OF_INTEGERS, a, b, {"C": C, "column": column})
    accum = exact(a, b)
    D = accum + C.cpu()
    want = D, torch.where(D > 0, D * column.cpu(), D // 3), accum.sum(1), D.amax(0), accum.abs().max()
    for (name, found), one in zip(got.items(), want, strict=True):
        assert torch.equal(found.long().flatten(), one.flatten()), name


@pytest.mark.sweep
@pytest.mark.parametrize("out", [INT8, UINT8, BF16, E4M3], ids=str)
@pytest.mark.parametrize("dtypes", [(UINT8, INT8), (INT8, INT8)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_requantisation_with_zero_points(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], out: torch.dtype, machine: Machine
) -> None:
    """Exact: scales are powers of two, and no sum is beyond what float32 holds."""
    a, b = integers(machine, dtypes, *shape)
    sums = b.cpu().long().sum(0).int().to(machine.device)
    scale = (2.0 ** torch.randint(-12, -7, (shape[1],))).to(machine.device)
    given = {"sums": sums, "zero_a": 3, "zero_d": 5, "scale": scale}
    got = run(machine, REQUANTISED, a, b, given, out_dtypes=out)["D"]
    value = ((exact(a, b) - 3 * sums.cpu().long()).double() * scale.cpu().double()).round() + 5
    assert torch.equal(got.view(torch.uint8), store_reference(value, out).view(torch.uint8))


@pytest.mark.parametrize("shape", [(129, 264, 256), (16, 1000, 4096)], ids=str)
def test_integers_scaled_by_rows_and_columns(shape: tuple[int, int, int], machine: Machine) -> None:
    a, b = integers(machine, (INT8, INT8), *shape)
    given = scales(machine, *shape[:2])
    given["column"] *= 0.001
    got = run(machine, SCALED, a, b, given, out_dtypes=BF16)
    judge(got, ef.reference(function_of(SCALED)), product(a, b), given)


def test_whole_rows_of_integers(machine: Machine) -> None:
    """The registers that held integers hold floats for later walks."""
    a, b = integers(machine, (INT8, INT8), 200, 256, 64)
    given = {"row": torch.rand(256).to(machine.device) * 1e-4}
    got = run(machine, WHOLE_ROWS, a, b, given, out_dtypes=BF16, layouts=("rows",))
    judge(got, ef.reference(function_of(WHOLE_ROWS)), product(a, b), given)


def function_of(source: str) -> Any:
    from fuzzing.check import function_of as made

    return made(source, {})


# --- designs ---------------------------------------------------------------------------------------------------------

CASES = {
    "accurate": (E4M3, E5M2, None),
    "fast": (E4M3, E5M2, FAST),
    "integers": (UINT8, INT8, None),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(61, 1000, 4096), (1000, 1290, 528)], ids=str)
def test_designs_of_the_same_bits_have_them(shape: tuple[int, int, int], case: str, hopper: Machine) -> None:
    """Every design, swapped ones and those of parts of K too; floats within the bound of `product`."""
    m, n, k = shape
    first, second, asked = CASES[case]
    a, b = (integers if first == UINT8 else floats)(hopper, (first, second), m, n, k)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(PLAIN, {}), constraints=asked)
    kernels = ef.get_kernels(args)
    assert len(kernels) > 20
    found: dict[Any, torch.Tensor] = {}
    for kernel in kernels:
        for _ in range(2):
            D = kernel.run(args)["D"]
            bits = found.setdefault(kernel.plan.allocation.bits, D)
            assert torch.equal(D, bits), kernel.metadata.kernel_name
    if first == UINT8:
        assert all(torch.equal(D.cpu().long(), exact(a, b)) for D in found.values())
    else:
        for D in found.values():
            fp8 = FP8_FAST_SUM_EPS if asked is FAST else FP8_SUM_EPS
            judge({"D": D.cpu()}, lambda accum: accum, product(a, b, fp8=fp8), {})


@pytest.mark.gpu
def test_accurate_and_fast_sums_differ(hopper: Machine) -> None:
    a, b = floats(hopper, (E4M3, E4M3), 256, 256, 4096)
    accurate, fast = (run(hopper, PLAIN, a, b, {}, constraints=asked)["D"] for asked in (None, FAST))
    assert not torch.equal(accurate, fast)


@pytest.mark.gpu
def test_sums_beyond_int32_saturate(hopper: Machine) -> None:
    """Where K is whole; the CPU's wrap, as PyTorch's do."""
    a = torch.full((16, 131088), -128, dtype=INT8, device="cuda")
    b = torch.full((16, 131088), -128, dtype=INT8, device="cuda").t()
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(PLAIN, {}), constraints=ef.Constraints(split=1))
    D = ef.get_kernels(args)[0].run(args)["D"]
    assert D.unique().tolist() == [torch.iinfo(INT32).max]


def test_nothing_along_k(machine: Machine) -> None:
    for dtype in (E4M3, INT8):
        a = torch.empty(40, 0, dtype=dtype, device=machine.device)
        check(machine, "def epi(accum, bias): D = accum + bias; return D", a, a.t(), {"bias": machine.whole(40)})
