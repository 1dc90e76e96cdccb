"""Regions of N: each has an epilogue, and each tile lies in one region, whose epilogue it runs.

A CTA branches once a tile, and all of its warps take the same branch. Regions send their outputs through the same
shared memory, because a tile stores the outputs of one region alone. Each vector has a separate place in shared memory.
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
        self.programs = programs
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
        """What needs no wide alignment, of all regions."""
        return [epilogue.allocate(allocator) for epilogue in self.each]

    def buffers(self, allocator, small, carriers, tensors, outputs):
        """What `allocate` gave, and the buffers of tiles: regions whose outputs lie alike have the same."""
        each, found = zip(self.each, self._tensors(tensors), self._outputs(outputs), strict=True), []
        pool: dict[Any, Any] = {}
        for region, (epilogue, own, leaving) in enumerate(each):
            shared = _Shared(allocator, pool, epilogue) if len(self.each) > 1 else allocator
            found.append(epilogue.buffers(shared, small[region], self.carriers_of(region, carriers), own, leaving))
        return found

    def given(self, tensors, numbers, outputs, workspace, shape):
        """What the launch was given of each region, whose N is known while tracing."""
        counts = [len(program.numbers) for program in self.programs]
        each = zip(self._tensors(tensors), self._parts(numbers, counts), self._outputs(outputs), strict=True)
        return tuple(
            Given(own, kinds, leaving, workspace, self._shape(region, shape))
            for region, (own, kinds, leaving) in enumerate(each)
        )

    def _shape(self, region, shape):
        columns = self.programs[region].columns
        return shape if columns is None else (shape[0], Int32(columns[1] - columns[0]), shape[2])

    # A warp group.

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
    """An allocator that gives the outputs of a region the buffers that those of another have, where they lie alike."""

    def __init__(self, allocator: Any, pool: dict[Any, Any], epilogue: Epilogue) -> None:
        self.allocator, self.pool = allocator, pool
        stores = epilogue.program.stores
        members = epilogue.departures.members
        self.keys = iter([(at, stores[i].dtype, stores[i].by_rows) for at, i in enumerate(members)])

    def allocate_tensor(self, *what: Any) -> Any:
        """The buffer of the next output."""
        key = next(self.keys)
        if key not in self.pool:
            self.pool[key] = self.allocator.allocate_tensor(*what)
        return self.pool[key]
