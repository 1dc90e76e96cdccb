"""Launching a compiled kernel: the plan fixes every stride, so a view costs one call and a bound launch none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from epifuse.fusion.forms import debug_print
from epifuse.ir import Dims, Load, Output
from epifuse.ir.types import shape_of
from epifuse.plan import Plan
from epifuse.providers.base import WORKSPACE, Runner, Step
from epifuse.providers.cpu import Lowered, kernel_of
from epifuse.providers.cutedsl.addresses import modes, strides_of, strides_written
from epifuse.providers.cutedsl.budget import round_up
from epifuse.providers.cutedsl.clusters import resident_clusters
from epifuse.providers.cutedsl.family import Arranged
from epifuse.providers.cutedsl.inputs import filled
from epifuse.providers.cutedsl.load import function
from epifuse.providers.cutedsl.partials import MOST_CTAS
from epifuse.providers.cutedsl.prints import Print
from epifuse.providers.cutedsl.program import Access, Program
from epifuse.request.problem import Problem, TensorInfo


class View(NamedTuple):
    """Shape and strides under which the kernel sees a tensor; where it starts is the tensor's own.

    `same` where these are the tensor's own as well: a view costs the host a microsecond.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    same: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor so; a mask as the bytes 0 and 1 that the kernel reads and writes."""
        if self.same:  # a parameter is handed over as its data
            return tensor if type(tensor) is torch.Tensor and not tensor.requires_grad else tensor.detach()
        seen = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
        return seen.as_strided(self.shape, self.strides)

    def beside(self, own: TensorInfo) -> View:
        """The same view, which knows whether it is the tensor itself."""
        same = self.shape == own.shape and self.strides == own.strides and own.dtype is not torch.bool
        return View(self.shape, self.strides, same)


