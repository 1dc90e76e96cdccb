"""What discovery returns: a kernel that can be asked, compiled, bound and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from epifuse import providers
from epifuse.arguments import GemmArguments, check_arguments, target_of
from epifuse.dynamo import outside_graph
from epifuse.errors import fail, kind_of
from epifuse.plan import KernelSpec, Plan, Refusal, select
from epifuse.providers import Runner
from epifuse.runtime import cache
from epifuse.runtime.launch import launch, prepare


@dataclass(frozen=True)
class Status:
    """The outcome of a check: true on success, else `error` says why."""

    error: Exception | None = None

    def __bool__(self) -> bool:
        return self.error is None

    def __str__(self) -> str:
        return "ok" if self.error is None else str(self.error)

    def raise_on_error(self) -> None:
        """Raise `error`, if there is one."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class CompiledArtifact:
    """A plan and what it was built into. Serves every launch whose arguments give the same plan."""

    plan: Plan
    runner: Runner = field(repr=False)
    kernel: Kernel = field(repr=False)


@dataclass(frozen=True)
class Metadata:
    """What a kernel is: for `metadata_filter` and for people."""

    kernel_name: str
    provider: str
    target: str
    min_cc: int
    tile_shape: tuple[int, int]
    digest: str


@dataclass(frozen=True)
class Kernel:
    """One kernel that supports the arguments it was discovered with; other shapes and numbers are planned anew."""

    spec: KernelSpec
    plan: Plan

    @property
    def metadata(self) -> Metadata:
        """Name, provider, target and design."""
        plan = self.plan
        tile = plan.allocation.tile
        return Metadata(
            self.spec.name, self.spec.provider, plan.problem.target.name, self.spec.ccs[0], tile, plan.digest
        )

    def plan_for(self, args: GemmArguments) -> Plan | Refusal:
        """This kernel's plan for `args`, or why it has none."""
        check_arguments(self.spec.name, args)
        problem = replace(args.problem, target=self.plan.problem.target)
        if problem == self.plan.problem and args.graph is self.plan.graph:
            return self.plan
        selection = select(args.graph, problem, [(self.spec, providers.load(self.spec.provider).supports)])
        return selection.plans[0] if selection.plans else selection.refusals[0]

    @outside_graph
    def supports(self, args: GemmArguments) -> Status:
        """Whether `args` can run on this kernel."""
        plan = self.plan_for(args)
        if isinstance(plan, Plan):
            return Status()
        return Status(fail("not_supported", None, kernel=self.spec.name, reason=plan.reason))

    @outside_graph
    def compile(self, args: GemmArguments) -> CompiledArtifact:
        """Build for `args`; needs their shapes and dtypes, not their data. Raises `UnsupportedError`."""
        plan = self.plan_for(args)
        if isinstance(plan, Refusal):
            raise fail("not_supported", None, kernel=self.spec.name, reason=plan.reason)
        return CompiledArtifact(plan, cache.get_or_build(plan), self)

    @outside_graph
    def get_workspace_size(self, args: GemmArguments) -> int:
        """Bytes of workspace a launch needs."""
        return self.compile(args).plan.allocation.workspace_bytes

    @outside_graph
    def run(
        self,
        args: GemmArguments,
        compiled_artifact: CompiledArtifact | None = None,
        stream: Any = None,
        workspace: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Launch once and return the outputs by name; those without a destination are allocated.

        `stream` is the device's current one unless given; the CPU has none. Raises `UnsupportedError` and
        `ArgumentError`, before anything is written.
        """
        artifact = self._artifact(args, compiled_artifact)
        self._check_workspace(artifact.plan, workspace)
        outputs = args.allocate()
        launch(artifact.runner, args, outputs)
        return outputs

    @outside_graph
    def bind(self, args: GemmArguments) -> Callable[[], dict[str, torch.Tensor]]:
        """Everything decided: each call of the result only launches, onto the same outputs and numbers."""
        artifact = self._artifact(args, None)
        outputs = args.allocate()
        step = prepare(artifact.runner, args, outputs)

        @outside_graph
        def run() -> dict[str, torch.Tensor]:
            step()
            return outputs

        return run

    def _artifact(self, args: GemmArguments, given: CompiledArtifact | None) -> CompiledArtifact:
        check_arguments(self.spec.name, args)
        if not isinstance(given, (CompiledArtifact, type(None))):
            want = "what its compile() returned as compiled_artifact"
            raise fail("wrong_arguments", None, function=self.spec.name, want=want, type=kind_of(given))
        target = self.plan.problem.target
        if target_of(args.A) != target:
            raise fail("kernel_device", None, kernel=self.spec.name, target=target.name, device=args.A.device)
        made = self.compile(args)
        if given is not None and given.plan != made.plan:
            raise fail("artifact", None, why=_difference(given.plan, made.plan))
        return made

    def _check_workspace(self, plan: Plan, workspace: torch.Tensor | None) -> None:
        need = plan.allocation.workspace_bytes
        if workspace is None:
            return
        if not isinstance(workspace, torch.Tensor) or workspace.numel() * workspace.element_size() < need:
            raise fail("workspace", None, want=f"a tensor of at least {need} bytes")
        if str(workspace.device) != plan.problem.a.device:
            raise fail("workspace", None, want=f"on {plan.problem.a.device}")


def _difference(given: Plan, needed: Plan) -> str:
    """What the artifact is for, and what it would have to be for."""
    pairs = ((given.problem.describe(), needed.problem.describe()), (given.digest[:12], needed.digest[:12]))
    differing = [f"{one}, not {other}" for one, other in pairs if one != other]
    return "; ".join(differing) or "other strides, dtypes or names of operands and outputs"
