"""A design: one way to run a GEMM, and how it divides a tile. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

SUBTILE = (64, 32)
"""The largest subtile (rows, columns) of a warp group's epilogue: 16 values a thread. A taller one would not follow the
order of the accumulator's registers."""
WARP_GROUP, WARPS = 128, 4
"""Threads and warps of a warp group. Each warp has 16 rows of a subtile."""
MATH_GROUPS = 2
"""Warp groups that multiply."""
K_SPAN = 128
"""Bytes of K that lie together in shared memory for every dtype: the width of one swizzle pattern.
`multistage.with_copies` says where it is half as much."""

WGMMA, MMA_SYNC, TCGEN05 = "wgmma", "mma.sync", "tcgen05"
"""The instructions that multiply. Each has a kernel of its own."""
MULTISTAGE = "multistage"
"""The schedule of the kernel for mma.sync."""


class Rewriting(NamedTuple):
    """How a first kernel writes A, B or both anew, before they are multiplied. `inputs.rewritten` chooses it.

    `parts` is 3 for float32 in full, and 1 for a copy that TMA can address, or for a conversion of B to A's dtype.
    `narrow` is the dtype of B before such a conversion, else None. `of_a` and `of_b` say which is written: what TMA
    can address stays where it is. Where A and B are exchanged, they are those of the exchanged product.
    """

    parts: int
    of_a: bool = True
    of_b: bool = True
    narrow: torch.dtype | None = None


