"""The report of the compiler's pass: for each product of a model, whether it was fused and why not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from epifuse.base.dtypes import short


class Times(NamedTuple):
    """Measured seconds of a product with what Inductor computes in loops around it: `fused` with the epilogue in the
    product's kernel, `apart` by Inductor alone."""

    fused: float
    apart: float

    def __str__(self) -> str:
        saved = (self.apart - self.fused) * 1e6
        return f"{self.fused * 1e6:.3g} us, apart {self.apart * 1e6:.3g} us: {saved:+.3g} us saved"


@dataclass(frozen=True)
class Row:
    """One product: where it is, which operations its epilogue took in, and why no more.

    `graph` is "forward" or "backward", `shape` that of the product, `k` its inner extent. `taken` are the operations in
    its epilogue. `left` are the operations next to it that are not, each with the reason. `reason` says why the product
    is not fused at all. `bytes_saved` and `seconds_saved` are predicted. `measured` is None unless measuring was asked
    for.
    """

    graph: str
    name: str
    operation: str
    shape: tuple[int, ...]
    k: int
    dtype: torch.dtype
    taken: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    outputs: int = 0
    bytes_saved: int = 0
    seconds_saved: float = 0.0
    plan: str = ""
    measured: Times | None = None

    @property
    def fused(self) -> bool:
        """Whether a kernel of epifuse computes the product."""
        return bool(self.plan)

    def __str__(self) -> str:
        shape = " x ".join(map(str, (*self.shape, self.k)))
        lines = [f"{self.graph:8} {self.name}: {self.operation} {shape} {short(self.dtype)}"]
        if self.fused:
            outputs = "1 output" if self.outputs == 1 else f"{self.outputs} outputs"
            lines.append(f"  took     {counted(self.taken) or 'nothing'}; {outputs}, by {self.plan}")
            lines.append(f"  saves    {self.bytes_saved / 1e6:.3g} MB, {self.seconds_saved * 1e6:.3g} us (predicted)")
        else:
            lines.append(f"  left to PyTorch: {self.reason}")
        if self.measured is not None:
            lines.append(f"  measured {self.measured}")
        lines += [f"  beside   {name}: {reason}" for name, reason in self.left]
        return "\n".join(lines)


def counted(names: tuple[str, ...]) -> str:
    """A text such as `mul (3), add`: each name once, with its count if it occurs several times."""
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())


_NO_PRODUCT = "no product: its graphs have no mm, addmm, bmm or baddbmm; convolutions are not looked at"
_NO_GRAPH = (
    "no graph yet: the model has not run, its graphs came from PyTorch's cache or were compiled for an equal model, "
    "PyTorch ran it uncompiled (TORCH_LOGS=graph_breaks says why), or a torch.compile around it compiled them"
)


@dataclass
class Report:
    """Every product that the pass met, in order, and the number of graphs it ran on. `print` shows the report."""

    rows: list[Row] = field(default_factory=list)
    graphs: int = 0

    @property
    def fused(self) -> list[Row]:
        """The products that run with an epilogue."""
        return [row for row in self.rows if row.fused]

    def __str__(self) -> str:
        if not self.rows:
            return _NO_PRODUCT if self.graphs else _NO_GRAPH
        saved = sum(row.bytes_saved for row in self.fused)
        head = f"{len(self.fused)} of {len(self.rows)} products run with an epilogue, {saved / 1e6:.3g} MB saved"
        return "\n".join([head, *map(str, self.rows)])
