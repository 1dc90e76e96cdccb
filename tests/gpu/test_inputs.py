"""What is multiplied: float32 as tf32, sums in float16, and nothing at all (K = 0)."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine, check, run

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS
from epifuse.request.problem import Constraints

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TF32 = Constraints(precision="tf32")
SHAPES = [(1, 8, 8), (129, 264, 72), (64, 136, 1024)]
EPILOGUE = """
def epi(accum, C, row, column, alpha):
    D = alpha * accum + C + row
    E = where(index_n(accum) <= index_m(accum), D - column, 0.0)
    return D, E
"""


def operands(machine: Machine, m: int, n: int, lead: tuple[int, ...] = ()) -> dict[str, object]:
    return {
        "C": machine.whole(*lead, m, n, most=8, dtype=BF16),
        "row": machine.whole(n, dtype=F32),
        "column": machine.whole(*lead, m, 1, dtype=F32),
        "alpha": 0.5,
    }


# --- tf32 --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("out", [F32, BF16], ids=str)
@pytest.mark.parametrize("batches", [(), (3,)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tf32_of_whole_numbers_is_exact(
    shape: tuple[int, int, int], batches: tuple[int, ...], out: torch.dtype, machine: Machine
) -> None:
    m, n, k = shape
    a = machine.laid_out(machine.whole(*batches, m, k, dtype=F32), "padded")
    b = machine.whole(*batches, n, k, dtype=F32).mT
    check(machine, EPILOGUE, a, b, operands(machine, m, n, batches), out_dtypes=out, constraints=TF32)


def test_tf32_of_any_numbers(machine: Machine) -> None:
    a, b = machine.normal(200, 512), machine.normal(264, 512).t()
    check(machine, EPILOGUE, a, b, operands(machine, 200, 264), exact=False, constraints=TF32, layouts=["rows"])


def test_tf32_rounds_its_inputs_to_nearest(machine: Machine) -> None:
    """Numbers between two of tf32's, none of them in the middle; the CPU multiplies all of float32."""
    values = torch.tensor([1.0 + j * 2.0**-12 for j in range(64) if j % 4 != 2])
    a, b = torch.zeros(48, 8), torch.zeros(8, 8)
    a[:, 0], b[:, 0] = values, 1.0
    a, b = a.to(machine.device), b.to(machine.device).t()
    source = "def epi(accum): D = accum; return D"
    want = torch.round(values * 2**10) / 2**10 if machine.gpu else values
    for sign in (1.0, -1.0):
        got = run(machine, source, sign * a, b, {}, constraints=TF32, layouts=["rows"])["D"]
        assert torch.equal(got[:, 0], sign * want)


@pytest.mark.gpu
@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_every_design(design: object, hopper: Machine) -> None:
    """In tf32, adding up in float16, and with K contiguous in neither A nor B."""
    m, n, k = 520, 776, 264
    for dtype, accumulator, along_k in ((F32, F32, True), (F16, F16, True), (BF16, F32, False)):
        a, b = hopper.whole(m, k, most=1, dtype=dtype), hopper.whole(n, k, most=1, dtype=dtype).t()
        if not along_k:
            a, b = a.t().contiguous().t(), b.contiguous()
        args = ef.GemmArguments(a, b, accumulator_type=accumulator, constraints=TF32, out_dtypes=F32)
        kernel = next(k for k in ef.get_kernels(args) if k.spec.design == design)
        for _ in range(3):
            assert torch.equal(kernel.run(args)["D"].double(), a.double() @ b.double())


def test_torch_s_own_switch_allows_tf32(machine: Machine) -> None:
    def in_full(**asked: Any) -> bool:
        args = ef.GemmArguments(a, b, constraints=Constraints(**asked))
        (kernel,) = ef.get_kernels(args, cc=90, limit=1)
        return bool(kernel.plan.allocation.program.design.rewritten)

    a, b = machine.whole(64, 64, dtype=F32), machine.whole(64, 64, dtype=F32).t()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert in_full()
        assert not in_full(precision="tf32")
        torch.set_float32_matmul_precision("high")
        assert torch.equal(ef.gemm(a, b).double(), a.double() @ b.double())
        assert not in_full()
        assert in_full(precision="ieee")
    finally:
        torch.set_float32_matmul_precision(before)


