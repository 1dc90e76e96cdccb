"""The CPU provider: two kernels, which compute product and epilogue by panels that fit in cache.

The panel kernel runs every epilogue, and is also the oracle of the test suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from epifuse.base.config import CONFIG
from epifuse.base.lazy import cached_property
from epifuse.ir import Graph, Load, Node
from epifuse.plan import Allocation, Answers, Details, KernelSpec, Plan, Reason, Refusal
from epifuse.providers.base import Runner
from epifuse.providers.cpu import native, toolchain
from epifuse.providers.cpu.kernel import CpuKernel
from epifuse.providers.cpu.lowered import Panels, panels, panels_for
from epifuse.providers.cpu.native import Loop, NativeKernel
from epifuse.providers.cpu.space import viewed
from epifuse.providers.regions import Regions, Rules, is_uneven, one_after_another
from epifuse.request.problem import Problem, TensorInfo

_PANEL = KernelSpec("cpu_panel", "cpu", "cpu", (0,), "torch's GEMM by panels, epilogue in cache")
_NATIVE = KernelSpec("cpu_native", "cpu", "cpu", (0,), "torch's GEMM by panels, epilogue as one compiled loop")
_ROWS = 128  # least rows of a panel that needs no whole rows: with fewer, torch's GEMM packs B too often
_COLUMNS = 4096  # most columns of a panel: best with 128 rows on a core with 1 MiB of L2, M = N = 4096, K = 256


class CpuProvider:
    """See `providers.base.Provider`."""

    name = "cpu"
    scales_blocks = True

    def specs(self) -> tuple[KernelSpec, ...]:
        """The compiled loop, and the panel kernel of torch's own operations for what the loop cannot run."""
        return (_NATIVE, _PANEL)

    def lacks(self, spec: KernelSpec) -> str | None:
        """Why the loop cannot be compiled here, or None. The panel kernel lacks nothing."""
        return toolchain.missing() if spec.name == _NATIVE.name else None

    def lower(self, graph: Graph, problem: Problem) -> Lowered | Regions:
        """The programs of the panel kernel, or those of each region. The loop is lowered when it is first needed."""
        return Regions(graph, problem, self.lower, shares=False) if is_uneven(graph) else Lowered(graph, problem)

    def supports(self, specs: Sequence[KernelSpec], work: Lowered | Regions, problem: Problem) -> Answers:
        """The panel kernel runs every epilogue of the language, the compiled loop elementwise epilogues of floats."""
        if isinstance(work, Regions):
            return work.supports(
                specs, problem, self.supports, _one_by_one, Rules(may_overlap=True, may_cut_blocks=True)
            )
        for field in ("cluster", "schedule", "split"):
            # A cluster of one and a split of K into one part are accepted, because they ask for nothing.
            if (asked := getattr(problem.constraints, field)) not in (None, (1, 1), 1):
                reason = f"it has no {field} to choose, and {asked} was asked for"
                return Answers.of([(spec, Refusal(spec.name, reason)) for spec in specs])
        if problem.constraints.batch_invariant:
            what = "float products and functions such as silu, whose bits depend on M"
            reason = f"PyTorch computes its {what}: batch_invariant is for GPUs"
            return Answers.of([(spec, Refusal(spec.name, reason)) for spec in specs])
        if (moved := work.moved(problem)) is not None:
            return Answers.of([(spec, Refusal(spec.name, moved)) for spec in specs])
        return Answers.of([(spec, (_native if spec is _NATIVE else _panel)(work, problem)) for spec in specs])

    def build(self, plan: Plan) -> Runner:
        """Compile the loop; the panel kernel needs no compiling."""
        allocation = plan.allocation
        if allocation.launches:
            return one_after_another(list(map(self.build, allocation.launches)), plan)
        if plan.spec.name == _NATIVE.name:
            return _loop_or_panel(allocation.program, plan.problem)
        return CpuKernel(allocation.program, plan.problem, allocation.tile)

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        """The C++ text of each loop of the plan."""
        if plan.spec.name != _NATIVE.name:
            return ()
        if launches := plan.allocation.launches:
            return tuple(text for launch in launches for text in self.kernels(launch))
        return (native.source(plan.allocation.program.loop, plan.problem),)

    def is_loaded(self, text: str) -> bool:
        """Whether the loop of this text is in memory."""
        return toolchain.is_loaded(text)

    def is_stored(self, text: str) -> bool:
        """Whether a loop that this CPU can run is on disk."""
        return toolchain.is_stored(text)

    def prepare(self) -> None:
        """Nothing to import: the C++ compiler is no Python module."""

    def compile(self, text: str) -> None:
        """Compile the loop of this text for this CPU and store it. Raises `BuildError`."""
        toolchain.stored(text)