@dataclass(frozen=True)
class Design:
    """One way to run a GEMM: a `tile` (m, n), a `cluster` (m, n), a schedule, and what follows from the problem.

    - `pingpong`: each of the two consumer warp groups has a tile of its own, and the epilogue of one runs beside the
      main loop of the other. Otherwise (cooperative) both share one tile.
    - `spans`: spans of `span` bytes along K in a stage of A and B.
    - `stages`, `load_stages`, `store_stages`: stages of A and B, of subtiles of operands, of subtiles of outputs.
    - `spare`: stages of A and B into which the operands of a CTA's last tile are loaded early.
    - `exchanged`: 32-bit words of a row that the CTAs of a cluster send to each other in one exchange.
    - `registers`: registers of a thread of a consumer warp group.
    - `raster`: clusters in a raster band, along M, or along N if `bands_along_n`.
    - `parts`: columns of the product from which one column of the result is computed, where the epilogue takes parts.
    - `swapped`: A and B are exchanged. Tile and cluster are then (n, m) of the result; `designs.py` lists (m, n).
    - `split`: parts of K, each of which a cluster of its own multiplies.
    - `promoted`: how many products along K the tensor cores add up before their sum is added in float32 (promoted); 0
      where the tensor cores add up all of K.
    - `rewritten`: how a first kernel writes A and B anew; None where none does.
    - `converts`: A has 8 bits and B 16, and A is converted in registers.
    - `scaled`: whether A, and whether B, has block scales along K.
    - `instruction`: the instruction that multiplies.
    - `copied`: with mma.sync, elements of A and of B that a thread copies at once.
    - `abreast`: with mma.sync, how many tiles side by side a CTA has at once; of two, each warp group has one.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool
    spans: int = 1
    stages: int = 0
    load_stages: int = 0
    store_stages: int = 0
    spare: int = 0
    exchanged: int = 0
    registers: int = 0
    raster: int = 0
    parts: int = 1
    swapped: bool = False
    split: int = 1
    promoted: int = 0
    rewritten: Rewriting | None = None
    converts: bool = False
    scaled: tuple[bool, bool] = (False, False)
    instruction: str = WGMMA
    copied: tuple[int, int] = (0, 0)
    abreast: int = 1
    span: int = K_SPAN

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def rewritten_as_given(self) -> Rewriting | None:
        """How the first kernel writes A and B as they are handed over, before they are exchanged."""
        how = self.rewritten
        return how._replace(of_a=how.of_b, of_b=how.of_a) if how is not None and self.swapped else how

    @property
    def schedule(self) -> str:
        """The name of the schedule, as `Constraints.schedule` spells it."""
        if self.swapped:
            return "swapped"
        if self.by_warps or self.in_tensor_memory:
            return MULTISTAGE if self.by_warps else TCGEN05
        return "pingpong" if self.pingpong else "cooperative"

    def __str__(self) -> str:
        parts = f", K in {self.split} parts" if self.split > 1 else ""
        abreast = f", {self.abreast} tiles abreast" if self.abreast > 1 else ""
        (m, n), (cm, cn) = self.tile, self.cluster
        return f"{m}x{n} {self.schedule}, cluster {cm}x{cn}{abreast}{parts}"

    @property
    def by_warps(self) -> bool:
        """Whether each warp multiplies by mma.sync."""
        return self.instruction == MMA_SYNC

    @property
    def in_tensor_memory(self) -> bool:
        """Whether sums lie in tensor memory, and not in the registers of the threads that run the epilogue."""
        return self.instruction == TCGEN05

    @property
    def is_simple(self) -> bool:
        """Whether its kernel uses TMA for A and B at most, and has neither several regions of N nor CTAs that share
        rows. This holds for every kernel but Hopper's."""
        return self.instruction != WGMMA

    @property
    def in_pairs(self) -> bool:
        """Whether two CTAs, one below the other, multiply together, so that each brings half of B's columns."""
        return self.in_tensor_memory and self.ctas > 1

    @property
    def overlaps(self) -> bool:
        """Whether a launch may start while the one before it ends, which GPUs before Hopper cannot do."""
        return not self.by_warps

    @property
    def brought(self) -> tuple[int, int]:
        """Rows of A and columns of B in a stage."""
        return self.tile[0], self.tile[1] * self.abreast

    @property
    def step(self) -> tuple[int, int]:
        """Rows and columns of the result that a cluster computes at once."""
        return self.tile[0] * self.cluster[0], self.columns * self.abreast * self.cluster[1]

    @property
    def sharing(self) -> int:
        """Warp groups that share a tile."""
        return 1 if self.pingpong or self.abreast > 1 else MATH_GROUPS

    @property
    def height(self) -> int:
        """Rows that are multiplied for a tile. wgmma multiplies at least 64, even for a tile of fewer rows."""
        return round_up(self.tile[0], SUBTILE[0])

    @property
    def is_low(self) -> bool:
        """Whether a tile has fewer rows than are multiplied for it. Asked of a design with `exchanged_sides`."""
        return self.tile[0] < self.height

    @property
    def rows(self) -> int:
        """Rows of a tile that one warp group multiplies."""
        return self.height // self.sharing

    @property
    def for_few_rows(self) -> bool:
        """Whether A and B are exchanged and a side of the tile is at most 64, the fewest rows that wgmma multiplies."""
        return self.swapped and min(self.tile) <= SUBTILE[0]

    @property
    def k_bytes(self) -> int:
        """Bytes of K in a stage of A and B."""
        return self.spans * self.span

    @property
    def columns(self) -> int:
        """Columns of the result in one tile."""
        return self.tile[1] // self.parts

    @property
    def subtile(self) -> tuple[int, int]:
        """Rows and columns that one warp group's epilogue works on at once."""
        return SUBTILE[0], SUBTILE[1] // (2 if self.has_narrow_subtiles else 1)

    @property
    def has_narrow_subtiles(self) -> bool:
        """Whether subtiles have 16 columns instead of 32, because 32 do not divide the columns of the tile."""
        return self.columns % SUBTILE[1] != 0

    @property
    def subtiles(self) -> int:
        """How many subtiles of the result one warp group has in one tile."""
        return self.rows // SUBTILE[0] * (self.columns // self.subtile[1])

    @property
    def bands_along_n(self) -> bool:
        """Whether raster bands lie along N. CTAs of a tall cluster share B only, so clusters next to each other in the
        order should have the same rows of A."""
        return self.instruction == WGMMA and self.cluster[0] > self.cluster[1]

    @property
    def exchanged_sides(self) -> Design:
        """The design with rows and columns of tile and cluster exchanged: from (m, n) of the result to those of the
        kernel's own product, or back."""
        return replace(self, tile=self.tile[::-1], cluster=self.cluster[::-1])


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
