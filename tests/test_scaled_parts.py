"""Block scales where the epilogue takes parts of a row or ranges of columns: which scales each has."""

import itertools
import operator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from emulated import emulated as emulated
from emulated import on_hopper as on_hopper  # fixtures
from hopper import reasons
from test_scaled import F32, arguments, gated, product, quantised

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS
from epifuse.providers.cutedsl.weave import rows
from epifuse.request.scaled import BLOCK


def every_second(accum):
    D = ef.silu(accum[..., 0::2]) * accum[..., 1::2]
    return D


@pytest.mark.parametrize("epilogue", [gated, every_second])
def test_parts_of_a_row_behind_scaled_products(epilogue):
    plans = [kernel.plan for kernel in ef.get_kernels(arguments(epilogue), cc=90)]
    found = {(plan.spec.design.tile, plan.allocation.program.design.scaled) for plan in plans}
    assert {((128, 256), (True, True)), ((128, 128), (True, True))} <= found


def test_halves_that_cut_a_block():
    found = reasons(arguments(gated, n=320))
    assert any(
        "each half of N has 160 columns, which is no multiple of the 128 that share a scale" in one for one in found
    )
    assert ef.get_kernels(arguments(every_second, n=320), cc=90)
    assert ef.get_kernels(arguments(gated, n=320, sides="A"), cc=90)


TILES = [
    design for design in DESIGNS if design.cluster == (2, 1) and design.tile in ((128, 256), (256, 128), (64, 128))
]


def scales_in(design, order, sides=(True, True)):
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    from epifuse.providers.cutedsl.kernels.block_scales import BlockScales

    return BlockScales(replace(design, parts=2 if order else 1, promoted=128, scaled=sides), order)