class GpuKernel:
    """One plan, ready to launch on torch's current stream."""

    def __init__(self, plan: Plan, found: Arranged) -> None:
        self.empty = 0 in (plan.problem.extents[axis] for axis in "lmn")
        if self.empty:
            self.host = kernel_of(Lowered(plan.graph, plan.problem), plan.problem)
            return
        given = plan.problem
        program, design = found.program, found.design
        self.function = function(found.text, plan.spec.name)
        self.views = _Views(given, filled(given), program)
        self.prints = program.prints
        self.numbers = tuple(node.attr.name for node in program.numbers)
        self.workspace_bytes = plan.allocation.workspace_bytes
        self.cluster_size, self.band = design.cluster[0] * design.cluster[1], design.raster
        # K = 0: as many zeros as the larger of A and B needs.
        self.zeros = 0 if given.extents["k"] else max(math.prod(view.shape) for view in (self.views.a, self.views.b))

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Step:
        """Bind: the result launches, on the stream that is current then. `operands` holds tensors and numbers."""
        if self.empty:
            return _on_the_host(self.host, a, b, operands, outputs)
        views, index = self.views, a.get_device()
        printed: dict[str, torch.Tensor] = {}
        if self.prints:
            printed = {name: torch.empty(shape, dtype=kind, device=a.device) for name, shape, kind in views.printed}
            outputs = {**outputs, **printed}
        product = None if self.zeros else (views.a.of(a), views.b.of(b))
        arguments = (
            [view.of(operands[name]) for name, view in views.operands] if views.operands else [],
            [operands[name] for name in self.numbers] if self.numbers else [],
            [view.of(outputs[name]) for name, view in views.outputs],
        )
        function, clusters, band = self.function, resident_clusters(index, self.cluster_size), self.band
        workspaces = self._workspaces(a.device, operands) if self.workspace_bytes else list
        if self.workspace_bytes:
            clusters = min(clusters, MOST_CTAS // self.cluster_size)

        def step() -> None:
            matrices = product or self._nothing(a)
            # A guard costs a microsecond, and the device is almost always the current one. There is a tensor on it, so
            # CUDA is initialised, which torch.cuda.current_device() would ask.
            if torch._C._cuda_getDevice() == index:
                function(*matrices, *arguments, workspaces(), clusters, band)
            else:
                with torch.cuda.device(index):
                    function(*matrices, *arguments, workspaces(), clusters, band)

        return _printing(step, self.prints, printed) if self.prints else step

    def _nothing(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B where K = 0."""
        zeros = torch.zeros(self.zeros, dtype=like.dtype, device=like.device)
        return self.views.a.of(zeros), self.views.b.of(zeros)

    def _workspaces(self, device: torch.device, operands: Mapping[str, Any]) -> Callable[[], list[torch.Tensor]]:
        """A function of the workspace a launch is given: the caller's, or one of its own.

        Two streams may run the same step at once, and a captured graph keeps its own.
        """
        elements, given = self.workspace_bytes // 4, operands.get(WORKSPACE)
        if given is None:
            return lambda: [torch.empty(elements, dtype=torch.float32, device=device)]
        own = given.view(-1).view(torch.uint8)[: 4 * elements].view(torch.float32)
        return lambda: [own]


def _printing(step: Step, prints: tuple[Print, ...], values: Mapping[str, torch.Tensor]) -> Step:
    """`step`, which then waits for the values and prints them."""

    def run() -> None:
        step()
        for one in prints:
            debug_print(one.format, values[one.output])

    return run


def _on_the_host(
    kernel: Runner,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
) -> Step:
    """A result without elements, of which reductions still have values: the CPU kernel says which."""
    if all(tensor.numel() == 0 for tensor in outputs.values()):
        return _nothing

    def step() -> None:
        # No element of A and B is read.
        hollow_a, hollow_b = (torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape) for x in (a, b))
        here = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in operands.items()}
        found = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in outputs.items()}
        kernel(hollow_a, hollow_b, here, found)()
        for name, tensor in outputs.items():
            tensor.copy_(found[name])

    return step


def _nothing() -> None:
    """The launch of a problem without elements."""


class _Views:
    """The views of one plan: A as (M,K,L), B as (K,N,L), all else as (M,N,L), with stride 0 where it does not vary.

    Where there are no batches, A, B and what travels in tiles have no L.
    """

    def __init__(self, given: Problem, problem: Problem, program: Program) -> None:
        self.extents = extents = problem.extents
        self.factors, self.batched = program.factors, problem.batched
        self.a = _matrix(problem.a, extents["l"], batched=self.batched).beside(given.a)
        self.b = _matrix(problem.b, extents["l"], batched=self.batched).beside(given.b)
        self.operands = tuple([self._operand(node.attr, access, problem) for node, access in program.tensors])
        infos = dict(problem.outputs)
        written = list(zip(program.graph.outputs, program.stores, strict=True))
        self.outputs = tuple([self._output(one, access, infos.get(one.name)) for one, access in written])
        names = {one.output for one in program.prints}
        self.printed = tuple(
            (one.name, shape_of(one.dims or (), extents), access.dtype) for one, access in written if one.name in names
        )

    def _operand(self, load: Load, access: Access, problem: Problem) -> tuple[str, View]:
        operand = problem.by_name[load.name]
        assert isinstance(operand, TensorInfo)
        strides = strides_of(operand, load)
        assert strides is not None, "refused while planning"
        return load.name, self._full(strides, load.dims, access).beside(operand)

    def _output(self, output: Output, access: Access, info: TensorInfo | None) -> tuple[str, View]:
        strides = strides_written(output, info, self.extents)
        own = info or TensorInfo(shape_of(output.dims or (), self.extents), strides, access.dtype, "")
        return output.name, self._full(strides, output.dims, access).beside(own)

    def _full(self, strides: tuple[int, ...], dims: Dims | None, access: Access) -> View:
        """A tensor as (M, N, L), stride 0 where it does not vary, an axis that was cut in pieces, the fastest first.

        A tile that does not vary over L has one batch.
        """
        where = modes(strides, dims or (), self.factors, self.extents)
        pieces = [(e, s if e > 1 else 0) for mode in where for e, s in zip(*mode, strict=True)]
        if access.way != "tile":
            shape, steps = zip(*pieces, strict=True)
            return View(shape, steps)
        m, n, l = (self.extents[axis] for axis in "mnl")
        # No address depends on the stride of a single row or batch, but TMA checks it.
        inner = 1 if access.by_rows else 0
        span = round_up(m * n, 16)
        legal = tuple([1 if i == inner else stride or span for i, (_, stride) in enumerate(pieces)])
        if not self.batched:
            return View((m, n), legal[:2])
        return View((m, n, l if "l" in access.axes else 1), legal)


def _matrix(given: TensorInfo, batches: int, *, batched: bool) -> View:
    """A as (M,K) or B as (K,N), batches last, every stride one that TMA accepts."""
    inner = -1 if given.strides[-1] == 1 else -2
    span = round_up(given.shape[-1] * given.shape[-2], 16 // given.dtype.itemsize)

    def stride(position: int) -> int:
        # No address depends on the stride of a single row or batch, but TMA checks it.
        return span if given.shape[position] == 1 and position != inner else given.strides[position]

    shape, strides = given.shape[-2:], (stride(-2), stride(-1))
    if not batched:
        return View(shape, strides)
    own = len(given.shape) == 3 and given.shape[0] == batches
    return View((*shape, batches), (*strides, stride(-3) if own else span if batches == 1 else 0))