# --- float16 sums ------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("majors", range(4))
@pytest.mark.parametrize("batches", [(), (3,)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float16_sums_of_whole_numbers_are_exact(
    shape: tuple[int, int, int], batches: tuple[int, ...], majors: int, machine: Machine
) -> None:
    m, n, k = shape
    m = m if majors & 1 else -(-m // 8) * 8
    a = machine.laid_out(machine.whole(*batches, m, k, most=1, dtype=F16), "rows" if majors & 1 else "columns")
    b = machine.laid_out(machine.whole(*batches, k, n, most=1, dtype=F16), "rows" if majors & 2 else "columns")
    check(machine, EPILOGUE, a, b, operands(machine, m, n, batches), out_dtypes=F32, accumulator=F16)


def test_a_float16_accumulator_holds_float16(machine: Machine) -> None:
    """The epilogue computes in float32 on a value that float16 holds."""
    a, b = machine.normal(200, 256, dtype=F16), machine.normal(256, 264, dtype=F16)
    source = "def epi(accum): D = accum; E = accum * 3.0; return D, E"
    got = check(machine, source, a, b, {}, exact=False, out_dtypes=F32, accumulator=F16)
    assert torch.equal(got["D"], got["D"].half().float())
    assert torch.equal(got["E"], got["D"] * 3.0)


def test_a_float16_accumulator_overflows(machine: Machine) -> None:
    a, b = (torch.full((64, 512), 16.0, dtype=F16, device=machine.device) for _ in range(2))
    got = run(machine, "def epi(accum): D = accum; return D", a, b.t(), {}, out_dtypes=F32, accumulator=F16)
    assert got["D"].isposinf().all()


# --- K = 0 -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("batches", [(), (3,)], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (130, 72)], ids=str)
def test_nothing_to_multiply(
    shape: tuple[int, int], dtype: torch.dtype, batches: tuple[int, ...], machine: Machine
) -> None:
    """accum = 0, and the epilogue runs."""
    m, n = shape
    a = torch.empty(*batches, m, 0, dtype=dtype, device=machine.device)
    for b in (a.new_empty(*batches, 0, n), a.new_empty(*batches, n, 0).mT, a.new_empty(0, n)):
        check(machine, EPILOGUE, a, b, operands(machine, m, n, batches), out_dtypes=F32, constraints=TF32)


def test_reductions_of_no_product(machine: Machine) -> None:
    a, b = (torch.empty(shape, dtype=BF16, device=machine.device) for shape in ((130, 0), (0, 72)))
    source = "def epi(accum, C): total = sum(accum + C); lse = logsumexp(accum, dim=1); return total, lse"
    got = check(machine, source, a, b, {"C": machine.whole(130, 72, dtype=F32)}, out_dtypes=F32, layouts=["rows"])
    torch.testing.assert_close(got["lse"], torch.full((130,), 72.0).log())


@pytest.mark.gpu
def test_no_product_in_a_captured_graph(hopper: Machine) -> None:
    """The zeros that stand in for A and B live as long as the graph."""
    a, b = (torch.empty(shape, dtype=BF16, device="cuda") for shape in ((1000, 0), (0, 264)))
    c = hopper.whole(1000, 264, dtype=F32)
    out = torch.empty(1000, 264, device="cuda")
    call = {"epilogue": "def epi(accum, C): D = accum + C; return D", "C": c, "out": out}
    ef.gemm(a, b, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ef.gemm(a, b, **call)
    for _ in range(3):
        junk = [torch.full((1 << 16,), float("nan"), dtype=BF16, device="cuda") for _ in range(8)]
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, c)
        del junk


@pytest.mark.parametrize(("m", "n", "k"), [(130, 1, 64), (1, 1, 72), (64, 8, 1), (200, 1, 1)])
def test_one_column_that_is_contiguous_both_ways(m: int, n: int, k: int, machine: Machine) -> None:
    """PyTorch gives both its strides as 1; TMA sees it along its length."""
    a, b = machine.whole(m, k).contiguous(), machine.whole(k, n).contiguous()
    check(machine, "def epi(accum): D = accum; return D", a, b, {})
