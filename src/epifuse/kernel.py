"""What discovery returns: a kernel that can be asked, compiled, bound and run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from epifuse import providers
from epifuse.arguments import GemmArguments, check_arguments, target_of
from epifuse.dynamo import outside_graph
from epifuse.errors import fail, kind_of
from epifuse.plan import KernelSpec, Plan, Refusal, select
from epifuse.providers import WORKSPACE, Runner
from epifuse.runtime import cache
from epifuse.runtime.launch import Recipe, bind, require_data


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

    @cached_property
    def recipe(self) -> Recipe:
        """How such arguments are launched."""
        return Recipe.of(self.plan, self.runner)

    def fits(self, args: GemmArguments) -> bool:
        """Whether `args` need this very plan; False may still be an equal one."""
        return args.graph is self.plan.graph and args.problem == self.plan.problem


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
        selection = select(args.structure, problem, [(self.spec, providers.load(self.spec.provider))])
        return selection.plans[0] if selection.plans else selection.refusals[0]

    @outside_graph
    def supports(self, args: GemmArguments) -> Status:
        """Whether `args` can run on this kernel."""
        plan = self.plan_for(args)
        if isinstance(plan, Plan):
            return Status()
        return Status(fail("not_supported", plan.loc, kernel=self.spec.name, reason=plan.reason))

    @outside_graph
    def compile(self, args: GemmArguments) -> CompiledArtifact:
        """Build for `args`; needs their shapes and dtypes, not their data. Raises `UnsupportedError`."""
        plan = self._plan(args)
        return CompiledArtifact(plan, cache.get_or_build(plan), self)

    @outside_graph
    def get_workspace_size(self, args: GemmArguments) -> int:
        """Bytes of workspace a launch needs. Compiles nothing. Raises `UnsupportedError`."""
        return self._plan(args).allocation.workspace_bytes

    def _plan(self, args: GemmArguments) -> Plan:
        plan = self.plan_for(args)
        if isinstance(plan, Refusal):
            raise fail("not_supported", plan.loc, kernel=self.spec.name, reason=plan.reason)
        return plan

    @outside_graph
    def run(
        self,
        args: GemmArguments,
        compiled_artifact: CompiledArtifact | None = None,
        stream: Any = None,
        workspace: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Launch once and return the outputs by name; those without a destination are allocated.

        `stream` is the device's current one unless given, as a `torch.cuda.Stream` or a raw handle; the CPU has none.
        `workspace` is a contiguous tensor of `get_workspace_size` bytes at least, on A's device, whose content is lost;
        each launch that may run at the same time as another needs its own. A launch without one allocates it.
        Raises `UnsupportedError` and `ArgumentError`, before anything is written.
        """
        ready = _ready.get(args) if isinstance(args, GemmArguments) else None
        if ready is None or not ready.serves(self, compiled_artifact):
            ready = self._prepared(args, compiled_artifact)
        launch = ready.launch
        if workspace is not None:
            self._check_workspace(ready.plan, workspace)
            launch = _launcher(self._artifact(args, compiled_artifact).recipe, args, {WORKSPACE: workspace})
        if stream is None:
            return launch()
        with _current(stream, args.A.device):
            return launch()

    @outside_graph
    def bind(self, args: GemmArguments) -> Callable[[], dict[str, torch.Tensor]]:
        """Everything decided: each call of the result only launches, onto the same memory and numbers."""
        artifact = self._artifact(args, None)
        outputs = args.allocate()
        step = bind(artifact.recipe, args, outputs)

        @outside_graph
        def run() -> dict[str, torch.Tensor]:
            step()
            return outputs

        return run

    def _prepared(self, args: GemmArguments, given: CompiledArtifact | None) -> _Ready:
        artifact = self._artifact(args, given)
        require_data((("A", args.A), ("B", args.B), *args.epilogue.tensors.items()))
        tensors = (args.A, args.B, *filter(torch.is_tensor, args.epilogue.tensors.values()))
        addresses = [tensor.data_ptr() for tensor in tensors]
        ready = _Ready(self, given, artifact.plan, tensors, addresses, _launcher(artifact.recipe, args))
        _ready[args] = ready
        return ready

    def _artifact(self, args: GemmArguments, given: CompiledArtifact | None) -> CompiledArtifact:
        check_arguments(self.spec.name, args)
        if not isinstance(given, (CompiledArtifact, type(None))):
            want = "what its compile() returned as compiled_artifact"
            raise fail("wrong_arguments", None, function=self.spec.name, want=want, type=kind_of(given))
        if given is not None and given.kernel is self and given.fits(args):
            return given
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
        if not workspace.is_contiguous() or workspace.data_ptr() % 16:
            raise fail("workspace", None, want="contiguous, and to start at a multiple of 16 bytes")


class _Ready(NamedTuple):
    """Arguments checked, planned and bound for a kernel: good while their memory stays where it is."""

    kernel: Kernel
    given: CompiledArtifact | None
    plan: Plan
    tensors: tuple[torch.Tensor, ...]
    addresses: list[int]
    launch: Callable[[], dict[str, torch.Tensor]]

    def serves(self, kernel: Kernel, given: CompiledArtifact | None) -> bool:
        """Whether nothing has changed since."""
        same = self.kernel is kernel and self.given is given
        return same and self.addresses == [tensor.data_ptr() for tensor in self.tensors]


_ready: weakref.WeakKeyDictionary[GemmArguments, _Ready] = weakref.WeakKeyDictionary()
"""By arguments, so that running them again costs no more than to launch."""


def _launcher(
    recipe: Recipe, args: GemmArguments, further: Mapping[str, torch.Tensor] | None = None
) -> Callable[[], dict[str, torch.Tensor]]:
    """Launches onto the destinations given, or each time onto new ones where some are not."""
    a, b, numbers = args.A, args.B, args.numbers
    tensors = {**args.epilogue.tensors, **(further or {})}
    if any(tensors.get(name) is None for name, *_ in recipe.outputs):

        def launch() -> dict[str, torch.Tensor]:
            outputs = recipe.destinations(tensors, a.device)
            require_data(outputs.items())
            recipe.bind(a, b, tensors, numbers, outputs)()
            return outputs

        return launch

    outputs = recipe.destinations(tensors, a.device)
    step = recipe.bind(a, b, tensors, numbers, outputs)

    def again() -> dict[str, torch.Tensor]:
        step()
        return dict(outputs)

    return again


def _current(stream: Any, device: torch.device) -> Any:
    """A context in which `stream` is the current one of the device."""
    if device.type != "cuda":
        raise fail("option", None, name="stream", want=f"None on {device}, which has no streams", value=stream)
    if isinstance(stream, torch.cuda.Stream):
        if stream.device != device:
            raise fail("option", None, name="stream", want=f"a stream of {device}", value=stream)
        return torch.cuda.stream(stream)
    try:
        handle = int(stream)
    except (TypeError, ValueError):
        raise fail("option", None, name="stream", want="a torch.cuda.Stream or a raw handle", value=stream) from None
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device))  # type: ignore[no-untyped-call]


def _difference(given: Plan, needed: Plan) -> str:
    """What the artifact is for, and what it would have to be for."""
    pairs = ((given.problem.describe(), needed.problem.describe()), (given.digest[:12], needed.digest[:12]))
    differing = [f"{one}, not {other}" for one, other in pairs if one != other]
    return "; ".join(differing) or "other strides, dtypes or names of operands and outputs"
