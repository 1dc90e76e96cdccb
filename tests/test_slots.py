"""Which row or segment of a row each slot is of, beside the places of a warp's registers in a tile's subtiles."""

from itertools import pairwise

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from hopper import arguments
from test_fragment import LANES, traced, wgmma

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