class Lowered:
    """An epilogue lowered for both kernels."""

    def __init__(self, graph: Graph, problem: Problem) -> None:
        self.graph = graph
        self.panels = panels(graph, problem)
        self._problem = problem

    @cached_property
    def _reshaped(self) -> tuple[tuple[Node, Load], ...]:
        loads = [(node, node.attr) for node in self.graph.loads()]
        return tuple((node, load) for node, load in loads if any(op == "reshape" for op, _ in load.views))

    def moved(self, problem: Problem) -> str | None:
        """Why an operand cannot be reshaped without a copy, or None. A bound call reads an operand's later values too,
        and a copy would not have them."""
        for node, load in self._reshaped:
            info = problem.by_name[load.name]
            assert isinstance(info, TensorInfo)
            try:
                viewed(torch.empty_strided(info.shape, info.strides, device="meta"), load)
            except RuntimeError:
                why = f"it cannot reshape '{load.name}' where it lies: hand it in as the epilogue reshapes it"
                return Reason(why, self.graph.loc(node))
        return None

    @cached_property
    def loop(self) -> Loop:
        """The loop. It is lowered when it is first needed, because small problems do not need it."""
        return Loop.of(self.graph, self._problem)


def _one_by_one(*_: object) -> str:
    return "PyTorch computes its product, one region at a time"


def _loop_or_panel(work: Lowered, problem: Problem) -> Runner:
    """The loop, or if the compiler fails to build it the panel kernel, which can run all that the loop can."""
    try:
        return NativeKernel(work.loop, problem)
    except toolchain.BuildError:  # the toolchain has warned
        return kernel_of(work, problem)


def kernel_of(work: Lowered, problem: Problem) -> Runner:
    """The panel kernel of a lowered epilogue, also if the plan is for the loop."""
    program = panels_for(work.graph, problem, work.panels)
    return CpuKernel(program, problem, _panel_shape(program, problem))


def _native(work: Lowered, problem: Problem) -> Allocation | Refusal:
    if problem.constraints.tile is not None:
        return Refusal(_NATIVE.name, "it has no tile to choose")
    if (reason := native.unfit(problem)) is not None or (reason := native.refusal(work.loop, problem)) is not None:
        return Refusal(_NATIVE.name, reason)
    note = "the loop is compiled in about half a second, once: it stays on disk"
    return Allocation(native.SCRATCH, cost=0.5, details=Details(notes=(note,)), program=work)


def _panel(work: Lowered, problem: Problem) -> Allocation | Refusal:
    program = panels_for(work.graph, problem, work.panels)
    rows, columns = problem.constraints.tile or _panel_shape(program, problem)
    inner, whole_rows = program.space.inner, program.whole_rows
    if whole_rows and columns < problem.extents["n"]:
        return Refusal(_PANEL.name, f"this epilogue needs whole rows: a tile of {problem.extents['n']} columns")
    if rows % inner["m"] or rows < 1 or columns < 1:
        return Refusal(
            _PANEL.name, f"a tile needs a multiple of {inner['m']} rows, at least one, and at least one column"
        )
    details = partial(_panel_details, rows, columns, problem.float_dtype, whole_rows=whole_rows)
    return Allocation((rows, columns), cost=1.0, details=details, program=program)


def _panel_details(rows: int, columns: int, dtype: torch.dtype, *, whole_rows: bool) -> Details:
    notes = [f"panels of {rows} x {columns} in {dtype} stay in cache"]
    return Details(notes=(*notes, *(["whole rows, because a value needs its row"] if whole_rows else [])))


def _panel_shape(program: Panels, problem: Problem) -> tuple[int, int]:
    """Rows and columns of a panel. Its elements take about twice `config.panel_bytes` bytes in float32."""
    elements = CONFIG.panel_bytes // 2
    n = max(problem.extents["n"], 1)
    inner, whole_rows = program.space.inner, program.whole_rows
    columns = n if whole_rows else min(n, _COLUMNS)
    wanted = max(elements // columns, 1) if whole_rows else max(elements // columns, _ROWS)
    wanted = min(wanted, max(problem.extents["l"], 1) * max(problem.extents["m"], 1))
    return max(wanted // inner["m"], 1) * inner["m"], columns
