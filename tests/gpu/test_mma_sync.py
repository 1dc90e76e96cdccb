"""The kernel for mma.sync: products of every layout and alignment, in every tile, with every kind of epilogue, beside
float64; what lies outside A and B is not read, and nothing is written around results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzzing.check import function_of
from gpu.harness import Machine, check, check_the_same_bits, run

import epifuse as ef
from epifuse.base.cache import forget
from epifuse.providers.cutedsl import MULTISTAGE_DESIGNS, untested
from epifuse.providers.cutedsl.design import MULTISTAGE, round_up

pytestmark = pytest.mark.usefixtures("never_run")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 1, 1), (17, 13, 7), (64, 8, 16), (129, 263, 81), (333, 777, 65), (130, 256, 2048)]
"""One of all; smaller than a tile; ragged in every axis; of many blocks of K."""
LAYOUT_PAIRS = [
    ("rows", "columns"),
    ("columns", "rows"),
    ("odd", "odd"),
    ("even", "columns"),
    ("padded", "even"),
    ("shifted", "shifted"),
    ("padded", "shifted"),
]
PLAIN = "def epi(accum): D = accum; return D\n"
EPILOGUES = {
    "bias gelu": "def epi(accum, bias): D = gelu(accum * 0.001 + bias, approximate='tanh'); return D\n",
    "operands": "def epi(accum, C, bias, column): D = relu(accum + C * bias) + column; E = accum - C; return D, E\n",
    "places": "def epi(accum): D = where(index_n(accum) <= index_m(accum), accum, 0.0); return D\n",
    "reductions": "def epi(accum, bias): D = accum + bias; s, t = sum(D, dim=-2), amax(D, dim=-1); return D, s, t\n",
    "a number": "def epi(accum): s, t = sum(accum * accum), absmax(accum); return s, t\n",
    "whole rows": "def epi(accum, bias): D = softmax(accum * 0.001 + bias, dim=-1); return D\n",
    "norm of rows": "def epi(accum, C): x = accum + C; D = x * rsqrt(mean(x * x, dim=-1, keepdim=True)); return D\n",
}
NARROW = [
    (torch.int8, torch.int8),
    (torch.uint8, torch.int8),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e5m2),
]
"""Dtypes of A and B of 8 bits: of one kind, and of two."""
NARROW_EPILOGUES = {
    "scaled": "def epi(accum, column, bias): D = gelu(accum * 0.001 * column + bias, approximate='tanh'); return D\n",
    "to int8": "def epi(accum, bias): D = clamp(accum * 0.5 + bias + 0.3, -128, 127).to(torch.int8); return D\n",
    "reductions": "def epi(accum): D = accum * 0.5; s, t = sum(D, dim=-2), absmax(D, dim=-1); return D, s, t\n",
    "halves": "def epi(accum): gate, up = (accum * 0.01).chunk(2, dim=-1); D = silu(gate) * up; return D\n",
}
PARTS = {
    "halves": "def epi(accum): gate, up = (accum * 0.001).chunk(2, dim=-1); D = silu(gate) * up; return D\n",
    "every second": "def epi(accum): D = (accum * 0.001)[:, 0::2] * relu(accum[:, 1::2]); return D\n",
}
"""Of rows of B in another order."""


@contextmanager
def taken() -> Iterator[None]:
    """As with EPIFUSE_UNTESTED=1."""
    config = untested.CONFIG
    untested.CONFIG = replace(config, untested=True)
    forget()
    try:
        yield
    finally:
        untested.CONFIG = config
        forget()


@pytest.fixture
def never_run() -> Iterator[None]:
    """See `taken`."""
    with taken():
        yield


def asked(machine: Machine, **further: Any) -> ef.Constraints | None:
    """This kernel, where Hopper's could as well; the CPU has none of them."""
    if type(machine) is Machine and not machine.gpu:
        return None
    return ef.Constraints(schedule=MULTISTAGE, **further)


