"""What a provider is: how it plans, how it builds, and what it compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from epifuse.ir import Graph
from epifuse.plan import Answers, KernelSpec, Plan
from epifuse.request.problem import Problem

Step = Callable[[], None]
"""Launches, onto what it was bound to."""

WORKSPACE = ""
"""The name, no identifier, of a caller's workspace among the operands; without it a launch makes its own."""

Runner = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any], Mapping[str, torch.Tensor]], Step]
"""Binds A, B, operands (tensors and numbers) by name and destinations by name; writes nothing yet.

One may have `quick(names, outputs, turned=)` too. It makes a function of a sequence of A, B (or its transpose) and the
operands of these names, which allocates the outputs, launches and returns them; it makes none where a launch does more.
And `with_rows(rows)`, which makes the same of a problem that differs in its rows alone, or None where more does.
"""


@runtime_checkable
class Provider(Protocol):
    """A family of kernels. The methods that have a default suit kernels that need no compiling."""

    name: str
    scales_blocks: bool = False
    """Whether its kernels multiply partial sums by the scales of blocks, `problem.scales`. Where they do not, they are
    not asked about problems that have some."""

    def specs(self) -> tuple[KernelSpec, ...]:
        """Its kernels, the same objects each time."""
        ...

    def lacks(self, spec: KernelSpec) -> str | None:
        """What this machine lacks to build this kernel, whatever it is asked for, or None. It starts no compiler."""
        return None

    def lower(self, graph: Graph, problem: Problem) -> Any:
        """What its kernels need of a typed graph, whatever the extents. Pure; called once a structure."""
        return graph

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Problem) -> Answers:
        """Which of its kernels `specs` carry what was lowered, for these extents, and why the others do not.

        Every field of `problem.constraints` is met or refused. Of all kernels of a target the one of the least cost
        runs. On the CPU ours cost 0.5 and 1. On a GPU a cost is a time, in multiply-adds of 16 bits of one
        multiprocessor: seconds x `operations_a_second` / (2 x `multiprocessors`) of `problem.target.processor`. Pure;
        needs neither toolchain nor device.
        """
        ...

    def build(self, plan: Plan) -> Runner:
        """What runs the plan, compiled where its kernels are not stored. Raises `UnsupportedError` where that fails."""
        ...

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        """The texts of the kernels that a plan has to have compiled; the same in every process."""
        return ()

    def is_loaded(self, text: str) -> bool:
        """Whether `build` finds the kernel of this text in memory."""
        return True

    def is_stored(self, text: str) -> bool:
        """Whether the kernel of this text is on disk, from where `build` loads it in a few milliseconds."""
        return True

    def prepare(self) -> None:
        """Import what `compile` needs, which takes seconds. Raises `ImportError`."""

    def compile(self, text: str) -> None:
        """Store the kernel of this text, compiled where there is none. Raises what compiling raises."""
