"""Regions of N: each has an epilogue, and each tile lies in one region, whose epilogue it runs.

A CTA branches once a tile, and all of its warps take the same branch. Operands and outputs of regions go through the
same shared memory, because a tile has those of one region alone. Each vector has a separate place in shared memory.
Before the main loop a tile fetches the vectors of all regions; those of other regions are of their first tile.
"""

from typing import Any

import cutlass
from cutlass import Int32

from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Given
from epifuse.providers.cutedsl.kernels.epilogue import Epilogue
from epifuse.providers.cutedsl.kernels.fragment import Fragment
from epifuse.providers.cutedsl.kernels.parts import Parts


class Regions:
    """The epilogues of the regions in the order of their columns; one epilogue where N is not divided."""

    def __init__(self, design: Design, programs: tuple, fragment: Fragment, parts: Parts | None) -> None:
        self.design, self.programs = design, programs
        self.each = [Epilogue(design, program, fragment, parts) for program in programs]
        self.tiles = [program.columns[0] // design.columns if program.columns else 0 for program in programs]

    @property
    def first(self):
        """The epilogue of the first columns."""
        return self.each[0]

    def _parts(self, all_of_them, counts):
        """A list of all regions' items, cut into one tuple for each region, which has so many of them."""
        found, first = [], 0
        for count in counts:
            found.append(tuple(all_of_them[first : first + count]))
            first += count
        return found

    def _tensors(self, tensors):
        return self._parts(tensors, [len(program.tensors) for program in self.programs])

    def _outputs(self, outputs):
        return self._parts(outputs, [len(program.stores) for program in self.programs])

    # On the host.

    def whole(self, tensors, outputs):
        """Operands and outputs as (M, N, L), whose N are the region's."""
        each = zip(self.each, self._tensors(tensors), self._outputs(outputs), strict=True)
        made = [epilogue.whole(*own) for epilogue, *own in each]
        return sum((own for own, _ in made), ()), sum((own for _, own in made), ())

    def carriers(self, tensors, outputs):
        """TMA's descriptors, by access of each region."""
        each = zip(self.each, self._tensors(tensors), self._outputs(outputs), strict=True)
        return sum((epilogue.carriers(*own) for epilogue, *own in each), ())

    # In the kernel, every thread.

    def carriers_of(self, region, carriers):
        """Those of one region, by access."""
        return self._parts(carriers, [len(epilogue.accesses) for epilogue in self.each])[region]

    def allocate(self, allocator):
        """What needs no wide alignment, of all regions. They have the barriers of arriving tiles together."""
        shared = _Shared(allocator) if len(self.each) > 1 else allocator
        return [epilogue.allocate(shared) for epilogue in self.each]

    def buffers(self, allocator, small, carriers, tensors, outputs):
        """What `allocate` gave, and the buffers of tiles: regions whose tiles lie alike have the same."""
        each, found = zip(self.each, small, self._tensors(tensors), self._outputs(outputs), strict=True), []
        shared = _Shared(allocator) if len(self.each) > 1 else allocator
        for region, (epilogue, own, coming, leaving) in enumerate(each):
            if len(self.each) > 1:
                shared.begin(epilogue)
            found.append(epilogue.buffers(shared, own, self.carriers_of(region, carriers), coming, leaving))
        return found

    def initialise(self, shared):
        """One thread: barriers, which the first region that has some initialises for all."""
        for epilogue, own in zip(self.each, shared, strict=True):
            if epilogue.has_barriers:
                epilogue.initialise(own)
                return

    @property
    def has_barriers(self):
        """Whether there is anything to initialise."""
        return any(epilogue.has_barriers for epilogue in self.each)

    @property
    def brings(self):
        """Whether tiles of operands come for any region."""
        return any(epilogue.arrivals.members for epilogue in self.each)

    def given(self, tensors, numbers, outputs, workspace, shape):
        """What the launch was given of each region, whose N is known while tracing."""
        counts = [len(program.numbers) for program in self.programs]
        each = zip(self._tensors(tensors), self._parts(numbers, counts), self._outputs(outputs), strict=True)
        shapes = [self._shape(region, shape) for region in range(len(self.programs))]
        return tuple(
            Given(own, kinds, leaving, workspace, of_region, of_region)
            for (own, kinds, leaving), of_region in zip(each, shapes, strict=True)
        )

    def _shape(self, region, shape):
        columns = self.programs[region].columns
        return shape if columns is None else (shape[0], Int32(columns[1] - columns[0]), shape[2])

    # A warp group.

    def within(self, at, given):
        """What the launch was given, for a tile: rows that are multiplied and not the tile's are the next one's."""
        if not self.design.is_low:
            return given
        below = (at.m + 1) * self.design.tile[0]
        return tuple(one._replace(ends=(cutlass.min(one.shape[0], below), *one.shape[1:])) for one in given)

    def fetch(self, at, thread, given):
        """Before the main loop: what a tile needs of scalars and vectors, of each region."""
        return [
            epilogue.fetch(self.place(region, at), thread, given[region]) for region, epilogue in enumerate(self.each)
        ]

    def has(self, region, n):
        """Whether a tile of columns is a region's."""
        is_behind = n >= self.tiles[region]
        return is_behind if region + 1 == len(self.each) else is_behind & (n < self.tiles[region + 1])

    def place(self, region, at):
        """A tile counted from the region's first one; that one for tiles before it."""
        if len(self.each) == 1:
            return at
        return at._replace(n=cutlass.max(at.n - self.tiles[region], 0))


class _Shared:
    """An allocator that gives the tiles of a region the buffers that those of another have, where they lie alike, and
    all regions the barriers of tiles that arrive."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.pool: dict[Any, Any] = {}
        self.tiles: Any = None

    def begin(self, epilogue: Epilogue) -> None:
        """The tiles of a region follow."""
        loads, stores = epilogue.scene.loads, epilogue.program.stores
        coming = [("load", at, loads[i]) for at, i in enumerate(epilogue.arrivals.members)]
        leaving = [("store", at, stores[i]) for at, i in enumerate(epilogue.departures.members)]
        self.tiles = iter([(side, at, access.dtype, access.by_rows) for side, at, access in (*coming, *leaving)])

    def allocate_tensor(self, *what: Any) -> Any:
        """The buffer of the next tile; of a vector one of its own."""
        if self.tiles is None:
            return self.allocator.allocate_tensor(*what)
        return self._pooled(next(self.tiles), self.allocator.allocate_tensor, what)

    def allocate_array(self, *what: Any) -> Any:
        """The barriers."""
        return self._pooled("barriers", self.allocator.allocate_array, what)

    def _pooled(self, key: Any, allocate: Any, what: tuple[Any, ...]) -> Any:
        if key not in self.pool:
            self.pool[key] = allocate(*what)
        return self.pool[key]
