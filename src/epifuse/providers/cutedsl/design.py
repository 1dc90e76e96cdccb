"""A design: one way to run a GEMM, and how it divides a tile. Imports no cutlass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

SUBTILE = (64, 32)
"""What one warp group's epilogue works on at most: 16 values a thread. Taller would break the registers' order."""
WARP_GROUP, WARPS = 128, 4
"""Threads and warps of a warp group. Each warp has 16 rows of a subtile."""
MATH_GROUPS = 2
"""Warp groups that multiply."""
K_SPAN = 128
"""Bytes of K that lie together in shared memory, one swizzle pattern, whatever the dtype; half of it where tiles are
large beside shared memory."""

WGMMA, MMA_SYNC, TCGEN05 = "wgmma", "mma.sync", "tcgen05"
"""What multiplies, of which each has a kernel of its own."""
MULTISTAGE = "multistage"
"""The schedule of the kernel for mma.sync."""


class Rewriting(NamedTuple):
    """What a kernel of its own writes before A and B are multiplied.

    In how many `parts`: 3 of float32 in full, 1 where TMA cannot address them, or where B is of a `narrow` dtype beside
    A, in whose dtype it is written. A stays where it lies in the latter case, if TMA can address it: `of_a` says no.
    """

    parts: int
    of_a: bool = True
    narrow: torch.dtype | None = None


@dataclass(frozen=True)
class Design:
    """One way to run a GEMM: tile (m, n), cluster (m, n), schedule, stages, clusters along M in a raster band.

    Cooperative: two warp groups share a tile. Ping-pong: each has a tile of its own, and the epilogue of one runs
    beside the main loop of the other. A stage of A and B holds `spans` of 128 bytes along K. Stages of A and B, and
    those in which subtiles of operands arrive and subtiles of outputs leave; in how many stages of A and B operands of
    a CTA's last tile wait; how many 32-bit words of a row the CTAs of a cluster tell each other at once; registers of a
    thread that computes; of how many columns of the product one of the result is made, where the epilogue takes parts;
    whether A and B are `swapped`: tile and cluster are (n, m) of the result then, but in `designs.py`; in how many
    parts K is, each multiplied by a cluster of its own; after how many elements of K the tensor cores' sums are
    `promoted`, that is added up in float32: 0 where they add up all of K themselves; how A and B are `rewritten` before
    by a kernel of its own, if they are; whether it `converts` A, of 8 bits beside B of 16, in registers; whether A and
    B are `scaled` by blocks along K; which `instruction` multiplies; with mma.sync all threads copy A and B, of either
    so many elements at once as `copied` says; `span`: bytes of K in a span.
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
    span: int = K_SPAN

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def schedule(self) -> str:
        """Its name, as `Constraints.schedule` spells it."""
        if self.swapped:
            return "swapped"
        if self.by_warps or self.in_tensor_memory:
            return MULTISTAGE if self.by_warps else TCGEN05
        return "pingpong" if self.pingpong else "cooperative"

    def __str__(self) -> str:
        parts = f", K in {self.split} parts" if self.split > 1 else ""
        return f"{self.tile[0]}x{self.tile[1]} {self.schedule}, cluster {self.cluster[0]}x{self.cluster[1]}{parts}"

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
        """Whether its kernel brings A and B alone by TMA, if that, and has one region of N and no CTAs that share rows:
        each but Hopper's."""
        return self.instruction != WGMMA

    @property
    def in_pairs(self) -> bool:
        """Whether two CTAs, one below the other, multiply together, so that each brings half of B's columns."""
        return self.in_tensor_memory and self.ctas > 1

    @property
    def overlaps(self) -> bool:
        """Whether a launch may start while the one before ends, of which GPUs before Hopper know nothing."""
        return not self.by_warps

    @property
    def sharing(self) -> int:
        """Warp groups that share a tile."""
        return 1 if self.pingpong else MATH_GROUPS

    @property
    def rows(self) -> int:
        """Rows of a tile that one warp group has."""
        return self.tile[0] // self.sharing

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
        """What one warp group's epilogue works on at once."""
        return SUBTILE[0], min(SUBTILE[1], self.columns)

    @property
    def subtiles(self) -> int:
        """Subtiles of the result that one warp group has in one tile."""
        return self.rows // SUBTILE[0] * (self.columns // self.subtile[1])

    @property
    def exchanged_sides(self) -> Design:
        """The same with rows for columns: of the result for of the kernel's own product, and back."""
        return replace(self, tile=self.tile[::-1], cluster=self.cluster[::-1])


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple
