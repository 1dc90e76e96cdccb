"""Segments of a row on Hopper without a GPU: what is planned, what is refused and what to do then, what is compiled."""

import re

import pytest
import torch
from emulated import Emulated, emulated  # noqa: F401  # a fixture
from gpu import test_segments as on_gpu
from hopper import BF16, SCHEDULES, arguments, reasons
from machine_code import spills
from test_sm90_compile import built

import epifuse as ef
from epifuse.providers.cutedsl.designs import HEAD_DESIGNS

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

M, N = 1024, 1536


def block_scales(accum, bias):
    y = ef.gelu(accum + bias, approximate="tanh")
    scale = ef.absmax(y.unflatten(-1, (-1, 128)), dim=-1)
    return y, scale


def quantised(accum, bias):
    y = ef.gelu(accum + bias, approximate="tanh").unflatten(-1, (-1, 32))
    largest = ef.absmax(y, dim=-1, keepdim=True)
    scale = ef.where(largest == 0, 1.0, largest / 448.0)
    D = (y / scale).flatten(-2, -1)
    return D, scale


def head_norm(accum, weight):
    x = accum.unflatten(-1, (-1, 128))
    D = (x * ef.rsqrt(ef.mean(x * x, dim=-1, keepdim=True) + 1e-6) * weight).flatten(-2, -1)
    return D


def head_layer_norm(accum, C):
    x = (accum + C).unflatten(-1, (-1, 64))
    y = x - ef.mean(x, dim=-1, keepdim=True)
    D = (y * ef.rsqrt(ef.mean(y * y, dim=-1, keepdim=True) + 1e-6)).flatten(-2, -1)
    return D


def head_softmax(accum):
    D = ef.softmax(accum.unflatten(-1, (-1, 96)), dim=-1).flatten(-2, -1)
    return D


def finest(accum):
    sums = ef.sum(accum.unflatten(-1, (-1, 8)), dim=-1)
    return accum, sums


def beside_columns(accum):
    x = accum.unflatten(-1, (-1, 64))
    D = (x - ef.amax(x, dim=-1, keepdim=True)).flatten(-2, -1)
    columns = ef.sum(D, dim=0)
    return D, columns


def rotated(x, cosines, sines):
    """The halves of each head by an angle."""
    a, b = x.chunk(2, dim=-1)
    return ef.cat((a * cosines[:, None] - b * sines[:, None], b * cosines[:, None] + a * sines[:, None]), dim=-1)


def rotary(accum, cosines, sines):
    D = rotated(accum.unflatten(-1, (-1, 64)), cosines, sines).flatten(-2, -1)
    return D


def rotary_by_pairs(accum, cosines, sines):
    a, b = accum.unflatten(-1, (-1, 32, 2)).unbind(-1)
    first = a * cosines[:, None] - b * sines[:, None]
    D = ef.stack((first, b * cosines[:, None] + a * sines[:, None]), dim=-1).flatten(-3, -1)
    return D


def norm_and_rotary(accum, weight, cosines, sines):
    x = accum.unflatten(-1, (-1, 128))
    y = x * ef.rsqrt(ef.mean(x * x, dim=-1, keepdim=True) + 1e-6) * weight
    D = rotated(y, cosines, sines).flatten(-2, -1)
    return D


def swapped_sums(accum, C):
    a, b = (accum + C).unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    D = ef.cat((a - b, b + a), dim=-1).flatten(-2, -1)
    return D


def quantised_gate(accum):
    gate, up = accum.chunk(2, dim=-1)
    h = (ef.silu(gate) * up).unflatten(-1, (-1, 128))
    largest = ef.absmax(h, dim=-1, keepdim=True)
    scale = ef.where(largest == 0, 1.0, largest / 448.0)
    D = (h / scale).flatten(-2, -1)
    return D, scale


def angles(width):
    return {name: torch.empty(M, width, dtype=BF16) for name in ("cosines", "sines")}


CASES = {
    "block scales": arguments(block_scales, m=M, n=N, bias=torch.empty(N, dtype=BF16)),
    "quantised": arguments(quantised, m=M, n=N, bias=torch.empty(N, dtype=BF16)),
    "head norm": arguments(head_norm, m=M, n=N, weight=torch.empty(128, dtype=BF16)),
    "head layer norm": arguments(head_layer_norm, m=M, n=N, C=torch.empty(M, N, dtype=BF16)),
    "head softmax": arguments(head_softmax, m=M, n=N),
    "finest": arguments(finest, m=M, n=N),
    "beside columns": arguments(beside_columns, m=M, n=N),
    "quantised gate": arguments(quantised_gate, m=M, n=2 * N),
    "rotary": arguments(rotary, m=M, n=N, **angles(32)),
    "rotary by pairs": arguments(rotary_by_pairs, m=M, n=N, **angles(32)),
    "norm and rotary": arguments(norm_and_rotary, m=M, n=N, weight=torch.empty(128, dtype=BF16), **angles(64)),
    "swapped sums": arguments(swapped_sums, m=M, n=N, C=torch.empty(M, N, dtype=BF16)),
}
SPILLED = {"beside columns": 8, "rotary by pairs": 16}
"""Bytes at most, beside 128 accumulators."""
WIDTHS = {
    "quantised gate": 256,
    "norm and rotary": 128,
    "rotary": 64,
    "head norm": 128,
    "block scales": 128,
    "head softmax": 96,
}


