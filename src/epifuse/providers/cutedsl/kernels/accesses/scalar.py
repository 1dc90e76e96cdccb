"""Scalars: one load a tile, kept in a register."""

from typing import Any

import cutlass.cute as cute

from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Given, Loads, Spot, Team, Tile
from epifuse.providers.cutedsl.kernels.place import Place
from epifuse.providers.cutedsl.kernels.slots import Places


class Scalars(Loads):
    """Operands that vary over batches at most."""

    def fetch(self, place: Place, thread: Any, given: Given) -> dict[int, Any]:
        return {i: given.tensors[i][0, 0, place.l].to(self.scene.held(i)) for i in self.members}

    def visit(self, i: int, like: Any, spot: Spot, tile: Tile, team: Team) -> Any:
        return cute.full_like(like, tile.held[i], self.scene.held(i))

    def rows(self, i: int, like: Any, places: Places, tile: Tile, team: Team) -> Any:
        return cute.full_like(like, tile.held[i], self.scene.held(i))
