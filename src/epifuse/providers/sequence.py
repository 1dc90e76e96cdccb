"""Launches in sequence: the runner of a plan whose parts each compute the product, one after the other.

What a part hands to later ones lies in the workspace, and behind it the workspace of the parts themselves, which do not
run at the same time. Imports nothing of any one provider.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from epifuse.passes.split_sweeps import Part
from epifuse.providers.base import WORKSPACE, Runner, Step
from epifuse.request.problem import Problem, TensorInfo

_ALIGNMENT = 16  # bytes: of what parts hand over, and of their own workspace


class Slot(NamedTuple):
    """Where in the workspace a value lies between the part that writes it and those that read it."""

    name: str
    start: int
    stop: int
    info: TensorInfo

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The value in this workspace."""
        return memory[self.start : self.stop].view(self.info.dtype).view(self.info.shape)


def slots(parts: Iterable[Part], problem: Problem) -> tuple[Slot, ...]:
    """One for each value that crosses from part to part, without gaps but for their alignment."""
    own = {name for name, _ in problem.operands}
    crossing = {n: i for part in parts for n, i in part.problem.operands if n not in own and isinstance(i, TensorInfo)}
    found: list[Slot] = []
    for name, info in crossing.items():
        start = _aligned(found[-1].stop) if found else 0
        found.append(Slot(name, start, start + math.prod(info.shape) * info.dtype.itemsize, info))
    return tuple(found)


def workspace_bytes(between: Sequence[Slot], parts: Iterable[int]) -> int:
    """Bytes of a launch whose parts need so many each."""
    return _behind(between) + max(parts)


def _behind(between: Sequence[Slot]) -> int:
    return _aligned(between[-1].stop) if between else 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def in_sequence(runners: Sequence[Runner], between: Sequence[Slot], size: int) -> Runner:
    """One runner of several, with `size` bytes of workspace."""

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
        # Its own for each launch: two streams may run the same step at once. Binding it anew costs some microseconds,
        # and what is launched is a product computed several times.
        return lambda: _run(steps(torch.empty(size, dtype=torch.uint8, device=a.device)))

    return bind


def _run(steps: Iterable[Step]) -> None:
    for step in steps:
        step()