def operands_of(machine: Machine, source: str, m: int, n: int, layout: str = "rows") -> dict[str, torch.Tensor]:
    """What an epilogue reads."""
    made = {
        "C": lambda: machine.laid_out(machine.whole(m, n), layout),
        "bias": lambda: machine.whole(n, dtype=F32),
        "column": lambda: machine.whole(m, 1, dtype=F32),
    }
    head = source.partition(":")[0]
    return {name: make() for name, make in made.items() if name in head}


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_whole_numbers_are_exact(
    shape: tuple[int, int, int], layouts: tuple[str, str], machine: Machine
) -> None:
    """Both 16-bit floats, and tf32."""
    m, n, k = shape
    for dtype in (BF16, F16, F32):
        a, b = machine.whole(m, k, dtype=dtype), machine.whole(k, n, dtype=dtype)
        a, b = machine.laid_out(a, layouts[0]), machine.laid_out(b, layouts[1])
        tf32 = {"precision": "tf32"} if dtype == F32 else {}
        made = asked(machine, **tf32) or ef.Constraints(**tf32)
        check(machine, PLAIN, a, b, {}, constraints=made)


@pytest.mark.gpu
def test_large_products_of_odd_extents_are_exact(hopper: Machine) -> None:
    """Of more tiles than a GPU has multiprocessors, too."""
    for m, n, k in ((1000, 1001, 999), (3001, 2003, 77), (257, 129, 4097)):
        for layouts in LAYOUT_PAIRS:
            a, b = hopper.laid_out(hopper.whole(m, k), layouts[0]), hopper.laid_out(hopper.whole(k, n), layouts[1])
            check(hopper, PLAIN, a, b, {}, constraints=asked(hopper))


@pytest.mark.sweep
@pytest.mark.parametrize("layouts", [("rows", "columns"), ("columns", "rows"), ("even", "padded")], ids=str)
@pytest.mark.parametrize("design", MULTISTAGE_DESIGNS, ids=str)
def test_every_tile(design: Any, layouts: tuple[str, str], machine: Machine) -> None:
    """Of several tiles, the last ones ragged. Those of 256 rows are for copies of 8 bytes at least."""
    more, k = ((72, 24), 160) if design.tile[0] == 256 else ((77, 26), 158)
    layouts = ("padded", "padded") if design.tile[0] == 256 and layouts[0] == "even" else layouts
    m, n = (2 * tile + ragged for tile, ragged in zip(design.tile, more, strict=True))
    a, b = machine.laid_out(machine.whole(m, k), layouts[0]), machine.laid_out(machine.whole(k, n), layouts[1])
    source = EPILOGUES["operands"]
    check(machine, source, a, b, operands_of(machine, source, m, n), constraints=asked(machine, tile=design.tile))


def test_no_mode_need_be_contiguous(machine: Machine) -> None:
    a, b = machine.whole(70, 200)[:, ::2], machine.whole(300, 90)[::3, ::2]
    check(machine, PLAIN, a, b, {})


def test_rows_may_be_one(machine: Machine) -> None:
    """A is expanded, and so is B."""
    a, b = machine.whole(1, 99).expand(140, 99), machine.whole(99, 1).expand(99, 77)
    check(machine, PLAIN, a, b, {})


def test_batches(machine: Machine) -> None:
    """Of both, of one, and one matrix that is handed over as many; batches that lie innermost."""
    a, b = machine.whole(5, 65, 97), machine.whole(5, 97, 71)
    check(machine, PLAIN, a, b, {})
    check(machine, PLAIN, a, b[0], {})
    check(machine, PLAIN, a.permute(1, 2, 0).contiguous().permute(2, 0, 1), b[0].expand(5, 97, 71), {})
    check(machine, PLAIN, a[:1], b[:1], {})
    for name in ("operands", "reductions"):
        source = EPILOGUES[name]
        check(machine, source, a, b, operands_of(machine, source, 65, 71))


@pytest.mark.parametrize("n", [64, 71, 200, 330])
@pytest.mark.parametrize("design", MULTISTAGE_DESIGNS, ids=str)
def test_a_number_of_each_batch(design: Any, n: int, machine: Machine) -> None:
    """Each warp of each tile leaves one, those of tiles that stand abreast and lie beyond N too."""
    source = "def epi(accum): s, t = sum(accum, dim=(-2, -1)), amax(accum - 1000.0, dim=(-2, -1)); return s, t\n"
    given = asked(machine, tile=design.tile)
    check(machine, source, machine.whole(3, 300, 40), machine.whole(3, 40, n), {}, constraints=given)


