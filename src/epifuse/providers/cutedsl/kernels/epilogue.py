"""The epilogue of one warp group: it computes the graph over its tiles, after operands arrive and before results leave.

A tile is computed in subtiles of 64 x 32, 16 values a thread in the order of the accumulator. Each warp group has its
own buffers and barriers, so that one may be in its epilogue while the other multiplies. Accesses load operands and
store results (`accesses/lifecycle.py`). One pass over the subtiles is a *walk*. If values need their whole row, there
are several walks over the accumulator: all but the last one reduce along rows, and the last one stores.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from epifuse.ir.graph import topological
from epifuse.providers.cutedsl import device_math as dm
from epifuse.providers.cutedsl import pairs, segments
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.device_types import HELD
from epifuse.providers.cutedsl.emit import walk
from epifuse.providers.cutedsl.kernels.accesses import LOADS, STORES
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Lifecycle, Scene, Shared, Spot, Team, Tile
from epifuse.providers.cutedsl.kernels.accesses.tile import TileLoads, TileStores
from epifuse.providers.cutedsl.kernels.dealing import Dealing
from epifuse.providers.cutedsl.kernels.exchange import Exchange
from epifuse.providers.cutedsl.kernels.fragment import Fragment, spread
from epifuse.providers.cutedsl.kernels.modes import coordinate, whole
from epifuse.providers.cutedsl.kernels.parts import Parts
from epifuse.providers.cutedsl.kernels.reduce import Partials, finished
from epifuse.providers.cutedsl.kernels.tensor_memory import Sums
from epifuse.providers.cutedsl.partials import reduction, reductions_of_tiles
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.rows import read_lines
from epifuse.providers.cutedsl.store_math import as_kind, stored


class Epilogue:
    """The epilogue of `program` in `design`. Its attributes are known while tracing."""

    def __init__(self, design: Design, program: Program, fragment: Fragment, parts: Parts | None = None) -> None:
        self.design, self.program, self.fragment, self.parts = design, program, fragment, parts
        self.scene = scene = Scene(design, program, fragment)
        self.division, self.walks = scene.division, scene.walks
        self.slots = scene.slots
        self.read_lines, self.picked = read_lines(program.graph), segments.picked(program.graph)
        self.partials = Partials(design, program, fragment, reductions_of_tiles(program.graph))
        self.by_walk = [self._partials(walk_) for walk_ in self.walks]
        self.exchange = Exchange(design, fragment)
        self.dealing = Dealing(fragment, self.slots.count, dealt=self._is_dealt)
        self.loads = _each(LOADS, scene, scene.loads, 0)
        self.stores = _each(STORES, scene, program.stores, len(self.loads))
        self.accesses: list[Lifecycle] = [*self.loads, *self.stores]
        self.load_of = {i: each for each in self.loads for i in each.members}
        (self.arrivals,) = (each for each in self.loads if isinstance(each, TileLoads))
        (self.departures,) = (each for each in self.stores if isinstance(each, TileStores))
        self.deposits = any(each.deposits and each.members for each in self.loads)

    def _partials(self, walk_):
        reductions = tuple(reduction(node, self.program.graph) for node in walk_.reductions)
        return Partials(self.design, self.program, self.fragment, reductions)

    @property
    def _is_dealt(self):
        """Whether lanes deal out the slots of segments. They do for segments of one width that no cluster exchanges.

        No operand of these values may have a cut N: its pieces need places that are known while tracing.
        """
        lines = {node for walk_ in self.walks for node in walk_.lines}
        read = [self.scene.loads[number] for node, number in self.scene.numbers.items() if node in lines]
        is_of_one_width = len(segments.widths(self.program.graph)) == 1
        return is_of_one_width and not self.exchange.words and not any(access.inner[1] for access in read)

    # On the host.

    def whole(self, tensors, outputs):
        """Return operands and outputs as (M, N, L)."""
        pairs = (tensors, self.scene.loads), (outputs, self.program.stores)
        return tuple(
            tuple(whole(tensor, access, self.design.swapped) for tensor, access in zip(*pair, strict=True))
            for pair in pairs
        )

    def carriers(self, tensors, outputs):
        """Return what TMA needs (`tile.Carrier`): a tuple for each access."""
        return tuple(each.carriers(outputs if each in self.stores else tensors) for each in self.accesses)

    # In the kernel, called by every thread.

    def allocate(self, allocator):
        """Allocate what needs no wide alignment; it comes before what does."""
        return [each.allocate(allocator) for each in self.accesses], self.exchange.allocate(allocator)

    def buffers(self, allocator, small, carriers, tensors, outputs):
        """Return all shared memory: what `allocate` returned (`small`), and the buffers of tiles."""
        own = [
            each.buffers(allocator, allocated, held, outputs if each in self.stores else tensors)
            for each, allocated, held in zip(self.accesses, small[0], carriers, strict=True)
        ]
        return Shared(own, small[1])

    @property
    def has_barriers(self):
        """Whether there is anything to initialise."""
        return any(each.barriers for each in self.accesses) or self.exchange.words > 0

    def initialise(self, shared):
        """Called by one thread: initialise the barriers."""
        for each, own in zip(self.accesses, shared.own, strict=True):
            if each.barriers:
                each.initialise(own)
        self.exchange.initialise(shared.received)

    # In the kernel, called by a warp group.

    def fetch(self, place, thread, given):
        """Before the main loop: fetch the scalars and vectors that the tile needs."""
        held = {}
        for each in self.loads:
            held.update(each.fetch(place, thread, given))
        return held

    def deposit(self, held, shared, group, thread):
        """Behind the main loop: write what was fetched to shared memory."""
        for each in self.loads:
            if each.deposits:
                each.deposit(held, shared.own[each.number], group, thread)

    def team(self, *what):
        """Return the `Team` for a tile. Its last multiplications may still be under way."""
        team = Team(self.scene, *what)
        for each in self.accesses:
            each.begin(team)
        return team

    def arrive(self, number, s, team, early=()):
        """Return what subtile `s` of a walk reads ahead. For the first subtiles operands may have come `early`."""
        found = dict(early[s]) if s < len(early) else {}
        for each in self.loads:
            if s < self.division.subtiles and not (found and each is self.arrivals):
                found.update(each.arrive(number, s, team))
        return found

    def tile(self, place, held):
        """Return what is held of a tile, with no partial results yet."""
        return Tile(place, held, self.partials.begin(self.slots), self.by_walk[-1].begin(self.slots), {}, {})

    def reduce_rows(self, first, values, tile, team):
        """Run every walk but the last over the block that begins with subtile `first`. What the last walk reads of
        whole rows or segments is put into the tile's lines.

        `values` is the accumulator. A value that the next walk needs may replace what it holds.
        """
        shape, block = team.given.shape, range(first, first + self.slots.subtiles)
        for number, walk_ in enumerate(self.walks[:-1]):
            partials = self.by_walk[number]
            kept = partials.begin(self.slots)
            arrived = {}
            # Disguised for each walk, lest the compiler keeps comparisons with it for the next walk.
            columns = dm.disguised(Int32(shape[1]), number)
            for s in block:
                if s == first or not self.scene.reads_ahead:
                    arrived = self.arrive(number, s, team)
                coming = self.arrive(number, s + 1, team) if self.scene.reads_ahead and s + 1 in block else {}
                spot = self._spot(self.scene.walked(s), tile.place, team)
                found = self._compute(number, spot, values, arrived, tile, team)
                partials.add(kept, found, spot, (shape[0], columns, shape[2]), self.slots)
                held = self.walks[number + 1].held
                if held is not walk_.held:
                    self._replace(values, spot, found[held], team)
                arrived = coming
            if walk_.reductions:
                self._complete(number, kept, first, tile, team)
        self._store_rows([node for walk_ in self.walks[:-1] for node in walk_.lines], first, tile, team)

    def _store_rows(self, nodes, first, tile, team):
        places = self._places(first, tile.place, team)
        for each in self.stores:
            each.store_rows(nodes, places, tile, team)

    @property
    def is_even(self):
        """Whether all subtiles run the same code: none depends on others, or on a place known while tracing."""
        last, accesses = self.walks[-1], [*self.scene.loads, *self.program.stores]
        apart = last.reductions or last.lines or self.partials.reductions or self.picked
        return len(self.walks) == 1 and not (apart or any(any(access.inner) for access in accesses))

    def any_subtile(self, at, values, tile, team):
        """Compute and store a subtile whose place may be known at run time only. The epilogue must be `is_even`."""
        spot = self._spot(at, tile.place, team)
        found = self._compute(0, spot, values, {}, tile, team)
        results = [self._stored(i, found) for i in range(len(self.program.stores))]
        for each in self.stores:
            each.store(results, spot, tile, team)

    def subtile(self, s, values, arrived, tile, team):
        """Subtile `s` of the last walk: compute it, and store what leaves directly. Returns all outputs, converted."""
        spot, place = self._spot(self.scene.walked(s), tile.place, team), tile.place
        found = self._compute(len(self.walks) - 1, spot, values, arrived, tile, team)
        results = [self._stored(i, found) for i in range(len(self.program.stores))]
        for each in self.stores:
            each.store(results, spot, tile, team)
        self.partials.add(tile.kept, found, spot, team.given.shape, self.slots)
        self._end(s, found, spot, tile, team)
        if spot.down + 1 == self.division.down:
            self.partials.leave_columns(tile.kept, spot.columns, place, self._part(place, team), team.given)
        return results

    def _end(self, s, found, spot, tile, team):
        """Reduce the segments of a block that the last walk completes. Results are stored, and not read again."""
        last = len(self.walks) - 1
        if self.walks[last].lines:
            self.by_walk[last].add(tile.late, found, spot, team.given.shape, self.slots)
            if (s + 1) % self.slots.subtiles == 0:
                first = s + 1 - self.slots.subtiles
                self._complete(last, tile.late, first, tile, team)
                self._store_rows(self.walks[last].lines, first, tile, team)

    def leave(self, tile, carried, team):
        """Called after a tile: write what its reductions leave."""
        rows = [self.division.row(down, row, tile.place) for down in range(self.division.down) for row in team.rows]
        part = self._part(tile.place, team)
        self.partials.leave(tile.kept, carried, rows, tile.place, part, team.given)

    def _part(self, place, team):
        """The number of this warp among all warps that have different rows of the result."""
        return self.division.warp_of_rows(place, team.thread // 32)

    def _spot(self, at, place, team):
        """Return the `Spot` of the subtile at (down, right)."""
        if self.design.in_tensor_memory and isinstance(at[1], int):
            # Disguised for each subtile, lest the compiler computes the addresses of all at once, and keeps them.
            number = at[0] * self.division.across + at[1]
            place = place._replace(m=dm.disguised(place.m, number), n=dm.disguised(place.n, number))
        rows = [self.division.row(at[0], row, place) for row in team.rows]
        columns = [self.division.column(at[1], column, place) for column in team.columns]
        return Spot(at[0], at[1], spread(rows, self.fragment.by_row), spread(columns, self.fragment.by_column))

    def _first(self, spot, team):
        """Where a subtile's values begin in the accumulator."""
        if self.parts is None:
            return (spot.down * self.division.across + spot.right) * team.count
        return spot.down * self.parts.down + spot.right * self.parts.right

    def _held(self, node, values, spot, team):
        """Return what the accumulator holds of a subtile, as the kind of `node`; with parts, one part of a row."""
        to = Float32 if node is None else HELD[self.program.graph.types[node].kind]
        if isinstance(values, Sums):
            return values.read(spot, team.shape).to(to)
        first = self._first(spot, team)
        if values.element_type is Int32 and to is Float32:  # a value that replaced an accumulator of integers
            values = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Float32), values.layout)
        if self.parts is None:
            own = cute.make_tensor(values.iterator + first, cute.make_layout(team.shape))
            return own.load().to(to)
        own = [values[first + register] for register in self._registers(node, self.parts)]
        return dm.fragment(own, team.shape, values.element_type).to(to)

    def _registers(self, node, parts):
        """The registers of a subtile that hold the part `node` of a row, or what replaced the first part held."""
        part = node if node is not None and node.op == "accum" else self.walks[0].held
        return parts.registers[0 if part is None else part.attr]

    def _replace(self, values, spot, fragment, team):
        if isinstance(values, Sums):
            values.replace(spot, fragment)
            return
        if values.element_type is Int32:
            values = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Float32), values.layout)
        registers = range(team.count) if self.parts is None else self._registers(None, self.parts)
        for register, value in zip(registers, dm.numbers(fragment), strict=True):
            values[self._first(spot, team) + register] = value

    def _own(self, number, node, values, spot, team):
        """Return what `_held` returns, as walk `number` computes with it."""
        x = self._held(node, values, spot, team)
        # Else the compiler computes only once what walks share, and keeps it beside the accumulator: 700 bytes spilled.
        return x if number == 0 else dm.each(lambda value: dm.disguised(value, number), x, dtype=x.element_type)

    def _compute(self, number, spot, values, arrived, tile, team, nodes=None):
        """Compute one subtile: all nodes of walk `number`, or only `nodes`. Return values by node."""
        walk_ = self.walks[number]
        x = self._own(number, walk_.held, values, spot, team)
        known = {
            node: self._spread_rows(tile.shown[node], spot, team) for node in self.read_lines if node in tile.shown
        }
        known[walk_.held] = x

        def loaded(i):
            return arrived[i] if i in arrived else self.load_of[i].visit(i, x, spot, tile, team)

        def beside(at, node):
            """Compute a node at another subtile of the tile."""
            below = topological([node], known=known)
            return self._compute(number, self._spot(at, tile.place, team), values, {}, tile, team, below)[node]

        def leaf(node):
            if node.op == "accum":
                return self._own(number, node, values, spot, team)
            if node.op == "pick":
                return self._picked(node, spot, x, beside)
            if node.op == "index" and self.picked.issuperset(node.attr):
                return self._counted(node, spot, x)
            return self._leaf(node, x, (spot.rows, spot.columns, tile.place.l), team.given, loaded)

        return walk(
            self.program.graph, leaf, x, self.program.accuracies, walk_.nodes if nodes is None else nodes, known
        )

    def _counted(self, node, spot, like):
        """Return a coordinate that is known while tracing, so that a choice by it costs nothing."""
        found = [0] * len(self.fragment.registers)
        for factor in node.attr:
            first = spot.right * self.design.subtile[1]
            places = [pairs.place(factor, first + column) for _, column in self.fragment.registers]
            found = [at * factor.extent + place for at, place in zip(found, places, strict=True)]
        return dm.fragment([Int32(at) for at in found], like.shape, Int32)

    def _picked(self, node, spot, like, beside):
        """Return what a `pick` node takes of a factor, for each register. `beside` gives a value of a subtile."""
        sources = pairs.sources(node.attr, spot.right, self.fragment.registers)
        found = {
            right: beside((spot.down, right), node.args[0]) for right in dict.fromkeys(right for right, _ in sources)
        }
        numbers = {right: dm.numbers(value) for right, value in found.items()}
        picked = [numbers[right][register] for right, register in sources]
        return dm.fragment(picked, like.shape, found[sources[0][0]].element_type)

    def _leaf(self, node, like, places, given, loaded):
        """Return a coordinate, a number, or what `loaded` gives of an operand. `places` is (rows, columns, batch)."""
        if node.op == "index":
            rows, columns, batch = places
            found = [coordinate(node.attr, (*at, batch), given.shape) for at in zip(rows, columns, strict=True)]
            return dm.fragment(found, like.shape, Int32)
        kind = self.program.graph.types[node].kind
        if node in self.program.numbers:
            number = given.numbers[self.program.numbers.index(node)]
            value = cute.full_like(like, number, HELD["float" if kind == "mask" else kind])
            return value != 0.0 if kind == "mask" else value
        i = self.scene.numbers[node]
        value = loaded(i).to(self.scene.held(i))
        return value != 0 if kind == "mask" else value

    # Rows and segments.

    def _complete(self, number, kept, first, tile, team):
        """Complete the reductions of walk `number` over a block, and compute what a row or segment has one value of."""
        walk_, partials, count, shape = self.walks[number], self.by_walk[number], self.dealing.count, team.given.shape
        places = self._places(first, tile.place, team)
        partial = self._partial(partials, kept)
        exchanging = [i for i, each in enumerate(self.walks[:-1]) if each.reductions]
        exchange = team.before.tiles * len(exchanging) + sum(i < number for i in exchanging)
        at = exchange, tile.place.n, places.down
        complete = self.exchange.complete(partials.rules, partial, at, team, team.shared.received)
        numbers = {
            node: tuple(
                dm.fragment(xs, (count,), type(xs[0]))
                for xs in zip(*(complete[slot][i] for slot in range(count)), strict=True)
            )
            for i, node in enumerate(walk_.reductions)
        }
        like = cute.full((count,), 0.0, Float32)

        def leaf(node):
            if node.op == "reduce":
                return finished(node, numbers[node], shape)
            return self._leaf(node, like, (places.rows, places.columns, tile.place.l), team.given, loaded)

        def loaded(i):
            return self.load_of[i].rows(i, like, places, tile, team)

        tile.lines.update(walk(self.program.graph, leaf, like, nodes=walk_.lines, known=tile.lines))
        tile.shown.update((node, self._shown(tile.lines[node])) for node in walk_.lines if node in self.read_lines)

    def _shown(self, value):
        """Return a value for all slots, given those of the lane's own slots. Masks are exchanged as integers."""
        source = as_kind(value, "mask", "int32") if value.element_type is Boolean else value
        shown = dm.fragment(self.dealing.shown(dm.numbers(source)), (self.slots.count,), source.element_type)
        return shown != 0 if value.element_type is Boolean else shown

    def _partial(self, partials, kept):
        """Return, for each of the lane's own slots, a partial result of each reduction, merged over a row's lanes."""
        found = []
        for rule, reduced, each in zip(partials.rules, partials.reductions, kept, strict=True):
            firsts = [self.slots.first(slot, segments.width(reduced.node)) for slot in range(self.slots.count)]
            taken = list(dict.fromkeys(firsts))
            merged = self.dealing.merged(rule, [each.take(first) for first in taken])
            found.append([merged[taken.index(first)] for first in firsts[: self.dealing.count]])
        return list(zip(*found, strict=True))

    def _places(self, first, place, team):
        """Where the lane's own slots lie, in the block that begins with subtile `first`."""
        return self.dealing.places(self.slots.places(self.scene.walked(first), place, team.rows))

    def _spread_rows(self, value, spot, team):
        """Spread a value of each slot over the registers of a subtile."""
        is_mask = value.element_type is Boolean
        source = as_kind(value, "mask", "int32") if is_mask else value
        own = dm.numbers(source)
        found = dm.fragment(
            [own[slot] for slot in self.slots.of(spot.down, spot.right)], team.shape, source.element_type
        )
        return found != 0 if is_mask else found

    def _stored(self, i, found):
        """Return output `i` in its dtype, in registers. None if it has no values in subtiles."""
        node, access = self.program.graph.outputs[i].node, self.program.stores[i]
        if not access.travels.by_value:
            return None
        value = stored(found[node], self.program.graph.types[node].kind, access.dtype)
        fragment = cute.make_rmem_tensor(value.shape, value.element_type)
        fragment.store(value)
        return fragment


def _each(classes, scene, accesses, first):
    """Make an object of each class, with the operands or outputs that travel its ways, numbered from `first` on."""
    found = []
    for number, each in enumerate(dict.fromkeys(classes.values())):
        members = [i for i, access in enumerate(accesses) if classes.get(access.way) is each]
        found.append(each(scene, members, first + number))
    return found
