"""Parts of a row on Hopper without a GPU: what is planned, what is refused and what to do then, what is compiled."""

import re

import pytest
import torch
from emulated import Emulated, emulated  # noqa: F401  # a fixture
from gpu import test_parts as on_gpu
from gpu.harness import LAYOUTS, check
from hopper import BF16, SCHEDULES, arguments, reasons
from machine_code import spills
from test_sm90_compile import built

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

M, N, HALF = 4096, 1024, 512


def swiglu(accum):
    gate, up = accum.chunk(2, dim=-1)
    D = ef.silu(gate) * up
    return D


def interleaved(accum):
    D = ef.silu(accum[..., 0::2]) * accum[..., 1::2]
    return D


def test_no_rows_are_refused_by_nothing_that_rows_are_not():
    """A first kernel converts or copies a B that lies by rows, where there are rows."""
    for dtype, of_b in ((BF16, torch.int8), (torch.float32, torch.float32)):
        for m in (0, 64):
            a, b = torch.empty(m, 64, dtype=dtype), torch.empty(64, 256, dtype=of_b)
            asked = ef.Constraints(precision="tf32" if of_b == torch.float32 else None)
            args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(interleaved, {}), constraints=asked)
            assert ef.get_kernels(args, cc=90, limit=1)


def everything(accum, bias, C):
    x = accum + bias
    gate, up = x.chunk(2, dim=-1)
    D = ef.silu(gate) * up + C
    return D, x


def reduced(accum):
    gate, up = accum.chunk(2, dim=-1)
    D = ef.silu(gate) * up
    columns = ef.sum(D, dim=0)
    return D, columns


def backward(accum, wide):
    gate, up = wide.chunk(2, dim=-1)
    s = ef.sigmoid(gate)
    dgate = accum * up * s * (1 + gate * (1 - s))
    dup = accum * gate * s
    h = gate * s * up
    return dgate, dup, h


WIDE, OF_PART = torch.empty(M, N, dtype=BF16), torch.empty(M, HALF, dtype=BF16)
CASES = {
    "swiglu": arguments(swiglu, m=M, n=N),
    "interleaved": arguments(interleaved, m=M, n=N),
    "everything": arguments(everything, m=M, n=N, bias=torch.empty(N), C=OF_PART),
    "reduced": arguments(reduced, m=M, n=N),
    "backward": arguments(backward, m=M, n=HALF, wide=WIDE),
}


def transports(args):
    plan = ef.get_kernels(args, cc=90)[0].plan
    return [(name, way.partition(",")[0]) for name, way in plan.allocation.transports]


TILE = "TMA through shared memory"


def test_tensors_of_both_parts_travel_by_two_tma_descriptors():
    assert transports(CASES["everything"]) == [
        ("bias", "once a tile"),
        ("bias", "once a tile"),
        ("C", TILE),
        ("D", TILE),
        ("x", TILE),
        ("x", TILE),
    ]
    assert transports(CASES["backward"]) == [("wide", TILE)] * 2 + [("dgate", TILE), ("dup", TILE), ("h", TILE)]


def test_a_plan_tells_of_its_parts():
    text = str(ef.explain(CASES["swiglu"], cc=90))
    tile = re.search(r"tile +\d+ x (\d+)", text)
    assert f"each tile holds both parts of a row, {int(tile[1]) // 2} columns of each" in text


def test_one_structure_serves_all_rows():
    """Of one N: a kernel has M at run time."""
    found = (ef.get_kernels(arguments(swiglu, m=m, n=N), cc=90) for m in (2048, 4096))
    first, second = ({kernel.plan.allocation.program.text for kernel in kernels} for kernels in found)
    assert first == second


def halves_of_halves(accum):
    a, b, c, d = accum.chunk(4, dim=-1)
    return a * b + c * d


def both_ways(accum):
    a, _ = accum.chunk(2, dim=-1)
    return a * accum[..., 1::2].sum(dim=-1, keepdim=True)


def of_heads(accum):
    a, b = accum.unflatten(-1, (16, 64)).chunk(2, dim=-1)
    return a * b


def normalised(accum):
    gate, up = accum.chunk(2, dim=-1)
    h = ef.silu(gate) * up
    return h * ef.rsqrt(ef.mean(h * h, dim=-1, keepdim=True) + 1e-6)


def of_all_parts(accum):
    gate, up = accum.chunk(2, dim=-1)
    D = gate * up
    sums = ef.sum(accum, dim=-1)
    return D, sums


def router(accum):
    best = accum.unflatten(-1, (-1, 16)).amax(-1)
    weights = best.softmax(-1)
    penalty = accum.logsumexp(-1).square().mean()
    return weights, penalty


def every_second_sum(accum):
    sums = accum.sum(0)
    even = sums[0::2]
    return sums, even


def scales_of_pairs(accum):
    scales = ef.absmax(accum.unflatten(-1, (-1, 16)), dim=-1)
    a, b = scales.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.maximum(a, b)
    return scales, pairs


