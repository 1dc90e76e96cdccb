"""What a kernel can do, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of one provider. `design` is what its provider chooses between: a tile, a cluster, a schedule."""

    name: str
    provider: str
    device: str
    ccs: tuple[int, ...]
    summary: str = ""
    design: Any = None
