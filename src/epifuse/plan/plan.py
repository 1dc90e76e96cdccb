"""The plan of a call: everything is decided, nothing is built yet. Its text answers "why this kernel?"."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from epifuse.base.dtypes import short
from epifuse.base.lazy import cached_property
from epifuse.base.places import Loc
from epifuse.ir import Graph, Load
from epifuse.ir.types import regions_of, show_dims
from epifuse.passes.accesses import access_class
from epifuse.passes.assign_stages import Stage, sweeps
from epifuse.passes.prune import unused_operands
from epifuse.plan.spec import KernelSpec
from epifuse.request.problem import Problem


class Details(NamedTuple):
    """What the text of a plan shows: how each operand and output travels (by TMA, for example), by name, and notes."""

    transports: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


class Estimate(NamedTuple):
    """The parts of a plan's cost: a `text` for people; `multiplying`, the cost with A and B in shared memory and an
    epilogue that computes nothing; `shown`, the cost of everything else except memory traffic."""

    text: str
    multiplying: float
    shown: float


@dataclass(frozen=True)
class Allocation:
    """What a provider decided for a problem it supports. The lowest `cost` is best.

    The fields without comparison follow from problem and kernel. `workspace`, in bytes, and `details` may be functions,
    because most plans are neither run nor printed. `launches` are the plans of several launches, if the product is
    computed more than once or if ranges of its `columns` are computed one by one. `program` is what the provider
    builds, kept from estimating the cost, so that nothing is lowered twice. Allocations for one problem with equal
    `bits` give results that are equal to the last bit; None equals no other. `estimate` gives the parts of the cost.
    `with_other_rows` gives the texts of kernels that calls with another M run on where this kernel cannot stand in,
    because its results have other bits: one kernel for each kind of bits.
    """

    tile: tuple[int, int]
    cost: float = 0.0
    workspace: int | Callable[[], int] = field(default=0, compare=False, repr=False)
    details: Details | Callable[[], Details] = field(default=Details(), compare=False, repr=False)
    launches: tuple[Plan, ...] = field(default=(), compare=False)
    columns: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    program: Any = field(default=None, compare=False, repr=False)
    bits: Hashable = field(default=None, compare=False, repr=False)
    estimate: Callable[[], Estimate] | None = field(default=None, compare=False, repr=False)
    with_other_rows: Callable[[], tuple[str, ...]] = field(default=tuple, compare=False, repr=False)

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that a launch needs."""
        return self.workspace() if callable(self.workspace) else self.workspace

    @property
    def transports(self) -> tuple[tuple[str, str], ...]:
        """How each operand, in the order of the loads, and each output travels, as pairs of name and text."""
        return self._made_details.transports

    @property
    def notes(self) -> tuple[str, ...]:
        """Further lines for the text of the plan."""
        return self._made_details.notes

    @cached_property
    def _made_details(self) -> Details:
        return self.details() if callable(self.details) else self.details


class Reason(str):
    """Why something cannot be done, with the place in the user's source that is the cause."""

    loc: Loc | None

    def __new__(cls, text: str, loc: Loc | None) -> Reason:
        made = super().__new__(cls, text)
        made.loc = loc
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Reason, (str(self), self.loc)


@dataclass(frozen=True)
class Refusal:
    """Why a kernel cannot run a problem, in the user's terms, and the place in their source that is the cause.

    `why` is a `Reason`, a text without a place, or a function that returns one, since the reason is rarely asked for.
    """

    kernel: str
    why: str | Callable[[], str]

    @cached_property
    def reason(self) -> str:
        """The reason as text."""
        return self.why() if callable(self.why) else self.why

    @property
    def loc(self) -> Loc | None:
        """The place that the reason is about, or None."""
        return self.reason.loc if isinstance(self.reason, Reason) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Refusal, (self.kernel, self.reason)

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


def _unknown(rows: int) -> None:
    """The default of `Answers.of_rows`: the costs with another number of rows are not known."""


