"""What a provider is: four functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from epifuse.ir import Graph
from epifuse.plan import Allocation, KernelSpec, Plan, Refusal
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
        """None where the provider can plan, else what is missing and how to install it."""

    def specs(self) -> tuple[KernelSpec, ...]:
        """Its kernels."""

    def supports(self, spec: KernelSpec, graph: Graph, problem: Problem) -> Allocation | Refusal:
        """Pure; needs neither the toolchain nor the device."""

    def build(self, plan: Plan) -> Runner:
        """Compile."""
