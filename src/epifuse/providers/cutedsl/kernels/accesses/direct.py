"""Between registers and where tensors lie: what TMA cannot address, or what shared memory has no room for."""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute

from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Loads, Spot, Stores, Team, Tile
from epifuse.providers.cutedsl.kernels.modes import element, store_inside, under
from epifuse.providers.cutedsl.kernels.slots import Places


class DirectLoads(Loads):
    """Operands that every thread reads where its values need them."""

    def visit(self, i: int, like: Any, spot: Spot, tile: Tile, team: Team) -> Any:
        """Lanes outside the result read its edge: a branch around each load would wait for one before the next."""
        return self._values(i, (spot.rows, spot.columns), team.shape, tile, team)

    def rows(self, i: int, like: Any, places: Places, tile: Tile, team: Team) -> Any:
        return self._values(i, (places.rows, places.columns), (len(places.rows),), tile, team)

    def _values(self, i: int, at: tuple[Sequence[Any], Sequence[Any]], shape: Any, tile: Tile, team: Team) -> Any:
        access, tensor, extents = self.scene.loads[i], team.given.tensors[i], team.given.shape
        step, count = 2 if access.pairs else 1, len(at[0])
        raw = cute.make_rmem_tensor((step, count // step), tensor.element_type)
        for v in range(0, count, step):
            row = cutlass.min(at[0][v], extents[0] - 1)
            column = cutlass.min(at[1][v], extents[1] - step)
            cute.autovec_copy(element(tensor, access, row, column, tile.place.l), raw[None, v // step])
        return under(raw, shape).load().to(self.scene.held(i))


class DirectStores(Stores):
    """Outputs that every thread writes where its values belong."""

    def store(self, results: Sequence[Any], spot: Spot, tile: Tile, team: Team) -> None:
        given, batch = team.given, tile.place.l
        for i in self.members:
            access = self.scene.program.stores[i]
            step = 2 if access.pairs else 1
            parts = under(results[i], (step, team.count // step))
            # What does not vary over an axis is written once.
            limits = [n if axis in access.axes else 1 for axis, n in zip("mnl", given.shape, strict=True)]
            for v in range(0, team.count, step):
                to = element(given.outputs[i], access, spot.rows[v], spot.columns[v], batch)
                store_inside(parts[None, v // step], to, (spot.rows[v], spot.columns[v], batch), limits)