def test_nothing_along_k(machine: Machine) -> None:
    a, b = torch.empty(40, 0, device=machine.device), torch.empty(0, 48, device=machine.device)
    source = "def epi(accum, bias): D = accum + bias; return D"
    made = asked(machine) or ef.Constraints()
    check(machine, source, a.to(BF16), b.to(BF16), {"bias": machine.whole(48)}, constraints=made)


@pytest.mark.parametrize("shape", [(200, 256, 130), (131, 253, 77), (17, 13, 7)], ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, shape: tuple[int, int, int], machine: Machine) -> None:
    source, (m, n, k) = EPILOGUES[name], shape
    for layout in ("rows", "odd"):
        a, b = machine.laid_out(machine.whole(m, k), "even"), machine.laid_out(machine.whole(k, n), "columns")
        given = operands_of(machine, source, m, n, layout)
        check(machine, source, a, b, given, out_dtypes=F32, constraints=asked(machine))


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_rows(name: str, machine: Machine) -> None:
    """Halves of B by rows too; copies of 16, 8, 4 and 2 bytes."""
    for m, n, k in ((200, 256, 130), (131, 272, 77), (17, 16, 64), (140, 608, 132)):
        for layout in ("columns", "rows") if name == "halves" else ("columns",):
            a, b = machine.laid_out(machine.whole(m, k), "even"), machine.laid_out(machine.whole(k, n), layout)
            check(machine, PARTS[name], a, b, {}, out_dtypes=F32, constraints=asked(machine))


def narrow(machine: Machine, dtypes: tuple[torch.dtype, torch.dtype], m: int, n: int, k: int) -> tuple[Any, Any]:
    """A and B, both along K, whose lines lie `k` apart; where Hopper's kernel is asked as well, a multiple of 16."""
    k = k if asked(machine) else round_up(k, 16)
    a, b = machine.whole(m, k, dtype=dtypes[0]), machine.whole(n, k, dtype=dtypes[1])
    return a, b.t()


@pytest.mark.parametrize("dtypes", NARROW, ids=str)
def test_products_of_8_bits_are_exact(dtypes: tuple[torch.dtype, torch.dtype], machine: Machine) -> None:
    """Copied by 16, 8, 4 and 2 bytes; of one block of K, of many, and of some that float32 adds up."""
    for m, n, k in ((1, 1, 2), (17, 13, 6), (129, 263, 84), (333, 777, 66), (70, 90, 152), (130, 256, 2048)):
        check(machine, PLAIN, *narrow(machine, dtypes, m, n, k), {}, out_dtypes=None, constraints=asked(machine))


@pytest.mark.parametrize("design", MULTISTAGE_DESIGNS, ids=str)
def test_every_tile_has_8_bits(design: Any, machine: Machine) -> None:
    """Sums of floats that float32 adds up have no registers in the two largest, unless the tensor cores add up all."""
    m, n = (2 * tile + ragged for tile, ragged in zip(design.tile, (72, 24), strict=True))
    for dtypes in NARROW[1:3]:
        a, b = narrow(machine, dtypes, m, n, 272)
        fast = dtypes[0].is_floating_point and design.rows * design.tile[1] > 64 * 128
        made = asked(machine, tile=design.tile, fast_accum=fast)
        check(machine, PLAIN, a, b, {}, out_dtypes=None, constraints=made)


@pytest.mark.parametrize("name", NARROW_EPILOGUES)
def test_epilogues_of_8_bits(name: str, machine: Machine) -> None:
    source = NARROW_EPILOGUES[name]
    for m, n, k in ((200, 256, 128), (131, 272, 78)):
        for dtypes in NARROW[:3:2]:
            a, b = narrow(machine, dtypes, m, n, k)
            out = None if name == "to int8" else F32
            check(machine, source, a, b, operands_of(machine, source, m, n), out_dtypes=out, constraints=asked(machine))


def test_the_largest_integers_of_8_bits(machine: Machine) -> None:
    a = torch.full((70, 4096), -128, dtype=torch.int8, device=machine.device)
    b = torch.full((72, 4096), 255, dtype=torch.uint8, device=machine.device).t()
    got = run(machine, PLAIN, a, b, {}, constraints=asked(machine), out_dtypes=None)["D"]
    assert torch.equal(got, torch.full((70, 72), -128 * 255 * 4096, dtype=torch.int32))


