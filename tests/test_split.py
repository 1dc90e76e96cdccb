"""Parts of K: where planning takes them, where their sums lie, and what is compiled."""

import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import epifuse as ef

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from hopper import BF16, arguments
from machine_code import spills
from test_sm90_compile import built, softmax

from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import SPLIT_DESIGNS, SPLIT_ROW_DESIGNS, SWAPPED_DESIGNS, budget, tuned
from epifuse.providers.cutedsl.design import WARP_GROUP, Design
from epifuse.providers.cutedsl.designs import WIDE_SWAPPED_DESIGNS
from epifuse.providers.cutedsl.kernels import split
from epifuse.providers.cutedsl.kernels.split import Split

EXCHANGED = [one.exchanged_sides for one in (*SWAPPED_DESIGNS, *WIDE_SWAPPED_DESIGNS) if one.split > 1]
OTHERS = Design((128, 256), (2, 1), False, split=4), Design((64, 64), (1, 1), True, 2, split=4)
"""Warp groups that share a tile, in clusters; more parts than planning takes."""


@pytest.mark.parametrize("design", [*SPLIT_DESIGNS, *SPLIT_ROW_DESIGNS, *OTHERS, *EXCHANGED], ids=str)
def test_sums_and_flags_do_not_overlap_in_the_workspace(design, monkeypatch):
    """Those of every tile, part, warp group and thread, behind what reductions leave there."""
    monkeypatch.setattr(split, "Int64", int)
    monkeypatch.setattr(split.cute, "size", lambda tensor: tensor.words)
    extents = {"m": 3 * design.tile[0] * design.cluster[0] - 1, "n": design.tile[1] * design.cluster[1], "l": 2}
    before, size = 1024, budget.sums_bytes(design, extents)
    start = 1 << 20
    iterator = SimpleNamespace(toint=lambda: start)
    workspace = SimpleNamespace(words=(before + size) // 4, iterator=iterator)
    parts, taken = Split(design), set()
    for turn, x, y in product(range(6), range(design.cluster[0]), range(design.cluster[1])):
        cta = SimpleNamespace(turns=SimpleNamespace(total=6), place=(x, y))
        for thread in (0, 1, WARP_GROUP * design.sharing - 1):
            at = parts.place(workspace, turn, cta, thread)
            for part in range(design.split - 1):
                sums = {at.sums + part * parts.bytes + quad * parts.row for quad in range(parts.quads)}
                assert all(place % 16 == 0 for place in sums)
                flags = set() if thread % WARP_GROUP else {at.flags + part * budget.FLAG_BYTES}
                assert not taken & (sums | flags)
                taken |= sums | flags
    assert min(taken) == start + before, "the first sums of the first tile"
    assert max(taken) + 8 <= start + before + size


def test_blocks_of_k_ascend_and_the_last_cluster_leads():
    parts = Split(Design((128, 128), (1, 1), True, split=4))
    shares = [parts.blocks(37, part) for part in range(4)]
    assert [first for first, _ in shares] == [sum(count for _, count in shares[:part]) for part in range(4)]
    assert sum(count for _, count in shares) == 37
    assert [parts.part(block) for block in range(8)] == [3, 2, 1, 0] * 2


def choice(m, n, k, **options):
    a, b = torch.empty(m, k, dtype=BF16, device="meta"), torch.empty(n, k, dtype=BF16, device="meta").t()
    return ef.explain(ef.GemmArguments(a, b, **options), cc=90)


FEW_TILES = [(1024, 1024, 16384), (512, 512, 32768), (256, 4096, 14336)]


@pytest.mark.parametrize("shape", FEW_TILES, ids=str)
def test_few_tiles_and_long_k_are_split(shape):
    found = choice(*shape).plan
    assert found.spec.design.split > 1
    assert f"K in {found.spec.design.split} parts" in str(found)
    m, n, _ = shape
    (bm, bn), (cm, cn) = found.spec.design.tile, found.spec.design.cluster
    tiles = -(-m // (bm * cm)) * cm * -(-n // (bn * cn)) * cn
    assert tiles * found.spec.design.split <= 132, "one wave"


MANY_TILES_OR_SHORT = [
    (4096, 4096, 16384),
    (1024, 4096, 4096),
    (512, 512, 1024),
    (4096, 28672, 8192),
    (2048, 2048, 2048),
]


@pytest.mark.parametrize("shape", MANY_TILES_OR_SHORT, ids=str)
def test_what_fills_the_gpu_or_has_little_k_is_not(shape):
    assert choice(*shape).plan.spec.design.split == 1


def test_a_split_is_asked_for_or_forbidden():
    assert choice(512, 512, 8192, constraints=ef.Constraints(split=1)).plan.spec.design.split == 1
    assert choice(4096, 4096, 4096, constraints=ef.Constraints(split=2)).plan.spec.design.split == 2
    refused = choice(512, 512, 8192, constraints=ef.Constraints(split=5))
    assert any("its split is 2, not the one asked for; there are" in one.reason for one in refused.refusals)
    for wrong in (0, True, "2"):
        with pytest.raises(ef.errors.ArgumentError, match="split must be a whole number from 1 on"):
            ef.Constraints(split=wrong)


def test_what_cannot_be_split_says_why():
    def reasons(k, **options):
        asked = ef.Constraints(split=2)
        return {one.reason for one in choice(512, 512, k, constraints=asked, **options).refusals}

    assert "K is too short for 2 parts: split-K takes 2048 bytes of K at least" in reasons(512)
    half = torch.empty(512, 4096, dtype=torch.float16, device="meta")
    args = ef.GemmArguments(half, half.t(), None, torch.float16, constraints=ef.Constraints(split=2))
    told = {one.reason for one in ef.explain(args, cc=90).refusals}
    assert "it adds up parts of K in 32 bits, and the accumulator is torch.float16" in told


@pytest.mark.parametrize("design", [*SPLIT_DESIGNS, *SPLIT_ROW_DESIGNS, *EXCHANGED], ids=str)
def test_every_part_has_a_block_of_the_shortest_k(design):
    """A part without one would wait for nothing, and its leader for it."""
    assert design.split * design.k_bytes <= tuned.SHORT_K.value


def test_plans_of_equal_bits_add_k_up_in_one_order():
    a, b = torch.empty(512, 4096, dtype=BF16), torch.empty(512, 4096, dtype=BF16).t()
    orders = {}
    for kernel in ef.get_kernels(ef.GemmArguments(a, b), cc=90):
        design = kernel.plan.spec.design
        orders.setdefault(kernel.plan.allocation.bits, set()).add((design.split, design.spans))
    (whole,) = (order for order in orders.values() if {split for split, _ in order} == {1})
    assert all(len(order) == 1 for order in orders.values() if order is not whole)


def with_squares(accum, C):
    D = accum + C
    rows = ef.sum_of_squares(D, dim=-1)
    return D, rows


def halved(accum):
    return 0.5 * accum


def test_large_tiles_take_no_operands_beside_sums_of_parts():
    args = arguments(with_squares, k=4096, C=torch.empty(512, 512, dtype=BF16))
    told = {one.kernel: one.reason for one in ef.explain(args, cc=90).refusals}
    assert "operands or reductions beside sums of parts of K" in told["sm90_gemm_128x192_pingpong_2x1_split2"]
    assert "sm90_gemm_128x128_pingpong_2x1_split2" not in told


def of_eighty(accum):
    x = accum.unflatten(-1, (-1, 80))
    return x * ef.rsqrt(ef.mean(x * x, dim=-1, keepdim=True) + 1e-6)


def test_blocks_that_one_width_holds_are_not_split_there():
    """Though nothing else carries them, the same tile does with K in one part."""
    found = ef.get_kernels(arguments(of_eighty, n=1280, k=4096), cc=90)
    assert {(one.spec.design.tile, one.spec.design.split) for one in found} == {((128, 160), 1)}


COMPILED = [one for one in SPLIT_DESIGNS if (one.split, one.cluster) in ((2, (2, 1)), (8, (1, 1)))]


@pytest.mark.sweep("large", "split")
@pytest.mark.parametrize(
    ("design", "large", "split"), [(one, one.rows * one.tile[1] > 128**2, one.split) for one in COMPILED], ids=str
)
def test_sums_go_straight_from_registers_and_nothing_spills(design, large, split, capfd, tmp_path):
    operands = {} if large else {"C": torch.empty(512, 512, dtype=BF16)}
    args = arguments(halved if large else with_squares, k=4096, **operands)
    program, staged, function = built(args, tmp_path, design)
    assert budget.shared_bytes(staged, [one for _, one in program.loads], program.stores) <= TARGETS[90].shared_memory
    ptx = function.__ptx__
    moved = re.findall(r"st\.global\S*v4", ptx)
    assert 4 * len(moved) == design.tile[0] * design.tile[1] // (128 * design.sharing), "each sum once"
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report


def test_leaders_alone_share_rows(capfd, tmp_path):
    """In warp groups that share a tile."""
    design = next(one for one in SPLIT_ROW_DESIGNS if not one.pingpong)
    built(arguments(softmax, m=64, n=1000, k=4096), tmp_path, design)
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report


def test_rows_whose_bits_do_not_depend_on_m_are_not_split():
    found = choice(512, 512, 32768, constraints=ef.Constraints(batch_invariant=True))
    assert found.plan.spec.design.split == 1
    assert any("batch_invariant asks for K in one part" in one.reason for one in found.refusals)


def plans(m: int, n: int, k: int) -> list[ef.Plan]:
    bias = torch.empty(n, dtype=BF16)
    args = arguments("lambda accum, bias: relu(accum + bias)", m, n, k, bias=bias)
    return [kernel.plan for kernel in ef.get_kernels(args, cc=90)]


@pytest.mark.parametrize("first", [2, 4000])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (1024, 16384), (1000, 4096), (64, 4096)])
def test_after_a_first_call_a_kernel_stands_in_whatever_m_is(first: int, n: int, k: int) -> None:
    """Some M take another number of parts of K, and so another kernel's bits; `with_other_rows` has one of each."""
    best = plans(first, n, k)[0].allocation
    compiled = {best.program.text, *best.with_other_rows()}
    assert len(compiled) > 1
    for m in (2, 17, 40, 64, 100, 129, 200, 300, 500, 700, 1000, 2000, 3000, 5000, 8000):
        allocations = [plan.allocation for plan in plans(m, n, k)]
        same = [one.program.text for one in allocations if one.bits == allocations[0].bits]
        assert compiled & set(same), m
