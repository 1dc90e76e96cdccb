"""Launching a compiled kernel. The plan fixes every stride, so a view takes one call, and a bound launch takes none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from epifuse.base.memory import allocator, seen_as
from epifuse.fusion.forms import debug_print
from epifuse.plan import Plan
from epifuse.providers.base import WORKSPACE, Runner, Step
from epifuse.providers.cpu import Lowered, kernel_of
from epifuse.providers.cutedsl import swap, weave
from epifuse.providers.cutedsl.addresses import UNCUT, Along, allocated, modes, seen, written
from epifuse.providers.cutedsl.clusters import rank_table, resident_clusters
from epifuse.providers.cutedsl.design import WGMMA, round_up
from epifuse.providers.cutedsl.family import Arranged
from epifuse.providers.cutedsl.inputs import filled, is_shared, multiplied
from epifuse.providers.cutedsl.load import function
from epifuse.providers.cutedsl.partials import MOST_CTAS
from epifuse.providers.cutedsl.prints import Print
from epifuse.providers.cutedsl.ways import Access
from epifuse.request.problem import Problem, TensorInfo
from epifuse.request.views import Seen

_BYTES = (torch.bool, torch.float8_e8m0fnu)  # handed over as torch.uint8


class View(NamedTuple):
    """Shape and strides under which the kernel sees a tensor, and how many elements behind the tensor's own start.

    `same`: these are the tensor's own, so that no view is made, which costs the host half a microsecond. A mask is seen
    as the bytes 0 and 1 that the kernel reads and writes (`as_bytes`). `by_rows`: the first extent is M, and nothing
    else depends on M.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    same: bool = False
    start: int = 0
    as_bytes: bool = False
    by_rows: bool = False

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor under this shape and these strides."""
        shape, strides, _, start, as_bytes, _ = self
        return seen_as(tensor.view(torch.uint8) if as_bytes else tensor, shape, strides, start)

    @property
    def make(self) -> View | None:
        """The function that makes the view; None if the tensor itself is handed over. tvm-ffi also takes a tensor that
        requires grad."""
        return None if self.same else self

    def with_rows(self, rows: int) -> View:
        """The view for a problem with `rows` rows."""
        return self._replace(shape=(rows, *self.shape[1:])) if self.by_rows else self

    @staticmethod
    def of_tensor(
        own: TensorInfo, shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0, *, by_rows: bool = False
    ) -> View:
        """Return the view of the tensor `own`, with `same` set if it is the tensor itself."""
        as_bytes = own.dtype in _BYTES
        same = shape == own.shape and strides == own.strides and not as_bytes and not start
        return View(shape, strides, same, start, as_bytes, by_rows)


class GpuKernel:
    """One plan, ready to launch on torch's current stream."""

    def __init__(self, plan: Plan, found: Arranged) -> None:
        given = plan.problem
        self.empty = given.is_empty
        if self.empty:
            self.host = partial(_on_the_host, kernel_of(Lowered(plan.graph, given), given), _places(plan))
            return
        program, design = found.program, found.design
        self.function = function(found.text, plan.spec.name)
        self.none = _nothing_given()
        self.index = torch.device(given.a.device).index
        self.a, self.b, self.operands, self.outputs, self.printed = _views(plan, found)
        # K = 0: as many zeros as the larger of A and B needs.
        self.zeros = 0 if given.extents["k"] else max(math.prod(view.shape) for view in (self.a, self.b))
        self.of_a, self.of_b = (None, None) if self.zeros else (self.a.make, self.b.make)
        self.prints = program.prints
        self.numbers = found.number_names
        self.workspace_bytes = plan.allocation.workspace_bytes
        self.cluster_size, self.split, self.band = design.ctas, design.split, design.raster
        self.ranked = design.instruction == WGMMA
        self.clusters, self.ranks = 0, 0

    def with_rows(self, rows: int) -> GpuKernel | None:
        """The kernel for a problem that differs only in its number of rows; None if more than extents depends on it."""
        if self.empty or self.prints or self.zeros or self.workspace_bytes:
            return None
        made = GpuKernel.__new__(GpuKernel)
        vars(made).update(vars(self))
        made.a = self.a.with_rows(rows)
        made.of_a = made.a.make
        made.operands, made.outputs = _with_rows(self.operands, rows), _with_rows(self.outputs, rows)
        return made

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Step:
        """Bind tensors and numbers: return a step. When called, it launches on the stream that is then current."""
        if self.empty:
            return self.host(a, b, operands, outputs)
        none = self.none
        printed: dict[str, torch.Tensor] = {}
        if self.prints:
            printed = {name: torch.empty(shape, dtype=kind, device=a.device) for name, shape, kind in self.printed}
            outputs = {**outputs, **printed}
        step = partial(
            self._launch,
            a if self.of_a is None else self.of_a(a),
            b if self.of_b is None else self.of_b(b),
            _seen(self.operands, operands) if self.operands else none,
            [operands[name] for name in self.numbers] if self.numbers else none,
            _seen(self.outputs, outputs),
            self._workspaces(operands.get(WORKSPACE)) if self.workspace_bytes else none,
        )
        return _printing(step, self.prints, printed) if self.prints else step

    def _workspaces(self, given: torch.Tensor | None) -> list[torch.Tensor] | None:
        """The caller's workspace as the kernel takes it; None if each launch makes its own."""
        return None if given is None else [given.view(-1).view(torch.uint8)[: self.workspace_bytes].view(torch.float32)]

    def quick(
        self, names: tuple[str, ...], outputs: Sequence[Any], *, b_is_transposed: bool
    ) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Return a function of A, B and operands of these names that makes the outputs and launches; None if a launch
        does more.

        `outputs` are the name, shape, strides, dtype and device of each. With `b_is_transposed` the caller passes
        B's transpose. All that a bound step looks up is looked up here, so a launch runs nothing else in Python.
        """
        if self.empty or self.prints or self.zeros or self.numbers:
            return None
        none, index, function, of_a = self.none, self.index, self.function, self.of_a
        of_b = self.b if b_is_transposed else self.of_b
        reads = [(names.index(name) + 2, make) for name, make in self.operands]
        making, order = [each[1:4] for each in outputs], [each[0] for each in outputs]
        writes = [(order.index(name), make) for name, make in self.outputs]
        workspace = ((self.workspace_bytes // 4,), (1,), torch.float32) if self.workspace_bytes else None
        allocate = allocator(outputs[0].device)

        def launch(tensors: Sequence[Any]) -> list[Any]:
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    return launch(tensors)
            made = [allocate(*each) for each in making]
            a = tensors[0] if of_a is None else of_a(tensors[0])
            b = tensors[1] if of_b is None else of_b(tensors[1])
            read = [tensors[place] if make is None else make(tensors[place]) for place, make in reads] or none
            written = [made[place] if make is None else make(made[place]) for place, make in writes]
            workspaces = none if workspace is None else [allocate(*workspace)]
            clusters = self.clusters or self._count_clusters()
            function(a, b, read, none, written, workspaces, clusters, self.band, self.ranks)
            return made

        return launch

    def _count_clusters(self) -> int:
        """How many clusters run at once for each part of K. The first launch asks the GPU for it, and for the ranks of
        the clusters, because a kernel may be built without a GPU."""
        clusters = max(resident_clusters(self.index, self.cluster_size) // self.split, 1)
        clusters = min(clusters, MOST_CTAS // self.cluster_size) if self.workspace_bytes else clusters
        is_final = True
        if self.ranked:
            table, is_final = rank_table(self.index, self.cluster_size, self.split, clusters)
            self.ranks = table.address
        self.clusters = clusters if is_final else 0
        return clusters

    def _launch(self, a: Any, b: Any, operands: Any, numbers: Any, outputs: Any, workspaces: Any) -> None:
        """Launch with these arguments. If no workspace was given, each launch has its own: two streams may run one step
        at once, and a captured graph keeps its memory."""
        if workspaces is None:
            workspaces = [torch.empty_strided((self.workspace_bytes // 4,), (1,), dtype=torch.float32, device=a.device)]
        if self.zeros:
            a, b = self._zero_operands(a, b)
        clusters = self.clusters or self._count_clusters()
        # A guard costs a microsecond, and the device is almost always the current one. There is a tensor on it, so
        # CUDA is initialised, which torch.cuda.current_device() would ask.
        if torch._C._cuda_getDevice() == self.index:
            self.function(a, b, operands, numbers, outputs, workspaces, clusters, self.band, self.ranks)
        else:
            with torch.cuda.device(self.index):
                self.function(a, b, operands, numbers, outputs, workspaces, clusters, self.band, self.ranks)

    def _zero_operands(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros as A and B, for K = 0."""
        of_a, of_b = (torch.zeros(self.zeros, dtype=like.dtype, device=like.device) for like in (a, b))
        return self.a(of_a), self.b(of_b)


