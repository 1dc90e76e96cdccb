"""Random numbers as operators of PyTorch. Each is one node of a graph, and not some hundred operations on integers.

`epifuse::philox_rand(seed, index)` and `epifuse::philox_rand_cpp` compute the primitives of the same names.
`epifuse::positions` numbers the elements of a shape. The operators have no gradient, because their inputs are integers.
"""

from __future__ import annotations

from typing import Any

import torch

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.providers.cpu.random import random_row

NAMES = tuple(name for name, row in PRIMITIVES.items() if row.rule == "random")


def drawn(name: str, seed: Any, index: Any) -> Any:
    """The value of the primitive `name`: by its operator, or a number if neither argument is a tensor."""
    tensors = [each for each in (seed, index) if isinstance(each, torch.Tensor)]
    if not tensors:
        return PRIMITIVES[name].on_host(seed, index)
    given = (each if isinstance(each, torch.Tensor) else _integer(each, tensors[0]) for each in (seed, index))
    return getattr(torch.ops.epifuse, name).default(*given)


def _integer(number: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), number, dtype=torch.int64, device=like.device)


def positions(shape: Any, device: torch.device) -> torch.Tensor:
    """The index of each element of `shape`, counted row by row, as an int32 tensor of that shape."""
    return torch.ops.epifuse.positions.default(list(shape), device=device)  # type: ignore[no-any-return]  # a tensor


def _on_cpu(name: str) -> Any:
    row = random_row(name)

    def run(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return row(seed, index, out=_like(seed, index))

    return run


def _like(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(seed.shape, index.shape)  # type: ignore[no-untyped-call]  # untyped
    return torch.empty(shape, dtype=torch.float32, device=index.device)


def _counted(size: list[int], device: torch.device | None = None) -> torch.Tensor:
    if device is not None and torch.device(device).type == "meta":  # sizes may be symbols: no arange
        return torch.empty(size, dtype=torch.int32, device=device)
    count = 1
    for extent in size:
        count *= extent
    return torch.arange(count, dtype=torch.int32, device=device).reshape(size)


def _define() -> Any:
    library: Any = torch.library.Library("epifuse", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped
    for name in NAMES:
        library.define(f"{name}(Tensor seed, Tensor index) -> Tensor")
        library.impl(name, PRIMITIVES[name].meaning, "CompositeExplicitAutograd")
        library.impl(name, PRIMITIVES[name].meaning, "FuncTorchBatchedDecomposition")
        library.impl(name, _on_cpu(name), "CPU")
        library.impl(name, _like, "Meta")  # FakeTensors use this kernel too
    library.define("positions(SymInt[] size, *, Device? device=None) -> Tensor")
    for key in ("CompositeExplicitAutograd", "BackendSelect"):
        library.impl("positions", _counted, key)
    return library


LIBRARY = _define()
"""The operators stay registered as long as this object exists."""
