"""The epilogue of one warp group: how operands arrive and results leave, around the walk of the graph.

A tile is worked on in subtiles of 64 x 32, 16 values a thread in the order of the accumulator. Each warp group is on
its own: it has its own buffers and barriers, so that one may be in its epilogue while the other multiplies. An access
is one lifecycle: vectors are fetched into registers before the main loop, which hides their latency, and deposited in
shared memory after it; tiles are brought by a producer warp; scalars stay in a register. Where values need their whole
row, the accumulator is walked several times: all walks but the last reduce along rows, the last one stores.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl import device_math as dm
from epifuse.providers.cutedsl.device_types import HELD
from epifuse.providers.cutedsl.emit import walk
from epifuse.providers.cutedsl.kernels.exchange import Exchange
from epifuse.providers.cutedsl.kernels.fragment import Fragment, spread
from epifuse.providers.cutedsl.kernels.place import Division, Place
from epifuse.providers.cutedsl.kernels.reduce import Partials, across, finished
from epifuse.providers.cutedsl.kernels.spare import Spare, own_start, shifted, wait_either
from epifuse.providers.cutedsl.partials import reduction, reductions_of
from epifuse.providers.cutedsl.program import SUBTILE, WARP_GROUP, WARPS, Access, Design, Program
from epifuse.providers.cutedsl.rows import Walk, read_lines, walks
from epifuse.providers.cutedsl.store_math import as_kind, stored, widened

try:
    from cutlass.tensor_utils import LayoutEnum
except ImportError:  # its home in CuTe DSL 4.7
    from cutlass.utils import LayoutEnum

_EARLY, _EARLY_BYTES = 2, 2  # subtiles of operands, and bytes a value
_KEPT_IN_L2 = 32 << 20  # bytes, of an H200's 50 MB
# L2 policies, in the encoding of CUTLASS's TMA::CacheHintSm90. Where the stores of gelu and its argument displace A and
# B, 8192 x 8192 x 512 takes 4 to 6 % longer.
_EVICT_FIRST, _EVICT_NORMAL = 0x12F0000000000000, 0x1000000000000000


class Carrier(NamedTuple):
    """What TMA needs for one staged tensor: its atom, its coordinates, the layout of its buffer."""

    atom: Any
    tensor: Any
    layout: Any


class Shared(NamedTuple):
    """The epilogue's shared memory: buffers of tiles and vectors, barriers of arriving tiles, what a cluster tells."""

    loads: list
    stores: list
    vectors: list
    barriers: Any
    heard: Any


class Given(NamedTuple):
    """What the launch was given: operands, numbers, outputs, the workspace of reductions or None, and (M, N, L)."""

    tensors: Any
    numbers: Any
    outputs: Any
    workspace: Any
    shape: Any


class Tile(NamedTuple):
    """What a warp group holds while it is at a tile: scalars and vectors, partial results, and what rows make."""

    place: Place
    held: dict
    kept: list
    lines: dict


class Spot(NamedTuple):
    """A subtile: how far down and right it is in the warp group's, and where this thread's values lie in the result."""

    down: Any
    right: Any
    rows: list
    columns: list