class Answers(NamedTuple):
    """A provider's answer for a problem: which of its kernels can run it, and why the others cannot.

    `specs` are the kernels that can, and `costs` are in the same order; the lowest is best. `allocation` makes the
    allocation of the kernel at an index, and `refusals` lists the reasons: both are functions, since only one of thirty
    designs runs. `of_rows` gives the costs of the same problem with another number of rows. It gives None if more than
    the costs would change with that number, or if this is not known.
    """

    specs: Sequence[KernelSpec]
    costs: Sequence[float]
    allocation: Callable[[int], Allocation]
    refusals: Callable[[], Sequence[Refusal]]
    of_rows: Callable[[int], Sequence[float] | None] = _unknown

    @staticmethod
    def of(answers: Iterable[tuple[KernelSpec, Allocation | Refusal]]) -> Answers:
        """The answers from allocations and refusals that exist already."""
        specs, made, refused = [], [], []
        for spec, answer in answers:
            if isinstance(answer, Refusal):
                refused.append(answer)
            else:
                specs.append(spec)
                made.append(answer)
        return Answers(specs, [allocation.cost for allocation in made], made.__getitem__, lambda: refused)

    def followed_by(self, other: Answers) -> Answers:
        """These answers followed by those of `other`, which are about other kernels."""
        own = len(self.specs)

        def of_rows(rows: int) -> Sequence[float] | None:
            if (first := self.of_rows(rows)) is None or (further := other.of_rows(rows)) is None:
                return None
            return [*first, *further]

        return Answers(
            [*self.specs, *other.specs],
            [*self.costs, *other.costs],
            lambda index: self.allocation(index) if index < own else other.allocation(index - own),
            lambda: [*self.refusals(), *other.refusals()],
            of_rows,
        )

    def by_name(self) -> dict[str, Allocation | Refusal]:
        """The allocation or the refusal of every kernel, by the kernel's name."""
        found: dict[str, Allocation | Refusal] = {one.kernel: one for one in self.refusals()}
        return found | {spec.name: self.allocation(index) for index, spec in enumerate(self.specs)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all allocations and refusals made, since functions cannot be pickled."""
        made = tuple(map(self.allocation, range(len(self.specs))))
        return _made, (tuple(self.specs), tuple(self.costs), made, tuple(self.refusals()))

    @staticmethod
    def none(refusals: Callable[[], Sequence[Refusal]]) -> Answers:
        """The answers if no kernel can run the problem with any number of rows."""
        return Answers((), (), _NO_ALLOCATIONS.__getitem__, refusals, lambda _: ())


def _made(
    specs: Sequence[KernelSpec], costs: Sequence[float], made: Sequence[Allocation], told: Sequence[Refusal]
) -> Answers:
    return Answers(specs, costs, made.__getitem__, lambda: told)


_NO_ALLOCATIONS: tuple[Allocation, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One way to run one problem.

    `binding` holds the names of operands and outputs in the order in which the digest numbers them. Digest and binding
    determine the graph, so the graph is not compared.
    """

    spec: KernelSpec
    problem: Problem
    digest: str
    binding: tuple[str, ...]
    allocation: Allocation
    graph: Graph = field(compare=False, repr=False)

    def with_rows(self, rows: int) -> Plan:
        """The plan of the same kernel for another number of rows, on which the allocation must not depend."""
        return Plan(self.spec, self.problem.with_rows(rows), self.digest, self.binding, self.allocation, self.graph)

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages in the order in which they run."""
        found = {
            (stage.sweep, ("tile", "row", "finish").index(stage.kind)): str(stage) for stage in _stages(self.graph)
        }
        # Stages before the first sweep have the same names as those in it.
        return tuple(dict.fromkeys(found[key] for key in sorted(found)))

    def __str__(self) -> str:
        lines = [
            f"plan {self.digest[:12]}: {self.spec.name} ({self.spec.summary})",
            f"  problem  {self.problem.describe()}",
        ]
        lines += self._body()
        if not self.allocation.launches and (count := sweeps(self.graph)) > 1:
            lines.append(f"  note     {count} sweeps: the product is computed {count} times")
        for name in unused_operands(self.graph):
            lines.append(f"  note     operand '{name}' is not used and not loaded")
        return "\n".join(lines)

    def _body(self) -> list[str]:
        if launches := self.allocation.launches:
            return self._launches(launches)
        tile = " x ".join(map(str, self.allocation.tile))
        lines = [f"  tile     {tile}, stages: {', '.join(self.stages)}"]
        lines += [f"  load     {line}" for line in self._loads()]
        lines += [f"  store    {line}" for line in self._stores()]
        return lines + [f"  note     {note}" for note in self.allocation.notes]

    def _launches(self, launches: tuple[Plan, ...]) -> list[str]:
        count = len(launches)
        times = "twice" if count == 2 else f"{count} times"
        told = f"the product is computed {times}, {count}.0 x the FLOPs"
        if columns := self.allocation.columns:
            told = f"columns {', '.join(f'{start}:{stop}' for start, stop in columns)} of the product"
        lines = [f"  {count} launch{'es' * (count > 1)}: {told}"]
        for number, launch in enumerate(launches, 1):
            indent = "  " * bool(launch.allocation.launches)
            lines += [f"  launch {number}", *[indent + line for line in launch._body()]]
        return lines + [f"  note     {note}" for note in self.allocation.notes]

    def _loads(self) -> list[str]:
        by_name = self.problem.by_name
        # An operand that is loaded in two views travels in two ways, in the order of its loads.
        transports: dict[str, list[str]] = {}
        for name, way in self.allocation.transports:
            transports.setdefault(name, []).append(way)
        lines = []
        for node in self.graph.loads():
            load = node.attr
            assert isinstance(load, Load)
            type_ = self.graph.types[node]
            source = str(by_name[load.name]) if load.name in by_name else "computed on the host"
            ways = transports.get(load.name, [])
            via = f", {ways.pop(0) if len(ways) > 1 else ways[0]}" if ways else ""
            where = "".join(f", for columns {columns}" for columns in regions_of(type_.factors))
            lines.append(f"{load.name}: {access_class(type_)}, {source}{via}{where}")
        return lines

    def _stores(self) -> list[str]:
        dtypes = dict(self.problem.dtypes)
        transports = dict(self.allocation.transports)
        lines = []
        for output in self.graph.outputs:
            type_ = self.graph.types[output.node]
            access = access_class(type_)
            dims = show_dims(output.dims or ()) + (", computed in int64" if type_.kind == "int64" else "")
            via = f", {transports[output.name]}" if output.name in transports else ""
            lines.append(f"{output.name}: {access}, {short(dtypes[output.name])}{dims}{via}")
        return lines


def _stages(graph: Graph) -> list[Stage]:
    return [graph.stages[node] for node in graph.nodes if node.op not in ("const", "load")]