# Every case beside 128 accumulators a thread, where registers are fewest, and in each other tile those that fill it.
TILES = [
    *(((128, 256), name) for name in CASES),
    *(((128, 192), name) for name in ("head softmax", "finest", "head norm")),
    *(((128, 128), name) for name in ("norm and rotary", "block scales", "quantised gate")),
    *(((64, 64), name) for name in ("rotary", "finest", "head norm")),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("tile", "name"), TILES, ids=str)
def test_every_design_that_holds_segments_carries_them(tile, name, capfd, tmp_path):
    """In one launch, and nothing is told to other CTAs."""
    args, width, design = CASES[name], WIDTHS.get(name, 32), SCHEDULES[tile]
    crowded = {r.kernel for r in ef.explain(args, cc=90).refusals if "too few registers" in r.reason}
    m, n = design.tile
    if n % width or any(f"_{m}x{n}_" in kernel for kernel in crowded):
        assert design not in [kernel.plan.spec.design for kernel in ef.get_kernels(args, cc=90)]
        return
    _, design, function = built(args, tmp_path, design)
    assert design.exchanged == 0
    assert "st.async" not in function.__ptx__
    report = capfd.readouterr().err
    assert max(spills(report)) <= SPILLED.get(name, 0)
    assert "serialized" not in report


def squashed(accum):
    x = torch.tanh(accum).unflatten(-1, (-1, 64))
    D = (x * ef.absmax(x, dim=-1, keepdim=True)).flatten(-2, -1)
    return D


BESIDE_192 = {
    "block scales": (HEAD_DESIGNS[0], arguments(block_scales, m=M, n=N, k=2048, bias=torch.empty(N, dtype=BF16))),
    "head norm": (HEAD_DESIGNS[0], arguments(head_norm, m=M, n=N, k=2048, weight=torch.empty(128, dtype=BF16))),
    "quantised": (SCHEDULES[128, 192], arguments(quantised, m=M, n=N, k=2048, bias=torch.empty(N, dtype=BF16))),
    "softmax": (SCHEDULES[128, 192], arguments(head_softmax, m=M, n=N, k=2048)),
    "quantised, short K": (SCHEDULES[128, 192], CASES["quantised"]),
}


@pytest.mark.sweep("tile")
@pytest.mark.parametrize(("name", "tile"), [(name, design.tile) for name, (design, _) in BESIDE_192.items()], ids=str)
def test_segments_fit_beside_192_accumulators(name, tile, capfd, tmp_path):
    """Where the main loop hides what is computed of them, and where K is short."""
    design, args = BESIDE_192[name]
    built(args, tmp_path, design)
    assert max(spills(capfd.readouterr().err)) == 0


def test_what_spills_beside_192_accumulators_is_refused():
    """An exact tanh that is read again."""
    args = arguments(squashed, m=M, n=N, k=2048)
    told = [r.reason for r in ef.explain(args, cc=90).refusals if "128x192_pingpong" in r.kernel]
    assert any("its accumulator leaves too few registers for reductions" in reason for reason in told)


def shuffles(args, folder, design):
    return built(args, folder, design)[2].__ptx__.count("shfl.sync.bfly")


def test_lanes_complete_different_segments(tmp_path):
    """Of 64 x 128 a thread has a segment of two rows, or 16 of each: lanes keep half of them, until one is left.

    Where each lane completed all there would be two shuffles for each segment.
    """
    design = SCHEDULES[64, 128]
    slots = {"head norm": 2, "head layer norm": 2 * 2 * 2, "finest": 2 * 16}
    for name, count in slots.items():
        assert shuffles(CASES[name], tmp_path, design) <= count, name


def test_what_is_read_again_is_walked_block_by_block(tmp_path):
    """The first segment's subtiles leave before the last one's are reduced: no whole tile of values waits."""
    ptx = built(CASES["head layer norm"], tmp_path, SCHEDULES[128, 256])[2].__ptx__
    order = re.findall(r"shfl\.sync\.bfly|stmatrix", ptx)
    assert order.index("stmatrix") < order.index("shfl.sync.bfly", order.index("stmatrix"))


def test_columns_that_meet_are_in_one_thread(tmp_path):
    """Without a shuffle, and without a choice by the column: half of the products are of either kind."""
    design = SCHEDULES[64, 128]
    plain, turned = (
        built(args, tmp_path, design)[2].__ptx__ for args in (arguments(lambda accum: accum, m=M, n=N), CASES["rotary"])
    )
    assert "shfl.sync.bfly" not in turned
    products = turned.count("mul.f32") + turned.count("fma.rn.f32") - plain.count("mul.f32") - plain.count("fma.rn.f32")
    assert products == 2 * 64  # of two values each of a thread's 64
    assert turned.count("stmatrix") == plain.count("stmatrix")


