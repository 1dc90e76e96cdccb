"""What discovery returns: a kernel that says what it supports, and that can be compiled, bound and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from epifuse import providers
from epifuse.base.dynamo import outside_graph
from epifuse.base.errors import fail, kind_of
from epifuse.base.target import target_of
from epifuse.plan import KernelSpec, Plan, Refusal, select
from epifuse.request.problem import TensorInfo, info
from epifuse.request.signature import Call
from epifuse.runtime.arguments import GemmArguments, check_arguments
from epifuse.runtime.launch import Prepared, require_data, require_unrecorded


@dataclass(frozen=True)
class Status:
    """The outcome of a check: true on success, else false, and `error` says why."""

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
    """A plan and the kernel that was built from it. It serves every launch whose arguments give the same plan."""

    prepared: Prepared = field(repr=False)
    kernel: Kernel = field(repr=False)

    @property
    def plan(self) -> Plan:
        """The plan that was built."""
        return self.prepared.plan

    def fits(self, args: GemmArguments) -> bool:
        """Whether `args` need this plan. If False, planning for `args` may still give an equal plan."""
        check_arguments("CompiledArtifact.fits", args)
        return is_for(self.plan, args)


def is_for(plan: Plan, args: GemmArguments) -> bool:
    """Whether `plan` was made for the structure and the problem of `args`."""
    structure = args.structure
    same = (plan.digest, plan.binding) == (structure.digest, structure.binding)
    return same and plan.problem == args.problem


@dataclass(frozen=True)
class Metadata:
    """The properties of a kernel, for `metadata_filter` and for display."""

    kernel_name: str
    provider: str
    target: str
    min_cc: int
    tile_shape: tuple[int, int]
    digest: str


@dataclass(frozen=True)
class Kernel:
    """One kernel, which supports the arguments it was discovered with. Other shapes and numbers are planned anew."""

    spec: KernelSpec
    plan: Plan

    def __repr__(self) -> str:
        return f"<Kernel {self.spec.name}: {self.plan.problem.describe()}>"

    @property
    def metadata(self) -> Metadata:
        """Name, provider, target and design."""
        plan = self.plan
        tile = plan.allocation.tile
        return Metadata(
            self.spec.name, self.spec.provider, plan.problem.target.name, self.spec.ccs[0], tile, plan.digest
        )

    def plan_for(self, args: GemmArguments) -> Plan | Refusal:
        """This kernel's plan for `args`, or the refusal that says why it has none."""
        check_arguments(self.spec.name, args)
        if is_for(self.plan, args):
            return self.plan
        problem = args.problem._replace(target=self.plan.problem.target)
        selection = select(args.structure, problem, [(providers.load(self.spec.provider), (self.spec,))])
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
        """Build for `args`. Needs their shapes and dtypes, not their data. Raises `UnsupportedError`."""
        return CompiledArtifact(Prepared.of(self._plan(args)), self)

    @outside_graph
    def get_workspace_size(self, args: GemmArguments) -> int:
        """The bytes of workspace that a launch needs. Compiles nothing. Raises `UnsupportedError`."""
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

        `stream` is a `torch.cuda.Stream` or a raw handle; None is the device's current stream. The CPU has no streams.
        `workspace` is a contiguous tensor of `get_workspace_size` bytes at least, on A's device, whose content is lost.
        Each launch that may run at the same time as another needs its own. A launch without a workspace allocates it.
        Raises `UnsupportedError` and `ArgumentError`, before anything is written.
        """
        bound: _Bound | None = args.bound if isinstance(args, GemmArguments) else None
        if bound is None or not bound.serves(self, compiled_artifact):
            bound = self._bound(args, compiled_artifact)
        launch = bound.launch
        if workspace is not None:
            self._check_workspace(bound.plan, workspace)
            launch = _launcher(self._artifact(args, compiled_artifact).prepared, args, workspace)
        if stream is None:
            return launch()
        with _current(stream, args.A.device):
            return launch()

    @outside_graph
    def bind(self, args: GemmArguments) -> Callable[[], dict[str, torch.Tensor]]:
        """A function that only launches, because all is decided here. Each call uses the same memory and numbers."""
        prepared = self._artifact(args, None).prepared
        _require_memory(args.call)
        require_unrecorded(args.call)
        with torch.inference_mode(False):  # a bound launch may run outside of it, where it cannot write such tensors
            outputs = args.allocate()
        step = prepared.bind(args.call, outputs)

        @outside_graph
        def run() -> dict[str, torch.Tensor]:
            step()
            return outputs

        return run

    def _bound(self, args: GemmArguments, given: CompiledArtifact | None) -> _Bound:
        artifact = self._artifact(args, given)
        _require_memory(args.call)
        require_unrecorded(args.call)
        tensors = (args.A, args.B, *args.call.tensors.values())
        launch = _launcher(artifact.prepared, args)
        bound = _Bound(self, given, artifact.plan, tensors, _addresses_and_layouts(tensors), launch)
        args.bound = bound
        return bound

    def _artifact(self, args: GemmArguments, given: CompiledArtifact | None) -> CompiledArtifact:
        check_arguments(self.spec.name, args)
        if not isinstance(given, (CompiledArtifact, type(None))):
            want = "what its compile() returned as compiled_artifact"
            raise fail("wrong_arguments", None, function=self.spec.name, want=want, type=kind_of(given))
        if given is not None and given.kernel is self and given.fits(args):
            return given
        target = self.plan.problem.target
        if target_of(args.problem.a.device).cc != target.cc:
            raise fail("kernel_device", None, kernel=self.spec.name, target=target.name, device=args.A.device)
        made = self.compile(args)
        if given is not None and given.plan != made.plan:
            raise fail("artifact", None, why=_difference(given.plan, made.plan))
        return made

    def _check_workspace(self, plan: Plan, workspace: torch.Tensor) -> None:
        need = plan.allocation.workspace_bytes
        if not isinstance(workspace, torch.Tensor) or workspace.numel() * workspace.element_size() < need:
            raise fail("workspace", None, want=f"a tensor of at least {need} bytes")
        if str(workspace.device) != plan.problem.a.device:
            raise fail("workspace", None, want=f"on {plan.problem.a.device}")
        if not workspace.is_contiguous() or workspace.data_ptr() % 16:
            raise fail("workspace", None, want="contiguous, and to start at a multiple of 16 bytes")


class _Bound(NamedTuple):
    """Arguments that were checked, planned and bound for a kernel. Valid as long as their memory stays where it is."""

    kernel: Kernel
    given: CompiledArtifact | None
    plan: Plan
    tensors: tuple[torch.Tensor, ...]
    addresses_and_layouts: list[tuple[Any, ...]]
    launch: Callable[[], dict[str, torch.Tensor]]

    def serves(self, kernel: Kernel, given: CompiledArtifact | None) -> bool:
        """Whether kernel, artifact, and the memory of the tensors are still the same."""
        same = self.kernel is kernel and self.given is given
        return same and self.addresses_and_layouts == _addresses_and_layouts(self.tensors)


def _addresses_and_layouts(tensors: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Address, shape, strides and dtype of each tensor."""
    return [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def _require_memory(call: Call) -> None:
    """Raise `ArgumentError` for a tensor without data, or one that no longer is as it was described."""
    require_data(call)
    tensors = (call.request.a, call.request.b, *call.tensors.values())
    for name, tensor, was in zip((*call.request.names, *call.tensors), tensors, call.infos, strict=True):
        if not tensor.data_ptr() and tensor.numel():
            raise fail("no_data", None, name=name)
        now = info(tensor)
        if now.aligned < was.aligned or now != was._replace(aligned=now.aligned):
            raise fail("changed", None, name=name, was=_info_text(was), now=_info_text(now))


def _info_text(one: TensorInfo) -> str:
    aligned = "" if one.aligned else ", not at a multiple of 16 bytes"
    return f"{one.dtype} of shape {one.shape} with strides {one.strides}{aligned}"


def _launcher(
    prepared: Prepared, args: GemmArguments, workspace: torch.Tensor | None = None
) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that launches onto the given destinations. If some are not given, each call allocates outputs."""
    call = args.call
    if any(output.name not in call.tensors for output in prepared.outputs):

        def launch() -> dict[str, torch.Tensor]:
            outputs = args.allocate()
            prepared.bind(call, outputs, workspace)()
            return outputs

        return launch

    outputs = args.allocate()
    step = prepared.bind(call, outputs, workspace)

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
    """In which respects the artifact's plan, `given`, differs from the `needed` one."""
    pairs = (
        (given.problem.describe(), needed.problem.describe()),
        (f"tensors on {given.problem.a.device}", f"on {needed.problem.a.device}"),
        (given.digest[:12], needed.digest[:12]),
    )
    differing = [f"{one}, not {other}" for one, other in pairs if one != other]
    return "; ".join(differing) or "other strides, dtypes, kinds of numbers or names"
