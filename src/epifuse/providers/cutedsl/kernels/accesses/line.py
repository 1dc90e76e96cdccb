"""Outputs of one value a row, where a cluster holds whole rows: the CTA at the row's start stores them."""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute

from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Stores, Team, Tile
from epifuse.providers.cutedsl.kernels.modes import element, store_inside
from epifuse.providers.cutedsl.store_math import stored


class Lines(Stores):
    """Outputs whose values are known once their rows are reduced."""

    def store_rows(self, rows: Sequence[Any], tile: Tile, team: Team) -> None:
        graph, given = self.scene.program.graph, team.given
        for i in self.members:
            node, access = graph.outputs[i].node, self.scene.program.stores[i]
            value = stored(tile.lines[node], graph.types[node].kind, access.dtype)
            fragment = cute.make_rmem_tensor((1, len(rows)), value.element_type)
            fragment.store(value.reshape((1, len(rows))))
            # One lane of those that share the row.
            start = tile.place.n + self.scene.fragment.rank(cute.arch.lane_idx())
            for slot, row in enumerate(rows):
                to = element(given.outputs[i], access, row, 0, tile.place.l)
                limits = [given.shape[0], 1, given.shape[2]]
                store_inside(fragment[None, slot], to, (row, start, tile.place.l), limits)
