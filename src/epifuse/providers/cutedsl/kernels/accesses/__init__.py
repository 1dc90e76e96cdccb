"""The accesses of a kernel: the class for each way in which operands or outputs travel (`ways.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from epifuse.providers.cutedsl.kernels.accesses.coalesced import CoalescedStores
from epifuse.providers.cutedsl.kernels.accesses.direct import DirectLoads, DirectStores
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Loads, Stores
from epifuse.providers.cutedsl.kernels.accesses.line import Lines
from epifuse.providers.cutedsl.kernels.accesses.scalar import Scalars
from epifuse.providers.cutedsl.kernels.accesses.tile import TileLoads, TileStores
from epifuse.providers.cutedsl.kernels.accesses.vector import Vectors
from epifuse.providers.cutedsl.kernels.accesses.wide import WideStores

LOADS: Mapping[str, type[Loads]] = {
    "scalar": Scalars,
    "tile": TileLoads,
    "row": Vectors,
    "column": Vectors,
    "direct": DirectLoads,
}
STORES: Mapping[str, type[Stores]] = {
    "tile": TileStores,
    "direct": DirectStores,
    "coalesced": CoalescedStores,
    "wide": WideStores,
    "line": Lines,
    "segment": Lines,
}
