"""float32 in full: values on many layouts and shapes, beside float64 and beside PyTorch's; what is not finite, and what
is very small or large; the same bits from all designs and in every run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fuzzing.check import function_of
from gpu.harness import Machine, check, check_the_same_bits, run

import epifuse as ef

pytestmark = pytest.mark.usefixtures("in_full")
F32 = torch.float32
SHAPES = [(1, 8, 16), (17, 40, 1041), (129, 263, 81), (300, 520, 2047), (64, 64, 1)]
"""Of few rows, whose products are swapped; ragged in every axis; long; and one product a result."""
LAYOUT_PAIRS = [("rows", "columns"), ("columns", "rows"), ("odd", "odd"), ("shifted", "even"), ("padded", "shifted")]
PLAIN = "def epi(accum): D = accum; return D\n"
EPILOGUES = {
    "bias gelu": "def epi(accum, bias): D = gelu(accum * 0.001 + bias, approximate='tanh'); return D\n",
    "whole rows": "def epi(accum, bias): D = softmax(accum * 0.001 + bias, dim=-1); return D\n",
    "parts of rows": "def epi(accum): gate, up = (accum * 0.001).chunk(2, dim=-1); D = silu(gate) * up; return D\n",
    "reductions": "def epi(accum, bias): D = accum + bias; s, t = sum(D, dim=0), amax(accum, dim=-1); return D, s, t\n",
}


@contextmanager
def taken() -> Iterator[None]:
    """PyTorch's own products in full as well."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture
def in_full() -> Iterator[None]:
    """See `taken`."""
    with taken():
        yield


def wide_numbers(machine: Machine, *shape: int) -> torch.Tensor:
    """Whole numbers of 13 bits: of each both parts are needed."""
    return machine.whole(*shape, most=1, dtype=F32) * 4097


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_whole_numbers_are_exact(
    shape: tuple[int, int, int], layouts: tuple[str, str], machine: Machine
) -> None:
    """High and low parts of either; no sum is beyond 2^24."""
    m, n, k = shape
    for a, b in (
        (wide_numbers(machine, m, k), machine.whole(k, n, most=1, dtype=F32)),
        (machine.whole(m, k, most=1, dtype=F32), wide_numbers(machine, k, n)),
    ):
        check(machine, PLAIN, machine.laid_out(a, layouts[0]), machine.laid_out(b, layouts[1]), {})


def test_no_mode_need_be_contiguous(machine: Machine) -> None:
    a, b = wide_numbers(machine, 70, 200)[:, ::2], machine.whole(300, 90, most=1, dtype=F32)[::3, ::2]
    check(machine, PLAIN, a, b, {})


def test_batches(machine: Machine) -> None:
    """Of both, of one, and one matrix that is handed over as many."""
    a, b = wide_numbers(machine, 5, 65, 97), machine.whole(5, 97, 71, most=1, dtype=F32)
    check(machine, PLAIN, a, b, {})
    check(machine, PLAIN, a, b[0], {})
    check(machine, PLAIN, a.permute(1, 2, 0).contiguous().permute(2, 0, 1), b[0].expand(5, 97, 71), {})
    check(machine, PLAIN, a[:1], b[:1], {})


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, machine: Machine) -> None:
    """Whose results float32 rounds alike."""
    source = EPILOGUES[name]
    a, b = wide_numbers(machine, 200, 130), machine.whole(130, 256, most=1, dtype=F32)
    given = {"bias": machine.whole(256, dtype=F32)} if "bias" in source else {}
    check(machine, source, a, b, given, layouts=("rows",))


def test_nothing_along_k(machine: Machine) -> None:
    a, b = torch.empty(40, 0, device=machine.device), torch.empty(0, 48, device=machine.device)
    check(machine, "def epi(accum, bias): D = accum + bias; return D", a, b, {"bias": machine.whole(48)})


