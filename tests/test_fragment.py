"""What a fragment says of registers and lanes, beside the coordinates that each of them really has."""

import itertools

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warp

from epifuse.providers.cutedsl.kernels.fragment import Fragment, listed, spread
from epifuse.providers.cutedsl.kernels.multiply import tiled_multiplication
from epifuse.providers.cutedsl.kernels.parts import in_turn, parts_of
from epifuse.providers.cutedsl.weave import STRIP, rows

LANES = range(32)
THREADS = (*LANES, *range(32, 128, 32))
"""Of a warp group all lanes of its first warp, and one of each other: where the warps lie and where their lanes do are
independent of each other."""


def wgmma(columns):
    """Places of the accumulators of a warp group over 64 x `columns`."""
    majors = OperandMajorMode.K, OperandMajorMode.K
    multiplication = tiled_multiplication((BFloat16, BFloat16), majors, Float32, 1, columns)
    identity = cute.make_identity_tensor((64, columns))
    return lambda lane: listed(multiplication.get_slice(lane).partition_C(identity))


def swapped(columns):
    """Of A and B in each other's place: the result is transposed."""
    places = wgmma(columns)
    return lambda lane: [(column, row) for row, column in places(lane)]


def woven(lane):
    """Of D, where 8 columns of the gate and 8 of the other half take turns in 64 x 64."""
    return [(row, column // 16 * 8 + column % 8) for row, column in wgmma(64)(lane) if column % 16 < 8]


def mma_sync(lane):
    """Of four warps of mma.sync one below the other, whose columns lie side by side."""
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))
    columns = cute.make_layout((8, 1, 4), stride=(1, 32, 8))
    multiplication = cute.make_tiled_mma(atom, cute.make_layout((4, 1, 1)), permutation_mnk=(64, columns, 16))
    return listed(multiplication.get_slice(lane).partition_C(cute.make_identity_tensor((64, 32))))


def tensor_memory(operation, rows):
    """Of a load from tensor memory, whose lanes are rows."""

    def places(lane):
        memory = cute.make_tensor(
            cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16),
            cute.make_layout((128, 32), stride=(65536, 1)),
        )
        load = tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), memory)
        own = load.get_slice(lane).partition_D(cute.make_identity_tensor((128, 32)))
        return [place for place in listed(own) if place[0] < rows]

    return places


LAYOUTS = {
    **{f"wgmma 64 x {columns}": lambda columns=columns: wgmma(columns) for columns in (8, 24, 32, 256)},
    **{f"swapped 64 x {columns}": lambda columns=columns: swapped(columns) for columns in (8, 16, 32, 64)},
    "woven gate": lambda: woven,
    "mma.sync": lambda: mma_sync,
    "tensor memory by rows": lambda: tensor_memory(tcgen05.Ld32x32bOp(tcgen05.Repetition(32)), 32),
    "tensor memory by slabs": lambda: tensor_memory(tcgen05.Ld16x256bOp(tcgen05.Repetition(4)), 16),
}


def traced(make, architecture):
    """The fragment, and for each lane the coordinates of its registers."""
    found = []

    @cute.jit
    def trace(unused: Int32):
        places = make()
        found.append((Fragment.of(places), [places(lane) for lane in LANES]))

    cute.compile(trace, Int32(0), options=f"--gpu-arch={architecture}")
    return found[0]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def layout(request):
    architecture = "sm_100a" if "memory" in request.param else "sm_90a"
    return traced(LAYOUTS[request.param], architecture)


def test_each_value_lies_where_it_says(layout):
    fragment, places = layout
    for lane in LANES:
        added = [place for bit, place in zip((1, 2, 4, 8, 16), fragment.lanes, strict=True) if lane & bit]
        first = fragment.registers[0]
        row, column = (first[axis] + sum(place[axis] - first[axis] for place in added) for axis in (0, 1))
        moved = [(r - first[0] + row, c - first[1] + column) for r, c in fragment.registers]
        assert moved == places[lane]


def test_slots_are_the_rows_and_columns_of_a_lane(layout):
    fragment, places = layout
    for own in places:
        for axis, slots in enumerate((fragment.by_row, fragment.by_column)):
            each = [{own[register][axis] for register in registers} for registers in slots]
            assert all(len(alike) == 1 for alike in each)
            assert len(set.union(*each)) == len(slots)
            firsts = [own[registers[0]][axis] for registers in slots]
            assert spread(firsts, slots) == [place[axis] for place in own]


