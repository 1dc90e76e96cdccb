"""What a provider is: five functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from epifuse.ir import Graph
from epifuse.plan import Answer, KernelSpec, Plan
from epifuse.problem import Problem

Step = Callable[[], None]
"""Launches, onto what it was bound to."""

WORKSPACE = ""
"""The name, no identifier, of a caller's workspace among the operands; without it a launch makes its own."""

Runner = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any], Mapping[str, torch.Tensor]], Step]
"""Binds A, B, operands (tensors and numbers) by name and destinations by name; writes nothing yet."""


class Provider(Protocol):
    """A family of kernels."""

    name: str

    def available(self) -> str | None:
        """None where the provider can build, else what is missing and how to install it. Planning does not ask."""

    def specs(self) -> tuple[KernelSpec, ...]:
        """Its kernels."""

    def lower(self, graph: Graph, problem: Problem) -> Any:
        """What its kernels need of a typed graph, whatever the extents. Pure; called once a structure."""

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Problem) -> Sequence[Answer]:
        """Whether each of its kernels `specs` carries what was lowered, for these extents, in their order.

        Pure; needs neither toolchain nor device.
        """

    def build(self, plan: Plan) -> Runner:
        """Compile."""