class Epilogue:
    """The epilogue of `program` in `design`; what it holds is known while tracing."""

    def __init__(self, design: Design, program: Program, fragment: Fragment) -> None:
        self.design, self.program, self.fragment = design, program, fragment
        self.division = Division(design)
        self.across, self.down, self.subtiles = self.division.across, self.division.down, self.division.subtiles
        self.slots = self.down * len(fragment.by_row)  # a thread's rows of a tile
        self.tensors = [access for _, access in program.tensors]
        self.tiles = [i for i, access in enumerate(self.tensors) if access.way == "tile"]
        self.vectors = [i for i, access in enumerate(self.tensors) if access.way in ("row", "column")]
        self.scalars = [i for i, access in enumerate(self.tensors) if access.way == "scalar"]
        self.staged = [i for i, access in enumerate(program.stores) if access.way == "tile"]
        # Where each warp's rows lie together in memory it sends them itself, and waits for no other warp: gelu 8192 x
        # 8192 x 512 takes 4 % less. An output by columns leaves as a whole subtile, or its lines would be cut in four.
        self.senders = WARPS if all(program.stores[i].by_rows for i in self.staged) else 1
        self.direct = [i for i, access in enumerate(program.stores) if access.way == "direct"]
        self.lines = [i for i, access in enumerate(program.stores) if access.way == "line"]
        self.walks = walks(program.graph)
        self.read_lines = read_lines(program.graph)
        self.bringing = [i for i, walk in enumerate(self.walks) if self._reads_tiles(walk)]
        self.partials = Partials(design, program, fragment, reductions_of(program.graph))
        self.exchange = Exchange(design, fragment)
        self.spare = Spare(design, program)
        self.loads = {node: i for i, (node, _) in enumerate(program.tensors)}
        self.kinds = [program.graph.types[node].kind for node, _ in program.tensors]

    def _reads_tiles(self, walk: Walk) -> bool:
        return any(node in walk.nodes for node, _ in self.program.loads_by("tile"))

    # On the host.

    def whole(self, tensors, outputs):
        """Operands and outputs as (M, N, L), an axis that a reshape cut as one mode of several pieces."""
        return (
            tuple(map(_whole, tensors, self.tensors)),
            tuple(map(_whole, outputs, self.program.stores)),
        )

    def carriers(self, tensors, outputs):
        """TMA atoms of the staged operands and outputs."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        return (
            tuple(_carrier(load, tensors[i], SUBTILE, self.design.load_stages) for i in self.tiles),
            tuple(_carrier(store, outputs[i], self._sent, self.design.store_stages) for i in self.staged),
        )

    @property
    def _sent(self):
        """What of a subtile one warp sends."""
        return SUBTILE[0] // self.senders, SUBTILE[1]

    # In the kernel, every thread.

    def allocate(self, allocator):
        """Barriers and vectors: what needs no wide alignment comes before what does."""

        def vector(i):
            slots = budget.vector_slots(self.design, self.tensors[i].way)
            return allocator.allocate_tensor(self._held(i), cute.make_layout((slots, budget.MATH_GROUPS)), 16)

        barriers = 2 * budget.MATH_GROUPS * self.design.load_stages + self.spare.barriers
        full = allocator.allocate_array(Int64, barriers) if self.tiles else None
        return full, [vector(i) for i in self.vectors], self.exchange.allocate(allocator)

    def buffers(self, allocator, small, carriers, tensors, outputs):
        """What `allocate` gave, and the buffers of tiles."""

        def buffer(dtype, layout):
            return allocator.allocate_tensor(dtype, layout.outer, 1024, layout.inner)

        loads = [buffer(tensors[i].element_type, c.layout) for i, c in zip(self.tiles, carriers[0], strict=True)]
        stores = [buffer(outputs[i].element_type, c.layout) for i, c in zip(self.staged, carriers[1], strict=True)]
        return Shared(loads, stores, small[1], small[0], small[2])

    @property
    def has_barriers(self):
        """Whether there is anything to initialise."""
        return bool(self.tiles) or self.exchange.words > 0

    def initialise(self, shared):
        """One thread: barriers that say a stage is full (one arrival and its bytes) and empty (one a warp)."""
        for i in range(budget.MATH_GROUPS * self.design.load_stages):
            cute.arch.mbarrier_init(shared.barriers + 2 * i, 1)
            cute.arch.mbarrier_init(shared.barriers + 2 * i + 1, WARPS)
        for i in range(self.spare.barriers):
            cute.arch.mbarrier_init(shared.barriers + (self.spare.first + i), 1)
        self.exchange.initialise(shared.heard)

    def _full(self, shared, group, slot):
        return shared.barriers + 2 * (group * self.design.load_stages + slot)

    def _held(self, i):
        return HELD["int32" if self.kinds[i] == "mask" else self.kinds[i]]

    def load_partitions(self, shared, carriers):
        """Shared and global side of each staged operand."""
        return [_partition(carrier, buffer, SUBTILE) for carrier, buffer in zip(carriers[0], shared.loads, strict=True)]

    def store_partitions(self, shared, carriers):
        """Shared and global side of each staged output."""
        return [_partition(*pair, self._sent) for pair in zip(carriers[1], shared.stores, strict=True)]

    # The producer warp of a warp group.

    def bring(self, s, arrivals, place, group, shared, carriers, partitions):
        """Load subtile `s` of every staged operand once its stage is empty. `arrivals` counts those before."""
        stages = self.design.load_stages
        slot = arrivals % stages
        full = self._full(shared, group, slot)
        cute.arch.mbarrier_wait(full + 1, ((arrivals // stages) & 1) ^ 1)
        self._expect(full, 1)
        slots = [to[None, 0, 0, group * stages + slot] for to, _ in partitions]
        self._copy(s, place, slots, full, carriers, partitions)

    def bring_rest(self, starts, place, shared, carriers, partitions):
        """Load all rounds of subtiles of the last tile but the first to where they wait."""
        stages = self.design.load_stages
        for round_, starts_ in starts.items():
            full = self.spare.there(shared.barriers, place.within, round_)
            self._expect(full, stages)
            for slot in range(stages):
                pairs = zip(partitions, starts_, strict=True)
                slots = [shifted(to[None, 0, 0, slot], start) for (to, _), start in pairs]
                self._copy(round_ * stages + slot, place, slots, full, carriers, partitions)

    def _expect(self, full, subtiles):
        """Tell a barrier what is to come."""
        bytes_each = SUBTILE[0] * SUBTILE[1] * self.brought_bytes
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, subtiles * bytes_each)

    def _copy(self, s, place, slots, full, carriers, partitions):
        down, right = self._walked(s)
        i, j = self.division.subtile(down, right, place)
        for index, carrier, to, (_, from_) in zip(self.tiles, carriers[0], slots, partitions, strict=True):
            l = place.l if "l" in self.tensors[index].axes else 0
            # Nothing reads them again soon, and A and B are: at K = 4096 what adds a C takes 0.5 % less so.
            cute.copy(carrier.atom, from_[None, i, j, l], to, tma_bar_ptr=full, cache_policy=Int64(_EVICT_FIRST))

    @property
    def brought(self):
        """How many subtiles of a tile a producer warp brings: those of each walk that reads staged operands."""
        return len(self.bringing) * self.subtiles

    @property
    def brought_bytes(self):
        """Bytes a value of the operands that travel in tiles."""
        return sum(self.tensors[i].dtype.itemsize for i in self.tiles)

    def _walked(self, s):
        """Where a walk over subtiles is at step `s`: along rows, so that half lines of memory meet soon.

        That is worth 4 % at 8192 x 8192 x 512. Reductions along columns walk down, and hold one column of subtiles.
        """
        if self.partials.along_columns:
            return s % self.down, s // self.down
        return s // self.across, s % self.across

    # A warp group.

    def fetch(self, place, thread, given):
        """Scalars and vectors of a tile, in registers. Lanes outside the result read its edge."""
        held, tensors, shape = {}, given.tensors, given.shape
        for i in self.scalars:
            held[i] = tensors[i][0, 0, place.l].to(self._held(i))
        for i in self.vectors:
            way = self.tensors[i].way
            rounds = budget.vector_slots(self.design, way) // WARP_GROUP
            values = cute.make_rmem_tensor(rounds, self._held(i))
            for j in range(rounds):
                at = j * WARP_GROUP + thread
                if way == "row":
                    column = cutlass.min(self.division.column(0, at, place), shape[1] - 1)
                    values[j] = tensors[i][0, column, place.l].to(self._held(i))
                else:
                    row = cutlass.min(self.division.row(at // SUBTILE[0], at % SUBTILE[0], place), shape[0] - 1)
                    values[j] = tensors[i][row, 0, place.l].to(self._held(i))
            held[i] = values
        return held

    def deposit(self, held, shared, group, thread):
        """Vectors from registers to shared memory."""
        for i, buffer in zip(self.vectors, shared.vectors, strict=True):
            for j in range(cute.size(held[i])):
                buffer[j * WARP_GROUP + thread, group] = held[i][j]

    def reduce_rows(self, values, tile, team, given):
        """Every walk but the last: what the last one reads of whole rows, into the tile's lines.

        `values` are the accumulator's, which the next walk's value replaces.
        """
        shape = given.shape
        for number, walk_ in enumerate(self.walks[:-1]):
            reductions = tuple(reduction(node, self.program.graph) for node in walk_.reductions)
            partials = Partials(self.design, self.program, self.fragment, reductions)
            kept = partials.begin(self.down)
            arrived = team.arrived(number, 0)
            # As a number of its own, lest comparisons with it are kept for the next walk.
            columns = dm.disguised(Int32(shape[1]), number)
            for s in range(self.subtiles):
                coming = team.arrived(number, s + 1)
                spot = self._spot(s, tile.place, team)
                found = self._compute(number, spot, values, arrived, tile, team, given)
                partials.add(kept, found, spot, (shape[0], columns, shape[2]))
                held = self.walks[number + 1].held
                if held is not walk_.held:
                    self._replace(values, spot, found[held], team)
                arrived = coming
            self._complete(number, partials, kept, tile, team, given)
        self._store_lines(tile, team, given)

    def subtile(self, s, values, arrived, tile, team, given):
        """Subtile `s` of the last walk: store what leaves directly. Returns what is to leave by TMA, converted."""
        spot, place = self._spot(s, tile.place, team), tile.place
        found = self._compute(len(self.walks) - 1, spot, values, arrived, tile, team, given)
        results = [self._stored(i, found) for i in range(len(self.program.stores))]
        team.store_direct(results, spot.rows, spot.columns, place, given)
        self.partials.add(tile.kept, found, spot, given.shape)
        if spot.down + 1 == self.down:
            self.partials.leave_columns(tile.kept, spot.columns, place, team.part(place), given)
        return [results[i] for i in self.staged]

    def _spot(self, s, place, team):
        down, right = self._walked(s)
        by_row, by_column = self.fragment.by_row, self.fragment.by_column
        rows = [self.division.row(down, row, place) for row in team.rows]
        columns = [self.division.column(right, column, place) for column in team.columns]
        return Spot(down, right, spread(rows, by_row), spread(columns, by_column))

    def _first(self, spot, team):
        """Where a subtile's values begin in the accumulator."""
        return (spot.down * self.across + spot.right) * team.count

    def _replace(self, values, spot, fragment, team):
        for i, value in enumerate(dm.numbers(fragment)):
            values[self._first(spot, team) + i] = value

    def _compute(self, number, spot, values, arrived, tile, team, given):
        """Walk the graph over one subtile."""
        own = cute.make_tensor(values.iterator + self._first(spot, team), cute.make_layout(team.shape))
        x = own.load().to(Float32)
        # Else the compiler computes what walks share only once, and keeps it beside the accumulator: 700 bytes spilled.
        if number > 0:
            x = dm.each(lambda value: dm.disguised(value, number), x)
        walk_ = self.walks[number]
        known = {node: team.along(tile.lines[node], spot.down) for node in self.read_lines if node in tile.lines}

        def loaded(i):
            if self.tensors[i].way == "direct":
                return team.load_direct(i, given.tensors[i], spot.rows, spot.columns, tile.place.l, given.shape)
            return arrived[i] if i in arrived else team.vector(i, spot.down, spot.right)

        def leaf(node):
            return self._leaf(node, x, spot, tile, given, loaded)

        return walk(self.program.graph, leaf, x, self.program.accuracies, walk_.nodes, {walk_.held: x, **known})

    def _leaf(self, node, like, spot, tile, given, loaded):
        """A coordinate, a number, a scalar, or the values of an operand that `loaded` gives."""
        if node.op == "index":
            places = ((row, column, tile.place.l) for row, column in zip(spot.rows, spot.columns, strict=True))
            return dm.fragment([coordinate(node.attr, at, given.shape) for at in places], like.shape, Int32)
        kind = self.program.graph.types[node].kind
        if node in self.program.numbers:
            number = given.numbers[self.program.numbers.index(node)]
            value = cute.full_like(like, number, HELD["float" if kind == "mask" else kind])
            return value != 0.0 if kind == "mask" else value
        i = self.loads[node]
        scalar = self.tensors[i].way == "scalar"
        value = cute.full_like(like, tile.held[i], self._held(i)) if scalar else widened(loaded(i), self._held(i))
        return value != 0 if kind == "mask" else value

    # Rows. A slot is one of a thread's rows of a tile: those of its first subtile down come first.

    def _complete(self, number, partials, kept, tile, team, given):
        """What is computed once a row after walk `number`, its reductions complete."""
        slots = range(self.slots)
        along = self.fragment.along_row
        partial = [
            [across(row, each.take(slot), along) for row, each in zip(partials.rows, kept, strict=True)]
            for slot in slots
        ]
        at = (team.executed * (len(self.walks) - 1) + number, tile.place.n, team.lines())
        whole = self.exchange.complete(partials.rows, partial, at, team, team.shared.heard)
        walk_ = self.walks[number]
        shape = (len(slots),)
        numbers = {
            node: tuple(
                dm.fragment(xs, shape, type(xs[0])) for xs in zip(*(whole[slot][i] for slot in slots), strict=True)
            )
            for i, node in enumerate(walk_.reductions)
        }
        like = cute.full(shape, 0.0, Float32)
        rows = self._line_rows(tile.place, team)

        def leaf(node):
            if node.op == "reduce":
                return finished(node, numbers[node], given.shape)
            return self._leaf(node, like, Spot(0, 0, rows, rows), tile, given, team.column)

        tile.lines.update(walk(self.program.graph, leaf, like, nodes=walk_.lines, known=tile.lines))

    def _line_rows(self, place, team):
        """Rows of the result, a slot each."""
        return [self.division.row(down, row, place) for down in range(self.down) for row in team.rows]

    def _store_lines(self, tile, team, given):
        """Outputs that are one value a row: the CTA at the row's start stores them."""
        for i in self.lines:
            node, access = self.program.graph.outputs[i].node, self.program.stores[i]
            value = stored(tile.lines[node], self.program.graph.types[node].kind, access.dtype)
            fragment = cute.make_rmem_tensor((1, self.slots), value.element_type)
            fragment.store(value.reshape((1, self.slots)))
            # One lane of those that share the row.
            start = tile.place.n + self.fragment.rank(cute.arch.lane_idx())
            for slot, row in enumerate(self._line_rows(tile.place, team)):
                to = _at(given.outputs[i], access, row, 0, tile.place.l)
                limits = [given.shape[0], 1, given.shape[2]]
                _guarded_store(fragment[None, slot], to, (row, start, tile.place.l), limits)

    def _stored(self, i, found):
        """Output `i` in its dtype, in registers; nothing of what leaves once all tiles are done."""
        node, access = self.program.graph.outputs[i].node, self.program.stores[i]
        if access.way in ("line", "finish"):
            return None
        value = stored(found[node], self.program.graph.types[node].kind, access.dtype)
        fragment = cute.make_rmem_tensor(value.shape, value.element_type)
        fragment.store(value)
        return fragment

    def leave(self, tile, carried, team, given):
        """After a tile: what its reductions left."""
        place = tile.place
        rows = self._line_rows(place, team)
        self.partials.leave(tile.kept, carried, rows, place, team.part(place), given)

    def send(self, s, place, group, sender, policy, carriers, partitions):
        """One of the warps that send: TMA stores of its rows of subtile `s`."""
        slot = group * self.design.store_stages + s % self.design.store_stages
        down, right = self._walked(s)
        i, j = self.division.subtile(down, right, place)
        for carrier, (from_, to) in zip(carriers[1], partitions, strict=True):
            box = to[None, i * self.senders + sender, j, place.l]
            cute.copy(carrier.atom, from_[None, sender, 0, slot], box, cache_policy=policy)
        cute.arch.cp_async_bulk_commit_group()

    def store_policy(self, shape):
        """How L2 keeps what the launch stores: not before operands, where it could not be kept until it is read."""
        bytes_each = sum(self.program.stores[i].dtype.itemsize for i in self.staged)
        written = Int64(shape[0]) * shape[1] * shape[2] * bytes_each
        return Int64(cutlass.select_(written > _KEPT_IN_L2, Int64(_EVICT_FIRST), Int64(_EVICT_NORMAL)))


