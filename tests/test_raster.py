"""Which tiles the clusters of a persistent grid take, in turn: the kernel's own code, as PTX executed on the CPU."""

import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from machine_code import no_entry, no_locations
from ptx_machine import Kernel, execute

from epifuse.providers.cutedsl import clusters
from epifuse.providers.cutedsl.designs import DESIGNS

cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402

from epifuse.providers.cutedsl.kernels.raster import Order, Turns  # noqa: E402
from epifuse.providers.cutedsl.kernels.sm90_gemm import Cta  # noqa: E402

DOWN, ACROSS, ALONE = (
    next(design for design in DESIGNS if design.cluster == cluster) for cluster in ((2, 1), (1, 2), (1, 1))
)
STEP, BAND, WARP = 8, 4, 32
CLUSTERS = {2: 66, 1: 132}
UNEVEN = [0, 0, 1, 2, 3, 4, 5, 6, 7, 7]
"""Groups of multiprocessors, some of which take more clusters than others."""


def grid(design, by_ranks, folder):
    """A kernel whose CTAs, a cluster each, write the turn of each of their tiles where the tile is."""
    order = Order(design, by_ranks=by_ranks)

    @cute.kernel
    def show(out: Int64, down: Int32, across: Int32, turns: Turns):
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        ranks = order.ranked(first, step, turns)
        cta = Cta((), None, (), (), (), turns, ranks, (0, 0), first, step, 0, 0, 0)
        turn = first
        while turn < turns.total:
            m, n, l = order.tile(turn, cta, (1, 1))
            at = out + Int64((l * down + m) * across + n) * 4
            at = cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=4)
            cute.arch.store(at, Int32(turn))
            turn += step

    @cute.jit
    def launch(out: Int64, m: Int32, n: Int32, count: Int32, table: Int64):
        turns = order.turns((m, n, Int32(1)), (STEP, STEP), Int32(BAND), count, table)
        show(out, cute.ceil_div(m, STEP), cute.ceil_div(n, STEP), turns).launch(grid=(1, 1, count), block=(32, 1, 1))

    with pytest.MonkeyPatch.context() as monkeypatch:
        no_locations(monkeypatch)
        no_entry(monkeypatch)
        numbers = Int64(0), Int32(1), Int32(1), Int32(1), Int64(0)
        return cute.compile(launch, *numbers, options=f"--gpu-arch=sm_90a --keep-ptx --dump-dir={folder}").__ptx__


def divisor(value):
    high, low = divmod(-(-(1 << 62) // value), 1 << 31)
    return [struct.pack("<i", value), struct.pack("<q", high), struct.pack("<q", low)]


def parameters(design, by_ranks, extents, table):
    """`Turns` as the host hands it over."""
    down, across, batches = extents
    along, beside = (across, down) if design.bands_along_n else (down, across)
    height = -(-along // max(along // BAND, 1))
    total, count = down * across * batches, CLUSTERS[design.ctas]
    numbers = [total, along]
    divisors = [down * across, beside * height, height, along % height or height]
    packed = [struct.pack("<i", number) for number in numbers]
    packed += [part for value in divisors for part in divisor(value)]
    packed.append(struct.pack("<i", total - total % count))
    if by_ranks:
        words = np.frombuffer(table.memory, np.int64).reshape(count + 1, -1)
        packed += [struct.pack("<q", word) for row in (count, total % count) for word in words[row]]
    return packed


@pytest.mark.parametrize("by_ranks", [True, False])
@pytest.mark.parametrize("design", [DOWN, ACROSS, ALONE], ids=["down", "across", "alone"])
def test_each_tile_is_taken_once_and_groups_take_neighbours(design, by_ranks, tmp_path: Path) -> None:
    kernel = Kernel.of(grid(design, by_ranks, tmp_path), "show")
    count = CLUSTERS[design.ctas]
    groups = [UNEVEN[cluster % len(UNEVEN)] for cluster in range(count)]
    table = clusters.RankTable(groups, clusters.rank_words(design.ctas))
    for extents in ((1, 1, 1), (5, 13, 1), (9, 7, 1), (3, 70, 1), (33, 2, 1), (12, 11, 1), (4, 5, 9)):
        total = math.prod(extents)
        memory = np.full(4 * total, 255, np.uint8)
        own = struct.pack("<q", 0), *(struct.pack("<i", extent) for extent in extents[:2])
        stored = execute(kernel, [*own, *parameters(design, by_ranks, extents, table)], memory, range(count), WARP)
        turns = memory.view(np.int32).reshape(extents[2], *extents[:2])
        assert stored == WARP * total
        assert sorted(turns.reshape(-1)) == list(range(total))
        if by_ranks and total <= count and extents[2] == 1:
            # A group's tiles are neighbours in an order that walks bands along one side.
            by_group = [{own for own in range(total) if groups[own] == group} for group in set(groups)]
            walked = walk(turns[0], design)
            places = {turn: place for place, turn in enumerate(walked)}
            for members in filter(None, by_group):
                own = sorted(places[turn] for turn in members)
                assert own == list(range(own[0], own[0] + len(own)))


def walk(turns, design):
    """The turns, in bands along m, or along n for a turned raster, each walked line by line."""
    lines = turns.T if design.bands_along_n else turns
    bands = max(len(lines) // BAND, 1)
    height = -(-len(lines) // bands)
    return [turn for start in range(0, len(lines), height) for line in lines[start : start + height].T for turn in line]


def test_a_turned_raster_is_for_clusters_that_share_b() -> None:
    assert (DOWN.bands_along_n, ACROSS.bands_along_n, ALONE.bands_along_n) == (True, False, False)
    assert not replace(DOWN, instruction="mma.sync").bands_along_n
