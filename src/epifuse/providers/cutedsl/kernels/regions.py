"""Regions: ranges of N with an epilogue each. A tile lies in one region, and runs the epilogue of this region.

A CTA branches once a tile, and all of its warps take the same branch. Operands and outputs of all regions go through
the same shared memory, because a tile has those of one region only. Each vector has a separate place in shared memory.
Before the main loop a tile fetches the vectors of all regions, and then uses those of its own region.
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
    """The epilogues of the regions, in the order of their columns. If N is not divided, there is one epilogue."""

    def __init__(self, design: Design, programs: tuple, fragment: Fragment, parts: Parts | None) -> None:
        self.design, self.programs = design, programs
        self.each = [Epilogue(design, program, fragment, parts) for program in programs]
        self.tiles = [program.columns[0] // design.columns if program.columns else 0 for program in programs]

    @property
    def first(self):
        """The epilogue of the first region."""
        return self.each[0]

    def _parts(self, all_of_them, counts):
        """Cut the items of all regions into one tuple for each region; `counts` has each region's number of items."""
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
        """Return operands and outputs as (M, N, L). N are the columns of the region that a tensor belongs to."""
        each = zip(self.each, self._tensors(tensors), self._outputs(outputs), strict=True)
        made = [epilogue.whole(*own) for epilogue, *own in each]
        return sum((own for own, _ in made), ()), sum((own for _, own in made), ())

    def carriers(self, tensors, outputs):
        """Return what TMA needs (`tile.Carrier`): a tuple for each access of each region, region after region."""
        each = zip(self.each, self._tensors(tensors), self._outputs(outputs), strict=True)
        return sum((epilogue.carriers(*own) for epilogue, *own in each), ())

    # In the kernel, called by every thread.

    def carriers_of(self, region, carriers):
        """The carriers of one region: a tuple for each access."""
        return self._parts(carriers, [len(epilogue.accesses) for epilogue in self.each])[region]

    def allocate(self, allocator):
        """Allocate what needs no wide alignment, for each region. All regions share the barriers of arriving tiles."""
        shared = _Shared(allocator) if len(self.each) > 1 else allocator
        return [epilogue.allocate(shared) for epilogue in self.each]

    def buffers(self, allocator, small, carriers, tensors, outputs):
        """Return all shared memory of each region: what `allocate` returned (`small`), and the buffers of tiles.

        Regions share a buffer if their tiles have the same dtype and order.
        """
        each, found = zip(self.each, small, self._tensors(tensors), self._outputs(outputs), strict=True), []
        shared = _Shared(allocator) if len(self.each) > 1 else allocator
        for region, (epilogue, own, coming, leaving) in enumerate(each):
            if len(self.each) > 1:
                shared.begin(epilogue)
            found.append(epilogue.buffers(shared, own, self.carriers_of(region, carriers), coming, leaving))
        return found

    def initialise(self, shared):
        """Called by one thread: initialise the barriers. The first region that has some does it for all regions."""
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
        """Whether TMA loads tiles of operands for any region."""
        return any(epilogue.arrivals.members for epilogue in self.each)

    def given(self, tensors, numbers, outputs, workspace, shape):
        """Return what the launch was given, as a `Given` for each region. A region's N is known while tracing."""
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

    # In the kernel, called by a warp group.

    def within(self, at, given):
        """Return `given` with `ends` limited to the rows of the tile `at`.

        A low tile has fewer rows than wgmma multiplies for it. The rows behind its own belong to the next tile.
        """
        if not self.design.is_low:
            return given
        below = (at.m + 1) * self.design.tile[0]
        return tuple(one._replace(ends=(cutlass.min(one.shape[0], below), *one.shape[1:])) for one in given)

    def fetch(self, at, thread, given):
        """Called before the main loop: fetch the scalars and vectors that a tile needs, for each region."""
        return [
            epilogue.fetch(self.place(region, at), thread, given[region]) for region, epilogue in enumerate(self.each)
        ]

    def has(self, region, n):
        """Whether the tiles at place `n` along N lie in the region."""
        is_behind = n >= self.tiles[region]
        return is_behind if region + 1 == len(self.each) else is_behind & (n < self.tiles[region + 1])

    def place(self, region, at):
        """Return the place `at` with `n` counted from the region's first tile; 0 for tiles before the region."""
        if len(self.each) == 1:
            return at
        return at._replace(n=cutlass.max(at.n - self.tiles[region], 0))


class _Shared:
    """An allocator through which regions share memory: tiles of the same dtype and order have the same buffer, and all
    regions have the same barriers of arriving tiles."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.pool: dict[Any, Any] = {}
        self.tiles: Any = None

    def begin(self, epilogue: Epilogue) -> None:
        """Begin a region: the next calls of `allocate_tensor` are for its tiles, operands before outputs."""
        loads, stores = epilogue.scene.loads, epilogue.program.stores
        coming = [("load", at, loads[i]) for at, i in enumerate(epilogue.arrivals.members)]
        leaving = [("store", at, stores[i]) for at, i in enumerate(epilogue.departures.members)]
        self.tiles = iter([(side, at, access.dtype, access.by_rows) for side, at, access in (*coming, *leaving)])

    def allocate_tensor(self, *what: Any) -> Any:
        """Return the buffer of the next tile, which regions share. Before `begin`, return a new buffer for a vector."""
        if self.tiles is None:
            return self.allocator.allocate_tensor(*what)
        return self._pooled(next(self.tiles), self.allocator.allocate_tensor, what)

    def allocate_array(self, *what: Any) -> Any:
        """Return the barriers, which all regions share."""
        return self._pooled("barriers", self.allocator.allocate_array, what)

    def _pooled(self, key: Any, allocate: Any, what: tuple[Any, ...]) -> Any:
        if key not in self.pool:
            self.pool[key] = allocate(*what)
        return self.pool[key]
