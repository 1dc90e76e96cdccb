"""What a kernel can do, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of one provider.

    - `device`: "cuda", or "cpu" for a kernel that the CPU runs, whose `ccs` are (0,).
    - `ccs`: the compute capabilities, times ten, that it is for.
    - `design`: its variant within the provider, such as its tile, cluster and schedule.
    - `never_on`: those of `ccs` for which it is compiled and on which it has never run.
    """

    name: str
    provider: str
    device: str
    ccs: tuple[int, ...]
    summary: str = ""
    design: Any = None
    never_on: tuple[int, ...] = ()
