"""The protocol of a provider: how it plans, what it builds, and what it compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from epifuse.ir import Graph
from epifuse.plan import Answers, KernelSpec, Plan
from epifuse.request.problem import Problem

Step = Callable[[], None]
"""A launch on the tensors that it was bound to."""

WORKSPACE = ""
"""The name of a caller's workspace among the operands. As it is no identifier, no operand has this name. Without a
workspace each launch allocates its own."""

Runner = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any], Mapping[str, torch.Tensor]], Step]
"""Binds A, B, the operands (tensors and numbers) by name and the destinations by name. Writes nothing yet.

A runner may have two further methods. `quick(names, outputs, b_is_transposed=)` returns a function of a sequence of A,
B (its transpose if `b_is_transposed`) and the operands of these names. That function allocates the outputs, launches
and returns them. `quick` returns None if a launch has to do more. `with_rows(rows)` returns the runner of the same
problem with another number of rows, or None if more than that number would change.
"""


@runtime_checkable
class Provider(Protocol):
    """A family of kernels. The methods that have a default suit kernels that need no compiling."""

    name: str
    scales_blocks: bool = False
    """Whether its kernels multiply partial sums by the scales of blocks, `problem.scales`. If not, the provider is not
    asked about problems with such scales."""

    def specs(self) -> tuple[KernelSpec, ...]:
        """Its kernels, the same objects each time."""
        ...

    def lacks(self, spec: KernelSpec) -> str | None:
        """What this machine lacks to build this kernel for any problem, or None. It starts no compiler."""
        return None

    def lower(self, graph: Graph, problem: Problem) -> Any:
        """What its kernels need to know of a typed graph, for any extents. Pure; called once for each structure."""
        return graph

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Problem) -> Answers:
        """Which of its kernels `specs` can run `work`, the result of `lower`, for these extents, and why others cannot.

        Every field of `problem.constraints` must be met or refused. Of all kernels for a target, the one with the least
        cost runs. On the CPU our kernels cost 0.5 and 1. On a GPU a cost is a time, in multiply-adds of 16 bits of one
        multiprocessor: seconds x `operations_a_second` / (2 x `multiprocessors`) of `problem.target.processor`. Pure;
        needs neither toolchain nor device.
        """
        ...

    def build(self, plan: Plan) -> Runner:
        """The runner of the plan. Compiles kernels that are not stored. Raises `UnsupportedError` if that fails."""
        ...

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        """The texts of the kernels that must be compiled for a plan. They are the same in every process."""
        return ()

    def is_loaded(self, text: str) -> bool:
        """Whether `build` finds the kernel of this text in memory."""
        return True

    def is_stored(self, text: str) -> bool:
        """Whether the compiled kernel of this text is on disk. `build` loads it from there in a few milliseconds."""
        return True

    def prepare(self) -> None:
        """Import what `compile` needs, which takes seconds. Raises `ImportError`."""

    def compile(self, text: str) -> None:
        """Compile the kernel of this text and store it, unless it is stored already. Raises what compiling raises."""