@pytest.mark.gpu
def test_tiles_have_the_same_bits_of_8_bits(hopper: Machine) -> None:
    """Float32 adds up sums of 128 products, in stages of 128 numbers of K and of 64."""
    for k in (1024, 1026):
        a, b = hopper.normal(333, k).to(torch.float8_e4m3fn), hopper.normal(250, k).to(torch.float8_e5m2).t()
        args = ef.GemmArguments(
            a, b, epilogue=ef.EpilogueArguments.partial(PLAIN, {}), constraints=asked(hopper), out_dtypes=F32
        )
        kernels = ef.get_kernels(args)
        assert len(kernels) > 1
        found = [kernel.run(args)["D"] for kernel in kernels]
        assert all(torch.equal(found[0], one) for one in found)
        want = a.double() @ b.double()
        assert float((found[0].double() - want).norm() / want.norm()) < 1e-5


@pytest.mark.gpu
def test_tf32_is_rounded_to_the_nearest(hopper: Machine) -> None:
    """mma.sync itself cuts: 1 + 3 * 2^-12 would be 1."""
    a, b = torch.full((16, 5), 1 + 3 * 2.0**-12, device="cuda"), torch.eye(5, 8, device="cuda")
    got = run(hopper, PLAIN, a, b, {}, constraints=asked(hopper, precision="tf32"))["D"]
    assert torch.equal(got[:, :5], torch.full((16, 5), 1 + 2.0**-10))


@pytest.mark.parametrize("n", [256, 250, 253])
def test_a_result_may_take_an_operand_s_place(n: int, machine: Machine) -> None:
    """Lanes that share a row write what others of them have read."""
    a, b, C = machine.whole(131, 16), machine.whole(16, n), machine.whole(131, n)
    want = (a.cpu().float() @ b.cpu().float() + C.cpu().float()).bfloat16()
    source = "def epi(accum, C): D = accum + C; return D\n"
    made = ef.EpilogueArguments(function_of(source, {}), C=C, D=C)
    args = ef.GemmArguments(a, b, epilogue=made, constraints=asked(machine) or ef.Constraints())
    machine.kernel(args).run(args)
    assert torch.equal(C.cpu(), want)


def test_what_is_not_finite_stays_where_it_is(machine: Machine) -> None:
    a, b = machine.whole(70, 33), machine.whole(33, 41)
    a[1, 3], a[2, 5], a[3, 32], b[:, 7] = torch.inf, -torch.inf, torch.nan, 1.0
    got = run(machine, PLAIN, a, b, {}, constraints=asked(machine))["D"]
    want = (a.cpu().double() @ b.cpu().double()).bfloat16()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~want.isnan()], want[~want.isnan()])


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_run_has_the_same_bits(hopper: Machine) -> None:
    a, b = hopper.normal(500, 1001, dtype=BF16), hopper.normal(1001, 713, dtype=BF16)
    check_the_same_bits(hopper, function_of(PLAIN, {}), a, b, {})
    bias = {"bias": hopper.normal(713)}
    check_the_same_bits(hopper, function_of(EPILOGUES["reductions"], {}), a, b, bias)


@pytest.mark.gpu
def test_tiles_of_all_designs_have_the_same_bits(hopper: Machine) -> None:
    a, b = hopper.normal(333, 1001, dtype=BF16), hopper.normal(1001, 250, dtype=BF16)
    found = []
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(PLAIN, {}))
    for kernel in ef.get_kernels(args):
        found.append(kernel.run(args)["D"])
    assert len(found) > 1
    assert all(torch.equal(found[0], one) for one in found)


@pytest.mark.gpu
def test_a_captured_launch_is_replayed(hopper: Machine) -> None:
    a, b = hopper.normal(256, 1001, dtype=BF16), hopper.normal(1001, 383, dtype=BF16)
    D = torch.empty(256, 383, device="cuda", dtype=BF16)
    step = lambda: ef.gemm(a, b, epilogue=PLAIN, out=D)  # noqa: E731
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        a.copy_(hopper.normal(256, 1001, dtype=BF16))
        graph.replay()
        got = D.clone()
        step()
        assert torch.equal(D, got)