OUT = "store the product, and take its parts in PyTorch"
OF_REDUCED = "it takes a part of what is reduced: return the reduction, and take its part in PyTorch"
REFUSED = {
    "a softmax over groups": (
        arguments(router, n=N),
        (
            "it reduces only values with all M x N elements, and the argument of amax has fewer: store its argument, "
            "and reduce that in PyTorch"
        ),
    ),
    "every second sum": (arguments(every_second_sum, n=N), OF_REDUCED),
    "neighbouring blocks": (arguments(scales_of_pairs, n=N), OF_REDUCED),
    "four parts": (arguments(halves_of_halves, n=N), f"it takes one of two parts of a row, not of 4: {OUT}"),
    "two distances": (
        arguments(both_ways, n=N),
        f"it takes parts of a row that lie at one distance, not at two: {OUT}",
    ),
    "parts of heads": (
        arguments(of_heads, n=N),
        (
            "it takes halves of a row, or every second column, not columns 32 apart: permute the weight's rows once, "
            "so that the parts are halves of the row, or store the product"
        ),
    ),
    "whole rows": (
        arguments(normalised, n=1024),
        (
            "it takes parts of a row where no value needs whole rows: store the product, and combine its parts in "
            "PyTorch, or pass allow_recompute=True"
        ),
    ),
    "a sum of all parts": (
        arguments(of_all_parts, n=N),
        (
            "it takes parts of a row, and reduces the whole row: reduce each part, or "
            "store the product, and take its parts in PyTorch"
        ),
    ),
    "no eight columns": (
        arguments(swiglu, n=24),
        (
            "it weaves 8 columns of one part and 8 of the other, and parts of N = 24 columns have 12: pad each part "
            "to a multiple of 8"
        ),
    ),
    "interleaved, B by rows": (
        arguments(interleaved, n=N, b_transposed=False),
        (
            "every second column needs B by columns (K contiguous): pass weight.T of an (N, K) weight, or "
            "B.mT.contiguous().mT"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_with_a_way_out(name):
    args, reason = REFUSED[name]
    assert reason in reasons(args)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", on_gpu.CASES)
def test_each_part_is_handed_over_where_it_lies(name, layout, emulated: Emulated):  # noqa: F811
    on_gpu.test_both_parts_of_a_row_are_there(name, layout, emulated)


OF_STATISTICS = {
    "by heads": "D = (r * c).unflatten(-1, (-1, 8)).transpose(0, 1)",
    "chosen": "D = where(r > c, r, c)",
    "places": "D = (r * (index_n(half) + 1)).unflatten(-1, (-1, 8)).transpose(0, 1)",
}


@pytest.mark.parametrize("name", OF_STATISTICS)
def test_what_a_second_sweep_computes_of_a_part_has_its_columns(name, emulated: Emulated):  # noqa: F811
    """Of the sums and the largest values of one half, and of no product: the second launch has half of the columns."""
    head = "half = accum.chunk(2, -1)[0]; c, r = half.sum(0, keepdim=True), half.amax(-1, keepdim=True)"
    a, b = emulated.whole(64, 16), emulated.whole(128, 16).t()
    source = f"def epi(accum): {head}; {OF_STATISTICS[name]}; return D"
    check(emulated, source, a, b, {}, constraints=ef.Constraints(allow_recompute=True), out_dtypes=torch.float32)


def test_batches_reductions_and_backward_are_handed_over(emulated: Emulated):  # noqa: F811
    for name in on_gpu.REDUCED:
        on_gpu.test_parts_are_reduced(name, emulated)
    for layout in LAYOUTS:
        on_gpu.test_of_a_b_by_rows("operands of every width", layout, emulated)
    for order in ("stacked", "interleaved"):
        on_gpu.test_the_backward_of_a_gate(order, emulated)
    for shared in (False, True):
        for name in ("swiglu", "interleaved", "what comes before the gate"):
            on_gpu.test_of_batches(name, shared, emulated)
    on_gpu.test_parts_of_operands_alone(emulated)
    on_gpu.test_where_k_is_zero(emulated)
    for onto in (("D",), ("x",), ("D", "x")):
        on_gpu.test_onto_what_is_there(onto, emulated)
    on_gpu.test_over_what_was_read(emulated)


@pytest.mark.parametrize("name", [name for name in CASES if name != "backward"])
def test_nothing_spills_beside_the_widest_accumulator(name, capfd, tmp_path):
    """One TMA load a stage brings the rows of both parts; matrices and TMA store D."""
    design = next(one for one in DESIGNS if one.tile == (128, 256))
    program, design, function = built(CASES[name], tmp_path, design)
    ptx = function.__ptx__
    stored = sum(access.travels.staged for access in program.stores)
    loaded = sum(access.travels.staged for _, access in program.loads)
    columns = 256 // design.parts
    assert design.columns == columns
    assert ptx.count("wgmma.mma_async") == 4
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.5d\.shared\S+multicast", ptx)) == 1
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)) >= 2 + loaded
    # A warp stores 16 rows of 32 columns at once, in two matrices of four times 8 x 8.
    assert ptx.count("stmatrix.sync") == 2 * stored * columns // 32
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global", ptx)) == stored * columns // 32
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report


@pytest.mark.sweep
@pytest.mark.parametrize("by_rows", [False, True], ids=["by columns", "by rows"])
@pytest.mark.parametrize(
    "design", [one for one in SCHEDULES.values() if one.tile[1] % 64 == 0 and one.tile != (64, 64)], ids=str
)
def test_every_design_carries_parts(design, by_rows, capfd, tmp_path):
    """Of B by rows TMA brings each part to a half of the tile, in boxes of 64 columns as it does of all of B."""
    args = arguments(swiglu, m=M, n=N, b_transposed=not by_rows)
    if by_rows and design.tile[1] % 128:
        refused = {r.kernel: r.reason for r in ef.explain(args, cc=90).refusals if "multiples of 64" in r.reason}
        m, n = design.tile
        assert any(f"_{m}x{n}_" in kernel for kernel in refused)
        return
    ptx = built(args, tmp_path, design)[2].__ptx__
    plain = built(arguments(lambda accum: accum, m=M, n=N, b_transposed=not by_rows), tmp_path, design)[2].__ptx__
    loads = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.shared")
    assert len(loads.findall(ptx)) == len(loads.findall(plain))
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report