# --- accuracy --------------------------------------------------------------------------------------------------------


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root of the mean square."""
    return float((got.double().cpu() - want).square().mean().sqrt())


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("k", [1, 31, 256, 2048, 4096, 16384])
@pytest.mark.parametrize("m", [16, 300])
def test_errors_are_within_four_times_pytorch_s(m: int, k: int, positive: bool, machine: Machine) -> None:
    a, b = machine.normal(m, k), machine.normal(k, 264)
    a, b = (x.abs() if positive else x for x in (a, b))
    want = a.cpu().double() @ b.cpu().double()
    got = run(machine, PLAIN, a, b, {}, layouts=("rows",))["D"]
    assert error(got, want) <= 4 * error(a @ b, want)


# --- what is not finite, and what is small or large ------------------------------------------------------------------


def test_what_is_not_finite_comes_out_as_of_pytorch(machine: Machine) -> None:
    a, b = machine.normal(64, 100), machine.normal(100, 72)
    a[1, 3], a[2, 5], a[3, 99] = torch.inf, -torch.inf, torch.nan
    a[4, 0], a[4, 1] = torch.inf, -torch.inf
    b[7, 1], b[8, 2], b[3, 5], b[5, :3] = torch.inf, torch.nan, 0.0, 2.0  # 2.0 has no low part
    a[6, 7] = 0.0
    got = run(machine, PLAIN, a, b, {})["D"]
    want = (a.cpu().double() @ b.cpu().double()).float()
    assert torch.equal(got.isnan(), want.isnan())
    infinite = want.isinf()
    assert torch.equal(got.isinf(), infinite)
    assert torch.equal(got[infinite], want[infinite])
    assert infinite.sum() > 100
    assert want.isnan().sum() > 100


def test_the_largest_numbers_stay_finite(machine: Machine) -> None:
    largest = torch.finfo(F32).max
    a = torch.zeros(64, 96, device=machine.device)
    a[torch.arange(64), torch.arange(64)] = largest
    b = torch.full((96, 64), 0.5, device=machine.device)
    got = run(machine, PLAIN, a, b, {})["D"]
    assert ((got.double() - largest / 2).abs() <= largest * 2.0**-22).all()


def test_small_numbers_move_by_2_to_the_minus_126_at_most(machine: Machine) -> None:
    for exponent in (-100, -115, -126, -140):
        a, b = machine.normal(64, 96) * 2.0**exponent, machine.normal(96, 64)
        want = a.cpu().double() @ b.cpu().double()
        sizes = b.cpu().double().abs().sum(0)
        got = run(machine, PLAIN, a, b, {})["D"]
        room = 2.0**-20 * (a.cpu().double().abs() @ b.cpu().double().abs()) + 2.0**-124 * sizes
        assert ((got.double() - want).abs() <= room).all()


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(61, 1000, 4097), (1000, 1290, 529)], ids=str)
def test_designs_of_the_same_bits_have_them(shape: tuple[int, int, int], hopper: Machine) -> None:
    """Every design, swapped ones and those of parts of K too."""
    m, n, k = shape
    a, b = hopper.normal(m, k), hopper.normal(k, n)
    want, room = a.cpu().double() @ b.cpu().double(), 4 * error(a @ b, a.cpu().double() @ b.cpu().double())
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(PLAIN, {}))
    kernels = ef.get_kernels(args)
    assert len(kernels) > 15
    found: dict[Any, torch.Tensor] = {}
    for kernel in kernels:
        for _ in range(2):
            D = kernel.run(args)["D"]
            bits = found.setdefault(kernel.plan.allocation.bits, D)
            assert torch.equal(D, bits), kernel.metadata.kernel_name
    for D in found.values():
        assert error(D, want) <= room


@pytest.mark.gpu
def test_every_run_has_the_same_bits(hopper: Machine) -> None:
    a, b = hopper.normal(500, 1001), hopper.normal(1001, 712)
    check_the_same_bits(hopper, function_of(PLAIN, {}), a, b, {})
    check_the_same_bits(hopper, function_of(EPILOGUES["reductions"], {}), a, b, {"bias": hopper.normal(712)})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 512, 1024), (16, 512, 4096)], ids=str)
def test_launches_in_a_row_share_a_workspace(shape: tuple[int, int, int], hopper: Machine) -> None:
    """The parts of one are not written before the one before has read its own; A is the result of another launch."""
    m, n, k = shape
    b = hopper.normal(k, n)
    each = [hopper.normal(m, k) for _ in range(20)]
    epilogue = ef.EpilogueArguments.partial(PLAIN, {})
    kernel = ef.get_kernels(ef.GemmArguments(each[0], b, epilogue=epilogue))[0]

    def product(a: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = kernel.run(ef.GemmArguments(a, b, epilogue=epilogue), workspace=memory)["D"]
        return found

    alone = []
    for a in each:
        alone.append(product(a * 2))
        torch.cuda.synchronize()
    size = kernel.get_workspace_size(ef.GemmArguments(each[0], b, epilogue=epilogue))
    memory = torch.empty(size, dtype=torch.uint8, device="cuda")
    together = [product(a * 2, memory) for a in each]
    assert all(torch.equal(x, y) for x, y in zip(together, alone, strict=True))


@pytest.mark.gpu
def test_a_captured_launch_is_replayed(hopper: Machine) -> None:
    a, b = hopper.normal(256, 1000), hopper.normal(1000, 384)
    D = torch.empty(256, 384, device="cuda")
    step = lambda: ef.gemm(a, b, epilogue=PLAIN, out=D)  # noqa: E731
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        a.copy_(hopper.normal(256, 1000))
        graph.replay()
        got = D.clone()
        step()
        assert torch.equal(D, got)