def _seen(makers: Iterable[tuple[str, Any]], tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of these names as the kernel sees them."""
    found = []
    for name, make in makers:
        tensor = tensors[name]
        found.append(tensor if make is None else make(tensor))
    return found


def _printing(step: Step, prints: tuple[Print, ...], values: Mapping[str, torch.Tensor]) -> Step:
    """Return a step that runs `step`, then waits for the `values` and prints them."""

    def run() -> None:
        step()
        for one in prints:
            debug_print(one.format, values[one.output])

    return run


def _places(plan: Plan) -> Mapping[str, Seen]:
    """How each output lies, by its name."""
    infos, extents = dict(plan.problem.outputs), plan.problem.extents
    return {output.name: written(output, infos.get(output.name), extents) for output in plan.graph.outputs}


def _on_the_host(
    kernel: Runner,
    places: Mapping[str, Seen],
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
) -> Step:
    """Return the step of an empty problem. Its reductions still have values, which the CPU kernel computes."""
    if all(0 in place.shape for place in places.values()):
        return _nothing
    made = {name: (place, outputs[name]) for name, place in places.items()}

    def step() -> None:
        # No element of A and B is read.
        hollow_a, hollow_b = (torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape) for x in (a, b))
        here = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in operands.items()}
        found = {name: torch.empty(place.shape, dtype=to.dtype, device="cpu") for name, (place, to) in made.items()}
        kernel(hollow_a, hollow_b, here, found)()
        for name, (place, to) in made.items():
            to.as_strided(place.shape, place.strides, to.storage_offset() + place.start).copy_(found[name])

    return step


def _nothing() -> None:
    """The step of a problem whose outputs have no elements."""


@cache
def _nothing_given() -> Any:
    """An empty array, for no tensors or numbers. From an empty list each launch would make one, in 0.06 us."""
    import tvm_ffi  # imported when the kernel was loaded

    return tvm_ffi.Array(())


_Made = tuple[tuple[str, View | None], ...]
_Printed = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def _with_rows(made: _Made, rows: int) -> _Made:
    return tuple([(name, None if view is None else view.with_rows(rows)) for name, view in made])


def _views(plan: Plan, found: Arranged) -> tuple[View, View, _Made, _Made, _Printed]:
    """The views under which the kernel sees tensors: A as (M,K,L), B as (K,N,L), all others as (M,N,L).

    A stride is 0 along an axis over which a tensor does not vary. Without batches, A, B and tensors that travel in
    tiles have no L. Returned are the views of A and B; the name of each operand and of each output, with what makes its
    view; and of each printed value the name, shape and dtype. This runs for every extent that was not seen before.

    Where the rows of B are woven, N of operands and outputs counts the columns of one part. Where A and B are
    `swapped`, the kernel itself exchanges A and B, and also M and N of each tensor that no reshape cut, because a
    transposed view would cost each launch a microsecond.
    """
    given, design, swapped = plan.problem, found.design, found.design.swapped
    product = multiplied(swap.problem_of(given) if swapped else given, design.rewritten)
    first, second = (product.b, product.a) if swapped else (product.a, product.b)
    extents, batched = product.extents, product.batched
    operands: list[tuple[str, View | None]] = []
    outputs: list[tuple[str, View | None]] = []
    printed: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    for program in found.source.programs:
        problem = weave.problem_of(program.order, _of_columns(product, program.columns))
        infos, names = dict(problem.outputs), [one.output for one in program.prints]
        for load, access, along in program.reads:
            operand = problem.by_name[load.name]
            assert isinstance(operand, TensorInfo)
            place = seen(operand, load)
            assert place is not None, "refused while planning"
            view = _full(operand, place, along, access, problem.extents, batched=batched, swapped=swapped)
            operands.append((load.name, view.make))
        for output, access, along in program.writes:
            info = infos.get(output.name)
            place = written(output, info, problem.extents)
            own = info or allocated(output, access.dtype, problem.extents)
            view = _full(own, place, along, access, problem.extents, batched=batched, swapped=swapped)
            outputs.append((output.name, view.make))
            if output.name in names:
                printed.append((output.name, place.shape, access.dtype))
    operands += [(name, None) for name, _ in given.scales]
    held, how = filled(given), design.rewritten_as_given
    in_any_way = (design.by_warps, design.by_warps) if how is None else (how.of_a, how.of_b)
    a, b = (
        _any_matrix(own, as_it_lies, extents["l"], batched)
        if in_any
        else _matrix(own, one, extents["l"], batched=batched, swapped=swapped)
        for own, as_it_lies, one, in_any in zip(
            (given.a, given.b), (held.a, held.b), (first, second), in_any_way, strict=True
        )
    )
    # Python's garbage collector does not visit a tuple that holds names and None alone.
    return a._replace(by_rows=True), b, tuple(operands), tuple(outputs), tuple(printed)


def _of_columns(problem: Problem, columns: tuple[int, int] | None) -> Problem:
    """The problem with only these columns (first, end) as N; None means all."""
    if columns is None:
        return problem
    b = problem.b
    return problem._replace(b=b._replace(shape=(*b.shape[:-1], columns[1] - columns[0])))


def _full(
    own: TensorInfo,
    found: Seen,
    along: Along,
    access: Access,
    extents: Mapping[str, int],
    *,
    batched: bool,
    swapped: bool,
) -> View:
    """The view of an operand or output as (M, N, L): stride 0 along an axis over which it does not vary, and several
    pieces, the fastest first, for an axis that a reshape cut. A tile that does not vary over L has one batch.
    """
    shape, strides, inner = modes(found.strides, along, extents)
    staged, cut = access.travels.staged, any(access.pieces)
    if access.period:
        shape, strides, inner = shape[:2] + shape[3:], strides[:2] + strides[3:], UNCUT
    if staged and not (batched or cut):
        shape, strides = shape[:2], strides[:2]
    strides = tuple([stride if extent > 1 else 0 for extent, stride in zip(shape, strides, strict=True)])
    if staged:
        # No address depends on the stride of a single row or batch, but TMA checks it.
        if 0 in strides:
            span = round_up(math.prod(shape), 16)
            strides = tuple([stride or span for stride in strides])
        strides = (strides[0], 1, *strides[2:]) if access.by_rows or cut else (1, *strides[1:])
        if (batched or cut) and "l" not in access.axes:
            shape = (*shape[:-1], 1)
    if swapped and not any(inner):
        shape, strides = (shape[1], shape[0], *shape[2:]), (strides[1], strides[0], *strides[2:])
    return View.of_tensor(own, shape, strides, found.start, by_rows=not inner[0])


def _matrix(own: TensorInfo, given: TensorInfo, batches: int, *, batched: bool, swapped: bool) -> View:
    """The view of A as (M,K) or B as (K,N), batches last, with strides that TMA accepts. `own` is the caller's tensor.

    `given` is the same matrix as the kernel multiplies it, so transposed if A and B are `swapped`.
    """
    shape, (row, column) = given.shape[-2:], given.strides[-2:]
    span = round_up(shape[0] * shape[1], 16 // given.dtype.itemsize)
    # No address depends on the stride of a single row or batch, but TMA checks it.
    if column == 1:
        row = span if shape[0] == 1 else row
    else:
        column = span if shape[1] == 1 else column
    if swapped:
        shape, row, column = shape[::-1], column, row
    if not batched:
        return View.of_tensor(own, shape, (row, column))
    varies = len(given.shape) == 3 and given.shape[0] == batches
    step = span if batches == 1 else given.strides[0] if varies else 0
    return View.of_tensor(own, (*shape, batches), (row, column, step))


def _any_matrix(own: TensorInfo, given: TensorInfo, batches: int, batched: bool) -> View:
    """The view of A as (M,K) or B as (K,N), batches last, with any strides. `given` is the filled tensor."""
    shape, strides = given.shape[-2:], given.strides[-2:]
    if 1 in strides:
        # No address depends on the stride of a single row, which need not be a multiple of what is copied at once.
        contiguous, span = 1 if strides[1] == 1 else 0, round_up(shape[0] * shape[1], 16)
        strides = tuple(
            [step if i == contiguous or shape[i] > 1 or step % 16 == 0 else span for i, step in enumerate(strides)]
        )
    if not batched:
        return View.of_tensor(own, shape, strides)
    return View.of_tensor(own, (*shape, batches), (*strides, 0 if is_shared(given) else given.strides[0]))