@pytest.mark.parametrize("design", TILES, ids=str)
@pytest.mark.parametrize("order", ["", "stacked", "interleaved"])
def test_a_tile_has_the_blocks_of_its_columns(design, order):
    """Of the columns of B in the order in which TMA brings them: see `weave.rows`."""
    n, width, scales = 1024, design.tile[1], scales_in(design, order)
    extents, strides = rows(order, n // 2, 1) if order else ((n,), (1,))
    places = [range(extent) for extent in reversed(extents)]
    columns = [sum(map(operator.mul, reversed(place), strides)) for place in itertools.product(*places)]
    assert sorted(columns) == list(range(n))
    for tile in range(n // width):
        of_tile = {column // BLOCK for column in columns[tile * width : (tile + 1) * width]}
        assert {int(line) for line in scales.lines(tile, n // BLOCK)} == of_tile


@pytest.mark.parametrize("sides", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("design", TILES, ids=str)
def test_a_value_has_the_scales_of_its_row_and_its_half(design, sides):
    """A thread of wgmma has of each 8 columns two of one row, then two of the row eight below (PTX, 9.7.15)."""
    scales = scales_in(design, "stacked", sides)
    from epifuse.providers.cutedsl.kernels.fragment import Fragment
    from epifuse.providers.cutedsl.kernels.promotion import Promotion

    def placed(lane):
        return [(8 * (i // 2 % 2) + lane // 4, 8 * (i // 4) + 2 * (lane % 4) + i % 2) for i in range(16)]

    epilogue = SimpleNamespace(fragment=Fragment.of(placed))
    of_rows = range(2 * design.rows // 64) if sides[0] else (None,)
    taken = [[[(row, part) for part in ((0, 1) if sides[1] else (None,))] for row in of_rows]]
    for piece in Promotion(scales.design, 1).pieces:
        found = scales.factors(taken, piece, epilogue)
        for i in range(2 * min(design.tile[1], 128) // 4):
            row = 2 * piece[1] + i // 2 % 2 if sides[0] else None
            assert found[i % len(found)] == (row, i // 4 % 2 if sides[1] else None)


def ranges(*widths):
    """An epilogue that makes something else of each range of columns."""
    names = [f"p{i}" for i in range(len(widths))]
    lines = [f"    q{i} = {name} * {i + 1}" for i, name in enumerate(names)]
    results = ", ".join(f"q{i}" for i in range(len(widths)))
    taken = f"    {', '.join(names)} = accum.split({[*widths]}, dim=-1)"
    return "\n".join(["def f(accum):", taken, *lines, f"    return {results}", ""])


@pytest.mark.parametrize("sides", ["AB", "A", "B"])
@pytest.mark.parametrize("widths", [(512, 128, 128), (64, 448), (130, 126), (1, 383), (200, 100, 212)], ids=str)
def test_each_range_of_columns_has_the_scales_of_its_own(widths, sides):
    """Ranges begin where blocks do, and within them."""
    a, weight, of_a, of_weight = quantised(40, sum(widths), 300)
    of_a, of_weight = (
        x if side in sides else torch.ones_like(x) for side, x in zip("AB", (of_a, of_weight), strict=True)
    )
    given = ef.Scaled(a, of_a) if "A" in sides else a, ef.Scaled(weight, of_weight) if "B" in sides else weight
    found = ef.linear(*given, epilogue=ranges(*widths), out_dtypes=F32)
    for i, want in enumerate(product(a, weight, of_a, of_weight).split(widths, dim=-1)):
        torch.testing.assert_close(found[f"q{i}"].double(), (i + 1) * want, rtol=1e-4, atol=1e-4)


def test_a_bound_call_of_ranges_reads_its_scales_anew():
    a, weight, of_a, of_weight = quantised(8, 256, 128)
    scaled = ef.Scaled(a, of_a), ef.Scaled(weight.t(), of_weight.t())
    outputs = {"q0": torch.empty(8, 130), "q1": torch.empty(8, 126)}
    args = ef.GemmArguments(*scaled, epilogue=ef.EpilogueArguments(ranges(130, 126), **outputs))
    call = ef.get_kernels(args)[0].bind(args)
    call()
    before = {name: output.clone() for name, output in outputs.items()}
    of_weight.mul_(4)
    call()
    assert all(torch.equal(output, 4 * before[name]) for name, output in outputs.items())


def test_hopper_has_the_scales_of_each_range():
    """In launches of their own, as an absmax of one of them asks for; and where one cannot be one."""
    kv = "def f(accum): q, k = accum.split([512, 256], dim=-1); most = absmax(k); return q, k, most"
    (best, *_) = ef.get_kernels(arguments(kv, n=768), cc=90)
    launches = best.plan.allocation.launches
    assert [dict(launch.problem.scales)["scales of B"].shape for launch in launches] == [(32, 4), (32, 2)]
    uneven = arguments(kv.replace("[512, 256]", "[448, 320]"), n=768)
    assert any("448:768 need a launch of their own, because" in one for one in reasons(uneven))
    (best, *_) = ef.get_kernels(arguments(ranges(448, 320), n=768), cc=90)
    assert not best.plan.allocation.launches


# --- launches ---------------------------------------------------------------------------------------------------------


def gated_blocks(accum):
    gate, up = accum.chunk(2, dim=-1)
    of_row = (ef.silu(gate) * up).unflatten(-1, (-1, 32))
    scale = ef.block_scale(ef.absmax(of_row, dim=-1, keepdim=True), rounding="up")
    D = (of_row / scale).flatten(-2, -1)
    return D, scale


@pytest.mark.parametrize("m", [5, 200])
@pytest.mark.parametrize("sides", ["A", "B", "AB"])
@pytest.mark.usefixtures("on_hopper")
def test_a_launch_has_the_scales_and_stores_powers_of_two(m, sides):
    a, weight, of_a, of_weight = quantised(m, 512, 272)
    wide = product(a, weight, *(x if s in sides else torch.ones_like(x) for x, s in ((of_a, "A"), (of_weight, "B"))))
    given = ef.Scaled(a, of_a) if "A" in sides else a, ef.Scaled(weight, of_weight) if "B" in sides else weight
    dtypes = {"D": torch.float32, "scale": torch.float8_e8m0fnu}
    values, scale = ef.linear(*given, epilogue=gated_blocks, out_dtypes=dtypes)
    want = ef.reference(gated_blocks)(wide)
    torch.testing.assert_close(scale.double(), want[1])
    torch.testing.assert_close(values.double(), want[0], atol=1e-2, rtol=1e-4)


def requantised(accum, multiplier, shift):
    """In fixed point."""
    return (accum.to(torch.int64) * multiplier + (1 << 30) >> shift).clamp(-128, 127)


@pytest.mark.parametrize("m", [5, 200])
@pytest.mark.usefixtures("on_hopper")
def test_a_launch_computes_with_integers(m):
    a, weight = (torch.randint(-128, 128, (rows, 256), dtype=torch.int8) for rows in (m, 64))
    given = {"multiplier": torch.randint(2**20, 2**25, (64,)), "shift": torch.tensor(34)}
    found = ef.linear(a, weight, epilogue=requantised, out_dtypes=torch.int8, **given)
    assert torch.equal(found, requantised(a.int() @ weight.t().int(), **given).to(torch.int8))
