"""Direct accesses to memory, for tensors that TMA cannot address, or that shared memory has no room for."""

import math
from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute

from epifuse.providers.cutedsl import device_math as dm
from epifuse.providers.cutedsl.design import WARP_GROUP
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Loads, Spot, Stores, Team, Tile
from epifuse.providers.cutedsl.kernels.fragment import spread
from epifuse.providers.cutedsl.kernels.modes import element, store_inside, under
from epifuse.providers.cutedsl.kernels.place import Place
from epifuse.providers.cutedsl.kernels.slots import Places
from epifuse.providers.cutedsl.ways import Access


class DirectLoads(Loads):
    """Operands of which each thread reads the elements that its values need."""

    def visit(self, i: int, like: Any, spot: Spot, tile: Tile, team: Team) -> Any:
        """Lanes outside the result read its edge. With a branch around each load, one load would wait for the other."""
        access = self.scene.loads[i]
        pieces = self.scene.pieces(access, spot, tile.place, team)
        if access.alike == 1:
            return self._values(i, (spot.rows, spot.columns, pieces), team.shape, tile, team)
        slots = self._sharing(access)
        first = [registers[0] for registers in slots]
        rows, columns, own = ([places[register] for register in first] for places in (spot.rows, spot.columns, pieces))
        found = self._values(i, (rows, columns, own), (len(first),), tile, team)
        return dm.fragment(spread(dm.numbers(found), slots), team.shape, self.scene.held(i))

    def _sharing(self, access: Access) -> list[list[int]]:
        """The registers of a subtile that always have the same element, for each element.

        A lane's columns lie in the runs of `STEP` columns in which those of lane 0 lie, from an even column on. So
        registers share an element in each lane if they do in lane 0, as only an even number of columns is alike.
        """
        design = self.scene.design
        columns = math.gcd(access.alike, design.subtile[1], design.columns)
        slots: dict[tuple[int, int], list[int]] = {}
        for register, (row, column) in enumerate(self.scene.fragment.registers):
            slots.setdefault((row, column // columns), []).append(register)
        return list(slots.values())

    def rows(self, i: int, like: Any, places: Places, tile: Tile, team: Team) -> Any:
        inner, count = self.scene.loads[i].inner[1], len(places.rows)
        pieces = [self.scene.division.pieces(inner, column, 0, tile.place) for column in places.right]
        return self._values(i, (places.rows, places.columns, pieces), (count,), tile, team)

    def _values(self, i: int, at: tuple[Any, Any, Any], shape: Any, tile: Tile, team: Team) -> Any:
        access, tensor, extents = self.scene.loads[i], team.given.tensors[i], team.given.shape
        rows, columns, pieces = at
        step, count = 2 if access.pairs else 1, len(rows)
        raw = cute.make_rmem_tensor((step, count // step), tensor.element_type)
        for v in range(0, count, step):
            row = cutlass.min(rows[v], extents[0] - 1)
            if pieces[v] is None:
                column = cutlass.min(columns[v], extents[1] - step)
            else:
                column = *pieces[v][:-1], cutlass.min(pieces[v][-1], tensor.shape[1][-1] - 1)
            cute.autovec_copy(element(tensor, access, row, column, tile.place.l), raw[None, v // step])
        return under(raw, shape).load().to(self.scene.held(i))


class DirectStores(Stores):
    """Outputs of which each thread writes its own values to memory."""

    def store(self, results: Sequence[Any], spot: Spot, tile: Tile, team: Team) -> None:
        given, batch = team.given, tile.place.l
        for i in self.members:
            access = self.scene.program.stores[i]
            step = 2 if access.pairs else 1
            parts = under(results[i], (step, team.count // step))
            limits = given.limits(access)
            pieces = self.scene.pieces(access, spot, self._of_subtile(access, spot, tile.place), team)
            for v in range(0, team.count, step):
                to = element(given.outputs[i], access, spot.rows[v], pieces[v] or spot.columns[v], batch)
                store_inside(parts[None, v // step], to, (spot.rows[v], spot.columns[v], batch), limits)

    def _of_subtile(self, access: Access, spot: Spot, place: Place) -> Place:
        """Return the place, disguised as another one for each subtile. Otherwise the compiler computes the addresses of
        all subtiles at once, and keeps them.

        For outputs with heads first, 24 bytes spilled in tiles of 128 x 256, and none do when disguised. In 128 x 192
        it was 1072, and would be 1828, so the place is not disguised there.
        """
        design = self.scene.design
        if not access.inner[1] or design.rows * design.tile[1] > WARP_GROUP * WARP_GROUP:
            return place
        return place._replace(n=dm.disguised(place.n, spot.right))
