"""What a kernel can do, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of one provider.

    - `device`: "cuda", or "cpu" for a kernel that the CPU runs, whose `ccs` are (0,).
    - `ccs`: the compute capabilities, times ten, that it is for.
    - `design`: what its provider chooses between: a tile, a cluster, a schedule.
    - `never_on`: those of `ccs` on which it has never run: it is compiled for them.
    """

    name: str
    provider: str
    device: str
    ccs: tuple[int, ...]
    summary: str = ""
    design: Any = None
    never_on: tuple[int, ...] = ()
