"""What a kernel can do, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of one provider. `design` holds what its provider chooses between: tiles, clusters, schedules."""

    name: str
    provider: str
    device: str
    ccs: tuple[int, ...]
    summary: str = ""
    design: tuple[tuple[str, Any], ...] = field(default=())