def test_a_sum_that_is_turned_comes_by_tma(tmp_path):
    """It waits in the accumulator's registers for the columns that it meets."""
    transports = dict(ef.get_kernels(CASES["swapped sums"], cc=90)[0].plan.allocation.transports)
    assert transports == {"C": "TMA through shared memory", "D": "TMA through shared memory"}


def test_nothing_is_merged_after_the_launch():
    for name in ("block scales", "quantised", "head norm"):
        kernel = ef.get_kernels(CASES[name], cc=90)[0]
        assert kernel.get_workspace_size(CASES[name]) == 0
        assert len(kernel.plan.allocation.launches) == 0


def of_heads(accum):
    return ef.sum(accum.unflatten(-1, (-1, 64)), dim=-2)


def of_twelve(accum):
    return ef.absmax(accum.unflatten(-1, (-1, 12)), dim=-1)


def of_144(accum):
    x = accum.unflatten(-1, (-1, 144))
    return x * ef.rsqrt(ef.mean(x * x, dim=-1, keepdim=True) + 1e-6)


def of_512(accum):
    return ef.absmax(accum.unflatten(-1, (-1, 512)), dim=-1)


def of_rows_and_heads(accum):
    x = (accum / ef.norm(accum, dim=-1, keepdim=True)).unflatten(-1, (-1, 64))
    return x - ef.amax(x, dim=-1, keepdim=True)


def of_results(accum):
    largest = ef.absmax(accum.unflatten(-1, (-1, 64)), dim=-1)
    return ef.sum(largest, dim=-1)


def twelve_apart(accum):
    a, b = accum.unflatten(-1, (-1, 24)).chunk(2, dim=-1)
    return ef.cat((b, a), dim=-1)


def of_a_gate(accum):
    gate, up = accum.chunk(2, dim=-1)
    return ef.absmax((ef.silu(gate) * up).unflatten(-1, (-1, 256)), dim=-1)


@pytest.mark.parametrize("columns", [32, 64, 96, 128])
@pytest.mark.parametrize("name", on_gpu.OF_A_GATE)
def test_a_gate_before_a_row_that_is_one_segment(name, columns, emulated: Emulated):  # noqa: F811
    on_gpu.test_a_gate_before_a_row_that_is_one_segment(name, columns, emulated)


OUT = "store its argument, and reduce that in PyTorch"
REFUSED = {
    "columns that are no neighbours": (
        arguments(of_heads, n=N),
        f"it reduces whole axes and neighbouring columns, and sum reduces a part of an axis that a reshape cut: {OUT}",
    ),
    "no multiple of eight": (
        arguments(of_twelve, n=N),
        f"it reduces neighbouring columns by multiples of 8, and not absmax over 12 columns: {OUT}",
    ),
    "no tile is so wide": (
        arguments(of_512, n=N),
        (
            "absmax over 512 neighbouring columns needs tiles of a multiple of 512 columns, and there are 64, 96, "
            f"128, 160, 192, 224, 256: {OUT}"
        ),
    ),
    "no tile is such a multiple": (
        arguments(of_144, n=1440),
        (
            "mean over 144 neighbouring columns needs tiles of a multiple of 288 columns, and there are 64, 96, 128, "
            f"160, 192, 224, 256: {OUT}"
        ),
    ),
    "rows too": (
        arguments(of_rows_and_heads, n=512),
        (
            "it does not combine a value that needs its whole row with a reduction of segments of a row: write two "
            "epilogues, and call twice"
        ),
    ),
    "what is reduced": (
        arguments(of_results, n=N),
        f"it reduces only values with all M x N elements, and the argument of sum has fewer: {OUT}",
    ),
    "columns of other lanes": (
        arguments(twelve_apart, n=N),
        (
            "it takes columns of a row that are a multiple of 8 apart, halves of a row, or neighbours, not columns 12 "
            "apart: permute the weight's rows once, so that these are neighbours, or store the product"
        ),
    ),
    "half a tile is too narrow": (
        arguments(of_a_gate, n=N),
        (
            "absmax over 256 neighbouring columns needs tiles of a multiple of 256 columns, and there are 32, 64, 96, "
            f"128: {OUT}"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_with_a_way_out(name):
    args, reason = REFUSED[name]
    assert reason in reasons(args)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["rows", "columns", "odd"])
@pytest.mark.parametrize("name", on_gpu.CASES)
def test_each_segment_is_handed_over_where_it_lies(name, layout, emulated: Emulated):  # noqa: F811
    on_gpu.test_each_segment_has_its_own(name, layout, emulated)


def test_batches_sizes_and_blocks_are_handed_over(emulated: Emulated):  # noqa: F811
    for name in ("beside the product", "softmax", "stored of what is read"):
        on_gpu.test_of_batches(name, emulated)
    for shape in ((1, 192, 8), (64, 384, 64), (129, 1152, 520)):
        on_gpu.test_of_every_size("layer norm", shape, emulated)
    for width in (16, 128):
        on_gpu.test_blocks_are_quantised(width, emulated)
    on_gpu.test_of_normal_numbers(emulated)
    on_gpu.test_blocks_of_few_rows(emulated)
    on_gpu.test_where_k_is_zero(emulated)