class Team:
    """One warp group's share of the copies: which values and places of a subtile each of its threads has."""

    def __init__(self, epilogue: Epilogue, mma, thread, group, executed, shared, given, last) -> None:
        """`last` is whether the tile is the CTA's last, whose of it the operands are, and where they wait then."""
        self.epilogue, self.thread, self.group, self.shared = epilogue, thread, group, shared
        own = mma.get_slice(thread)
        self.shape = mma.partition_shape_C(SUBTILE)
        self.count = cute.size(self.shape)
        places = own.partition_C(cute.make_identity_tensor(SUBTILE))
        fragment = epilogue.fragment
        self.rows = [places[registers[0]][0] for registers in fragment.by_row]
        self.columns = [places[registers[0]][1] for registers in fragment.by_column]
        self.from_shared = [
            self._reader(mma, given.tensors[i], b) for i, b in zip(epilogue.tiles, shared.loads, strict=True)
        ]
        self.to_shared = [
            self._writer(mma, given.outputs[i], b) for i, b in zip(epilogue.staged, shared.stores, strict=True)
        ]
        self.executed = executed
        self.is_last, self.within, starts = last
        self.starts = {round_: self._selected(found) for round_, found in starts.items()}

    def _selected(self, starts):
        """Where the operands of a round begin, in the last tile or another."""
        slot = self.group * self.epilogue.design.load_stages
        pairs = zip(starts, self.shared.loads, strict=True)
        return [cutlass.select_(self.is_last, start, own_start(slot, buffer)) for start, buffer in pairs]

    def _reader(self, mma, tensor, buffer):
        """Copy from shared memory into the accumulator's order, and this thread's side of the buffer."""
        major = LayoutEnum.from_tensor(tensor)
        if tensor.element_type.width != 16:
            return self._writer(mma, tensor, buffer)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(major.is_m_major_c(), 4), tensor.element_type)
        copy = cute.make_tiled_copy_C_atom(atom, mma)
        mine = copy.get_slice(self.thread)
        return copy, cute.shape(mine.partition_D(buffer))[:3], mine.partition_S(buffer)

    def _writer(self, mma, tensor, buffer):
        major = LayoutEnum.from_tensor(tensor)
        atom = sm90.get_smem_store_op(major, elem_ty_d=tensor.element_type, elem_ty_acc=Float32)
        base = cute.make_copy_atom(warp.StMatrix8x8x16bOp(major.is_m_major_c(), 4), cutlass.Float16)
        copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(base, mma))
        mine = copy.get_slice(self.thread)
        return copy, cute.shape(mine.partition_S(buffer))[:3], mine.partition_D(buffer)

    def early(self):
        """Fragments of the staged operands of the first subtiles, read while the last multiplications are under way.

        Their stages are free again so much sooner: with two, relu(accum + C) takes 1.1 % less at 8192 x 8192 x 512, and
        with one 0.6 % more. Who walks the accumulator several times has no registers for it, nor have several operands:
        gelu(accum * C + E) * tanh(F) + G spills 320 bytes so, and 68 else.
        """
        epilogue = self.epilogue
        if not epilogue.bringing or len(epilogue.walks) > 1 or epilogue.brought_bytes > _EARLY_BYTES:
            return []
        return [self.tiles(0, s) for s in range(min(_EARLY, epilogue.design.load_stages, epilogue.subtiles))]

    def reads(self, s, early):
        """Whether subtile `s` of the last walk is read, with a fence behind it, while the one before is computed."""
        bringing = len(self.epilogue.walks) - 1 in self.epilogue.bringing
        return bringing and len(early) <= s < self.epilogue.subtiles

    def arrived(self, number, s, early=()):
        """Fragments of the staged operands that a walk reads at subtile `s`, and of vectors where outputs are staged.

        Staging an output would hold back a read of shared memory behind it, and so the arithmetic that waits for it:
        gelu 8192 x 8192 x 512 takes 3 % less so. Where nothing is staged it is bce that takes 3 % more, and where rows
        are walked several times layer normalisation has no registers for it.
        """
        epilogue = self.epilogue
        if s == epilogue.subtiles:
            return {}
        if s < len(early):
            tiles = early[s]
        else:
            tiles = self.tiles(number, s) if number in epilogue.bringing else {}
        if not epilogue.staged or len(epilogue.walks) > 1:
            return tiles
        read = [epilogue.loads[node] for node in epilogue.walks[number].nodes if node in epilogue.loads]
        return tiles | {i: self.vector(i, *epilogue._walked(s)) for i in epilogue.vectors if i in read}

    def tiles(self, number, s):
        """Fragments of the staged operands of subtile `s` of a walk; their stage is free again."""
        epilogue, stages = self.epilogue, self.epilogue.design.load_stages
        step = epilogue.bringing.index(number) * epilogue.subtiles + s
        slot, rounds = step % stages, epilogue.brought // stages
        full = epilogue._full(self.shared, self.group, slot)
        parity = (self.executed * rounds + step // stages) & 1
        starts = self.starts.get(step // stages)
        if starts is None:
            cute.arch.mbarrier_wait(full, parity)
            sources = [source[None, None, None, self.group * stages + slot] for _, _, source in self.from_shared]
        else:
            there = epilogue.spare.there(self.shared.barriers, self.within, step // stages)
            wait_either(self.is_last, there, full, parity)
            pairs = zip(self.from_shared, starts, strict=True)
            sources = [shifted(source[None, None, None, slot], start) for (_, _, source), start in pairs]
        found = {}
        for i, (copy, shape, _), source in zip(epilogue.tiles, self.from_shared, sources, strict=True):
            fragment = cute.make_rmem_tensor(self.shape, source.element_type)
            cute.copy(copy, source, _as(fragment, shape))
            found[i] = fragment.load()
        # An arrival alone may overtake a read that is still under way, and the next load then overwrites what is read:
        # one element of 58 million was wrong.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full + 1)
        return found

    def vector(self, i, down, right):
        """This thread's values of a vector."""
        epilogue = self.epilogue
        buffer = self.shared.vectors[epilogue.vectors.index(i)]
        if epilogue.tensors[i].way == "row":
            slots, places = epilogue.fragment.by_column, [right * SUBTILE[1] + column for column in self.columns]
        else:
            slots, places = epilogue.fragment.by_row, [down * SUBTILE[0] + row for row in self.rows]
        found = [buffer[place, self.group] for place in places]
        return dm.fragment(spread(found, slots), self.shape, buffer.element_type)

    def part(self, place):
        """Number of this warp among those that have different rows of the result."""
        return self.epilogue.division.warp_of_rows(place, self.thread // 32)

    def lines(self):
        """Which of the warp group's rows each slot is."""
        return [down * SUBTILE[0] + row for down in range(self.epilogue.down) for row in self.rows]

    def column(self, i):
        """A column vector's values, a slot each."""
        buffer = self.shared.vectors[self.epilogue.vectors.index(i)]
        found = [buffer[line, self.group] for line in self.lines()]
        return dm.fragment(found, (len(found),), buffer.element_type)

    def along(self, value, down):
        """A value of each slot as a fragment of a subtile."""
        is_mask = value.element_type is Boolean
        source = as_kind(value, "mask", "int32") if is_mask else value
        by_row = self.epilogue.fragment.by_row
        own = dm.numbers(source)[down * len(by_row) :][: len(by_row)]
        found = dm.fragment(spread(own, by_row), self.shape, source.element_type)
        return found != 0 if is_mask else found

    def stage(self, s, fragments):
        """Staged outputs of subtile `s` into shared memory."""
        stages = self.epilogue.design.store_stages
        for fragment, (copy, shape, slots) in zip(fragments, self.to_shared, strict=True):
            at = (None, None, None, self.group * stages + s % stages)
            cute.copy(copy, _as(fragment, shape), slots[at])

    def load_direct(self, i, tensor, rows, columns, batch, extents):
        """An operand from where it lies.

        Lanes outside the result read its edge: a branch around each load would wait for one before it starts the next.
        """
        access, held = self.epilogue.tensors[i], self.epilogue._held(i)
        step = 2 if access.pairs else 1
        raw = cute.make_rmem_tensor((step, self.count // step), tensor.element_type)
        for v in range(0, self.count, step):
            row = cutlass.min(rows[v], extents[0] - 1)
            column = cutlass.min(columns[v], extents[1] - step)
            cute.autovec_copy(_at(tensor, access, row, column, batch), raw[None, v // step])
        return _as(raw, self.shape).load().to(held)

    def store_direct(self, results, rows, columns, place, given):
        """Outputs to where they lie, without TMA."""
        for i in self.epilogue.direct:
            access = self.epilogue.program.stores[i]
            step = 2 if access.pairs else 1
            parts = _as(results[i], (step, self.count // step))
            # What does not vary over an axis is written once.
            limits = [n if axis in access.axes else 1 for axis, n in zip("mnl", given.shape, strict=True)]
            for v in range(0, self.count, step):
                to = _at(given.outputs[i], access, rows[v], columns[v], place.l)
                _guarded_store(parts[None, v // step], to, (rows[v], columns[v], place.l), limits)


def coordinate(factors, place, shape):
    """Where a place (m, n, l) is along a dim of these factors, outermost first."""
    found = Int32(0)
    extents = dict(zip("mnl", shape, strict=True))
    for factor in factors:
        own = dict(zip("mnl", place, strict=True))[factor.axis]
        own = own // factor.stride if factor.stride > 1 else own
        if factor.extent is not None:
            own, extent = own % factor.extent, factor.extent
        else:
            extent = extents[factor.axis] // factor.stride
        found = own if factor is factors[0] else found * extent + own
    return found


def _whole(tensor, access: Access):
    """The flat modes of a tensor as M, N and L."""
    if not any(access.inner):
        return with_batches(tensor)
    shape, stride, first = [], [], 0
    for inner in access.inner:
        last = first + len(inner)
        shape.append((*inner, tensor.shape[last]) if inner else tensor.shape[last])
        stride.append(tensor.stride[first : last + 1] if inner else tensor.stride[last])
        first = last + 1
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


def with_batches(tensor):
    """A matrix as one batch of matrices, with a stride that TMA accepts."""
    if cute.rank(tensor) == 3:
        return tensor
    long = 0 if cute.is_static(tensor.stride[1]) else 1
    batch = Int64(tensor.shape[long]) * tensor.stride[long]
    divisor = 128 // tensor.element_type.width
    shape, stride = (*tensor.shape, Int32(1)), (*tensor.stride, cute.assume(batch, divby=divisor))
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def _at(tensor, access: Access, row, column, batch):
    """The element at a place, or the pair of columns that starts there."""
    pointer = tensor.iterator + cute.crd2idx((row, column, batch), tensor.layout)
    return cute.make_tensor(pointer.align(access.bytes_at_once), cute.make_layout(2 if access.pairs else 1))


def _carrier(op, tensor, box, stages):
    """TMA of boxes, of which a slot's subtile holds one or more."""
    major = LayoutEnum.from_tensor(tensor)
    layout = sm90.make_smem_layout_epi(tensor.element_type, major, SUBTILE, stages * budget.MATH_GROUPS)
    one = cute.slice_(sm90.make_smem_layout_epi(tensor.element_type, major, box, 1), (None, None, 0))
    atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, one, box)
    return Carrier(atom, coordinates, layout)


def _partition(carrier, buffer, box):
    """Shared and global side of a TMA copy of whole boxes."""
    tiles = cute.local_tile(carrier.tensor, box, (None, None, None))
    slots = cute.local_tile(buffer, box, (None, None, None))
    return cpasync.tma_partition(
        carrier.atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def _as(fragment, shape):
    """The same registers under a copy's shape of them, which counts them in the same order."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(shape))


@cute.jit
def _guarded_store(values: cute.Tensor, to: cute.Tensor, place: tuple, limits: list):
    if cute.elem_less(place, tuple(limits)):
        cute.autovec_copy(values, to)
