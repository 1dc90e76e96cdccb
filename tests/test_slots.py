"""Which row or segment of a row each slot is of, where what is picked lies, and columns by the pieces of N: beside the
places of a warp's registers in a tile's subtiles."""

import itertools
import math
from itertools import pairwise

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from hopper import arguments
from test_fragment import LANES, traced, wgmma

from epifuse.ir import Factor
from epifuse.providers.cutedsl import pairs
from epifuse.providers.cutedsl.design import SUBTILE, Design
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Spot
from epifuse.providers.cutedsl.kernels.place import Division, Place
from epifuse.providers.cutedsl.kernels.slots import Slots
from epifuse.providers.cutedsl.lowering import lower

TILE = Place(2, 3, 0, 0)


def graph_of(*widths):
    """Of an epilogue that reduces segments of these widths; of whole rows without one."""
    lines = "".join(f"    s{w} = accum.unflatten(-1, (-1, {w})).sum(-1)\n" for w in widths)
    returned = ", ".join(f"s{w}" for w in widths)
    text = f"def epi(accum):\n{lines}    return {returned}\n" if widths else "def epi(accum): return softmax(accum)"
    args = arguments(text, n=1536)
    return lower(args.graph, args.problem).stored


@pytest.fixture(scope="module")
def layout():
    return traced(lambda: wgmma(SUBTILE[1]), "sm_90a")


DESIGNS = {
    "cooperative": Design((128, 256), (2, 1), False),
    "two rows of subtiles": Design((128, 192), (2, 1), True),
    "tall": Design((256, 128), (1, 1), False),
}


@pytest.mark.parametrize("down_first", [False, True])
@pytest.mark.parametrize("widths", [(), (8,), (16, 64), (24,), (64,), (96,), (32, 128)], ids=str)
@pytest.mark.parametrize("design", DESIGNS)
def test_each_slot_is_of_one_segment_of_one_row(design, widths, down_first, layout):
    (fragment, places), graph, division = layout, graph_of(*widths), Division(DESIGNS[design])
    slots = Slots(graph, division, fragment, down_first=down_first)
    if division.across % slots.across:
        return  # such a design is refused
    down, across = division.down, division.across
    walked = [(s % down, s // down) if down_first else (s // across, s % across) for s in range(division.subtiles)]
    ends = range(0, division.subtiles + 1, slots.subtiles)
    seen = set()
    for block in (walked[begin:end] for begin, end in pairwise(ends)):
        for width in widths or (division.across * SUBTILE[1],):
            found = merged(slots, block, width if widths else 0, layout)
            for lane in LANES:
                rows = [places[lane][registers[0]][0] for registers in fragment.by_row]
                at = slots.places(block[0], TILE, rows)
                begins = at.right if widths else [0] * slots.count
                for slot in range(slots.count):
                    first = slots.first(slot, width if widths else 0)
                    begin = begins[slot] // width * width
                    assert found[lane, first] == {(at.down[slot], begin + i) for i in range(width)}
                    assert at.rows[slot] == division.row(at.down[slot] // 64, at.down[slot] % 64, TILE)
                    assert not widths or at.columns[slot] == division.column(0, at.right[slot], TILE)
                for down_, right in block:
                    for register, slot in enumerate(slots.of(down_, right)):
                        row, column = places[lane][register]
                        place = down_ * 64 + row, right * 32 + column
                        assert place in found[lane, slots.first(slot, width if widths else 0)]
                        seen.add((lane, *place))
    assert len(seen) == 16 * down * across * SUBTILE[1]


def merged(slots, block, width, layout):
    """What each slot of each lane holds once lanes that share rows have merged: places in the tile."""
    fragment, places = layout
    own = {(lane, slot): set() for lane in LANES for slot in range(slots.count)}
    for down, right in block:
        for lane in LANES:
            for slot, registers in slots.merged(Spot(down, right, (), ()), width).items():
                for register in registers:
                    row, column = places[lane][register]
                    own[lane, slot].add((down * 64 + row, right * 32 + column))
    for bit in fragment.along_row:
        own = {(lane, slot): own[lane, slot] | own[lane ^ bit, slot] for lane, slot in own}
    return own


FACTORS = [Factor("n", 8, 2), Factor("n", 1, 2), Factor("n", 16, 3), Factor("n", 32, 2), Factor("n", 40, 2)]


@pytest.mark.parametrize("factor", FACTORS, ids=str)
def test_what_is_picked_is_in_registers_of_the_same_thread(factor, layout):
    """Of each column of a tile that holds the factor."""
    fragment, places = layout
    across = math.lcm(SUBTILE[1], factor.stride * factor.extent) // SUBTILE[1]
    for right, wanted in itertools.product(range(across), range(factor.extent)):
        found = pairs.sources(((factor, wanted),), right, fragment.registers)
        for own in places:
            for (row, column), (subtile, register) in zip(own, found, strict=True):
                at = right * SUBTILE[1] + column
                assert pairs.place(factor, at) == at // factor.stride % factor.extent
                before, behind = at // factor.stride // factor.extent, at % factor.stride
                want = (before * factor.extent + wanted) * factor.stride + behind
                assert (subtile * SUBTILE[1] + own[register][1], own[register][0]) == (want, row)


@pytest.mark.parametrize(
    "inner", [(64,), (32, 2), (2, 32), (1, 64), (2, 2, 16), (8, 3), (4,), (12,), (96,), (6, 8), (5,)]
)
@pytest.mark.parametrize("tile", [(128, 256), (128, 192), (64, 64)], ids=str)
def test_a_column_is_found_by_the_pieces_of_n(tile, inner, layout):
    fragment, places = layout
    division = Division(Design(tile, (1, 1), True))
    for right, own in itertools.product(range(division.across), places):
        lane = own[0][1]
        for (_, first), (_, column) in zip(fragment.registers, own, strict=True):
            found = division.pieces(inner, right * SUBTILE[1] + first, lane, TILE)
            if tile[1] % math.prod(inner):
                assert found is None
                continue
            left, want = division.column(right, column, TILE), []
            for extent in inner:
                want.append(left % extent)
                left //= extent
            assert found == (*want, left)
