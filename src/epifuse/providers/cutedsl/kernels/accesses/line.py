"""Outputs of one value a row, stored by the CTA at the row's start, or of one value a segment, stored by its CTA."""

from collections.abc import Sequence

import cutlass.cute as cute

from epifuse.ir import Node
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Stores, Team, Tile
from epifuse.providers.cutedsl.kernels.modes import element, store_inside
from epifuse.providers.cutedsl.kernels.slots import Places
from epifuse.providers.cutedsl.store_math import stored


class Lines(Stores):
    """Outputs whose values are known once their rows or segments are reduced."""

    def store_rows(self, nodes: Sequence[Node], places: Places, tile: Tile, team: Team) -> None:
        graph, given, rows = self.scene.program.graph, team.given, places.rows
        for i in self.members:
            node, access = graph.outputs[i].node, self.scene.program.stores[i]
            if node not in nodes:
                continue
            value = stored(tile.lines[node], graph.types[node].kind, access.dtype)
            fragment = cute.make_rmem_tensor((1, len(rows)), value.element_type)
            fragment.store(value.reshape((1, len(rows))))
            # Of the lanes that have the row or segment only one stores: that with rank 0.
            is_of_segments = "n" in access.axes
            start = places.rank if is_of_segments else tile.place.n + places.rank
            for slot, row in enumerate(rows):
                column = places.columns[slot] if is_of_segments else 0
                to = element(given.outputs[i], access, row, column, tile.place.l)
                at, limits = [row, start, tile.place.l], [given.shape[0], 1, given.shape[2]]
                if is_of_segments:
                    at, limits = [*at, column], [*limits, given.shape[1]]
                store_inside(fragment[None, slot], to, tuple(at), limits)