def test_lanes_that_share_rows_are_ranked(layout):
    fragment, places = layout
    ranks = {}
    for lane in LANES:
        rows = tuple(row for row, _ in places[lane])
        ranks.setdefault(rows, []).append(fragment.rank(lane))
    assert all(sorted(found) == list(range(fragment.sharing_row)) for found in ranks.values())


def test_columns_are_merged_once_over_all_lanes(layout):
    """As the kernel does it, on sets of the rows that a value stands for."""
    fragment, places = layout
    mine = [[frozenset((lane, r) for r in slot) for slot in fragment.by_column] for lane in LANES]
    at = [places[lane][fragment.by_column[0][0]][1] for lane in LANES]
    stores = [True] * len(LANES)
    for bit, left in fragment.merging_columns:
        halves = left < len(mine[0])
        high = [lane // bit % 2 for lane in LANES]
        kept = [values[left * high[lane] :][:left] if halves else values for lane, values in enumerate(mine)]
        sent = [values[left * (1 - high[lane]) :][:left] if halves else values for lane, values in enumerate(mine)]
        mine = [[x | y for x, y in zip(kept[lane], sent[lane ^ bit], strict=True)] for lane in LANES]
        at = [at[lane] + halves * high[lane] * fragment.columns[left % len(fragment.columns)] for lane in LANES]
        stores = [stores[lane] and (halves or not high[lane]) for lane in LANES]
    found = {}
    for lane in LANES:
        for slot, merged in enumerate(mine[lane]):
            if stores[lane]:
                column = at[lane] + fragment.columns[slot]
                assert column not in found
                found[column] = merged
    want = {}
    for lane in LANES:
        for register, (_, column) in enumerate(places[lane]):
            want.setdefault(column, set()).add((lane, register))
    assert found == want


@pytest.mark.parametrize("order", ["stacked", "interleaved"])
def test_rows_of_b_are_woven(order):
    """The rows of shared memory in order: eight of the first part, eight of the second."""
    extents, strides = rows(order, 24, 16)
    places = itertools.product(*map(range, reversed(extents)))
    found = [sum(i * step for i, step in zip(reversed(place), strides, strict=True)) for place in places]
    each = [(row // (2 * STRIP) * STRIP + row % STRIP, row // STRIP % 2) for row in range(48)]
    assert found == [16 * (column + 24 * part if order == "stacked" else 2 * column + part) for column, part in each]


@pytest.mark.sweep("apart", "height")
@pytest.mark.parametrize("apart", [False, True], ids=["in turn", "apart"])
@pytest.mark.parametrize(("height", "columns"), [(64, 256), (64, 192), (128, 128), (128, 64)])
def test_each_part_of_a_row_is_in_the_registers_of_its_column(height, columns, apart):
    """Every value of both parts, in all subtiles of a warp group's tile."""
    found = []

    def side_by_side(column, part):
        return part * columns // 2 + column

    def places():
        majors = OperandMajorMode.K, OperandMajorMode.K
        tile, narrow = (
            tiled_multiplication((BFloat16, BFloat16), majors, Float32, 1, count) for count in (columns, 32)
        )
        fragments = Fragment.of_accumulators(narrow, (64, 32)), Fragment.of_accumulators(tile, (64, columns))
        whole, subtile = cute.make_identity_tensor((height, columns)), cute.make_identity_tensor((64, 32))
        each = [
            (listed(tile.get_slice(t).partition_C(whole)), listed(narrow.get_slice(t).partition_C(subtile)))
            for t in THREADS
        ]
        return parts_of(*fragments, columns // 2, side_by_side if apart else in_turn), each

    @cute.jit
    def trace(unused: Int32):
        found.append(places())

    cute.compile(trace, Int32(0), options="--gpu-arch=sm_90a")
    parts, each = found[0]
    seen = set()
    subtiles = list(itertools.product(range(height // 64), range(columns // 64), enumerate(parts.registers)))
    for accumulators, own in each:
        for down, right, (part, registers) in subtiles:
            for register, (row, column) in zip(registers, own, strict=True):
                place = accumulators[down * parts.down + right * parts.right + register]
                strip, within = divmod(right * 32 + column, STRIP)
                woven = strip * 2 * STRIP + part * STRIP + within
                expected = part * columns // 2 + right * 32 + column if apart else woven
                assert place == (down * 64 + row, expected)
                seen.add(place)
    assert len(seen) == height * columns * len(THREADS) // 128
