"""Parts of K: where planning takes them, what is compiled, and that no CTA waits for ever or reads what is old."""

import re
from dataclasses import replace

import pytest
import torch

import epifuse as ef

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from clusters import Cluster, stages_of
from hopper import BF16, arguments
from test_sm90_compile import built, softmax, spills

from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import SPLIT_DESIGNS, SPLIT_ROW_DESIGNS, SWAPPED_DESIGNS, budget, tuned
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.kernels import split

EXCHANGED = [one.exchanged_sides for one in SWAPPED_DESIGNS if one.split > 1]


def run(design, k_tiles, tiles, seed, monkeypatch):
    cluster = Cluster(design, k_tiles, tiles, seed)
    for name, value in cluster.fakes().items():
        monkeypatch.setattr(split, name, value)
    cluster.run()
    count = 4 * cluster.split.rounds * cluster.split.quads
    for rank in range(design.cluster[0] * design.cluster[1]):
        for tile in range(tiles):
            for within in range(design.sharing):
                found = cluster.sums[rank, tile, within]
                assert found == ["".join(f"{tile} {part} {i}; " for part in range(design.split)) for i in range(count)]


OTHERS = Design((128, 256), (2, 1), False, split=4), Design((64, 64), (1, 1), True, 2, split=4)
"""Parts that take more stages than there are; so few blocks of K that those of two tiles are open at once."""


@pytest.mark.parametrize("design", [*SPLIT_DESIGNS, *SPLIT_ROW_DESIGNS, *OTHERS, *EXCHANGED], ids=str)
def test_parts_are_added_in_ascending_order_and_nobody_waits_for_ever(design, monkeypatch):
    """With several tiles and as few blocks of K as planning allows, whatever comes first."""
    for seed in range(2):
        run(replace(design, stages=stages_of(design)), design.split + seed, 3, seed, monkeypatch)


def choice(m, n, k, **options):
    a, b = torch.empty(m, k, dtype=BF16, device="meta"), torch.empty(n, k, dtype=BF16, device="meta").t()
    return ef.explain(ef.GemmArguments(a, b, **options), cc=90)


FEW_TILES = [(1024, 1024, 16384), (512, 512, 32768), (16, 3584, 18944), (256, 4096, 14336)]


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
    refused = choice(512, 512, 8192, constraints=ef.Constraints(split=3))
    assert any("its split is 2, not the one asked for; there are" in one.reason for one in refused.refusals)
    for wrong in (0, True, "2"):
        with pytest.raises(ef.errors.ArgumentError, match="split must be a whole number from 1 on"):
            ef.Constraints(split=wrong)


def test_what_cannot_be_split_says_why():
    def reasons(k, **options):
        asked = ef.Constraints(split=2)
        return {one.reason for one in choice(512, 512, k, constraints=asked, **options).refusals}

    assert "K = 512 is too short for 2 parts" in reasons(512)
    half = torch.empty(512, 4096, dtype=torch.float16, device="meta")
    args = ef.GemmArguments(half, half.t(), None, torch.float16, constraints=ef.Constraints(split=2))
    told = {one.reason for one in ef.explain(args, cc=90).refusals}
    assert "it adds up parts of K in float32, and the accumulator is torch.float16" in told


@pytest.mark.parametrize("design", [*SPLIT_DESIGNS, *SPLIT_ROW_DESIGNS, *EXCHANGED], ids=str)
def test_every_part_has_a_block_of_the_shortest_k(design):
    """A part without one would wait for nothing, and its leader for it."""
    assert design.split * design.spans * budget.K_SPAN <= tuned.SHORT_K.value
    assert design.ctas <= 8, "the largest cluster that every GPU launches"


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


COMPILED = [one for one in SPLIT_DESIGNS if (one.split, one.cluster) in ((2, (2, 1)), (8, (1, 1)))]


@pytest.mark.parametrize("design", COMPILED, ids=str)
def test_sums_go_straight_from_registers_and_nothing_spills(design, capfd, tmp_path):
    args = arguments(with_squares, k=4096, C=torch.empty(512, 512, dtype=BF16))
    program, staged, function = built(args, tmp_path, design)
    assert budget.shared_bytes(staged, [one for _, one in program.loads], program.stores) <= TARGETS[90].shared_memory
    ptx = function.__ptx__
    moved = re.findall(r"st\.async\S*v4\.b32", ptx)
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
    assert any("the bits of K in one part" in one.reason for one in found.refusals)
