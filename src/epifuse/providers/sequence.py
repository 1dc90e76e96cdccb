"""Launches in sequence: the runner of a plan with several parts, which each compute the product, one after the other.

Values that a part passes to later parts lie in the workspace. Behind them lies the workspace of the parts themselves,
which they share because they do not run at the same time. This module imports no provider.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from epifuse.passes.split_sweeps import SweepPart
from epifuse.providers.base import WORKSPACE, Runner, Step
from epifuse.request.problem import Problem, TensorInfo

_ALIGNMENT = 16  # bytes: of the values that parts pass on, and of the parts' own workspace


class Slot(NamedTuple):
    """Where in the workspace a value lies between the part that writes it and those that read it, in bytes."""

    name: str
    start: int
    stop: int
    info: TensorInfo

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The value as a view of this workspace."""
        return memory[self.start : self.stop].view(self.info.dtype).view(self.info.shape)


def slots(parts: Iterable[SweepPart], problem: Problem) -> tuple[Slot, ...]:
    """One slot for each value that a part passes to another. Gaps between slots only align them."""
    own = {name for name, _ in problem.operands}
    crossing = {n: i for part in parts for n, i in part.problem.operands if n not in own and isinstance(i, TensorInfo)}
    found: list[Slot] = []
    for name, info in crossing.items():
        start = _aligned(found[-1].stop) if found else 0
        found.append(Slot(name, start, start + math.prod(info.shape) * info.dtype.itemsize, info))
    return tuple(found)


def workspace_bytes(between: Sequence[Slot], parts: Iterable[int]) -> int:
    """Bytes of workspace of a launch. `parts` are the bytes that each part needs for itself."""
    return _behind(between) + max(parts)


def _behind(between: Sequence[Slot]) -> int:
    return _aligned(between[-1].stop) if between else 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def in_sequence(runners: Sequence[Runner], between: Sequence[Slot], size: int) -> Runner:
    """One runner that runs `runners` in turn, with `size` bytes of workspace."""

    def bind(
        a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Step:
        def steps(memory: torch.Tensor) -> list[Step]:
            held = {slot.name: slot.view(memory) for slot in between}
            read = {**operands, **held, WORKSPACE: memory[_behind(between) :]}
            written = {**outputs, **held}
            return [runner(a, b, read, written) for runner in runners]

        if (given := operands.get(WORKSPACE)) is not None:
            bound = steps(given.view(-1).view(torch.uint8)[:size])
            return lambda: _run(bound)
        # Each launch has its own workspace, because two streams may run the same step at once. Binding it again costs
        # some microseconds, which is little beside a product that is computed several times.
        return lambda: _run(steps(torch.empty(size, dtype=torch.uint8, device=a.device)))

    return bind


def _run(steps: Iterable[Step]) -> None:
    for step in steps:
        step()
