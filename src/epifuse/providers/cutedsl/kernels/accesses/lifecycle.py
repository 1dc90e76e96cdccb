"""What an access is in a kernel: a class with a lifecycle, for all operands or all outputs that travel one way.

Of a launch: `carriers` on the host; `allocate`, `buffers` and `initialise` by every thread. Of a tile: `fetch` before
the main loop, whose latency it then hides, and `deposit` behind it. Of a subtile: `arrive`, while the one before is
computed; `visit` and `store`, where it is computed. `rows` and `store_rows` are for what a row or segment has one of.

A way needs a class here, its row in `LOADS` or `STORES` of this package, and what planning knows of it in `ways.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cutlass.cute as cute

from epifuse.ir import Node
from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.device_types import HELD
from epifuse.providers.cutedsl.kernels.fragment import Fragment
from epifuse.providers.cutedsl.kernels.place import Division, Place
from epifuse.providers.cutedsl.kernels.slots import Places, Slots
from epifuse.providers.cutedsl.partials import reductions_of_tiles
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.rows import walks
from epifuse.providers.cutedsl.ways import Access

Fragments = Mapping[int, Any]
"""Values of operands, by their number among the program's tensors."""


class Scene:
    """What a kernel's accesses know while it is traced."""

    def __init__(self, design: Design, program: Program, fragment: Fragment) -> None:
        self.design, self.program, self.fragment = design, program, fragment
        self.division = Division(design)
        self.walks = walks(program.graph)
        self.loads = [access for _, access in program.tensors]
        self.kinds = [program.graph.types[node].kind for node, _ in program.tensors]
        self.numbers = {node: i for i, (node, _) in enumerate(program.tensors)}
        self.reads_ahead = budget.reads_ahead(design, program)
        self._down_first = any(reduction.axis == "n" for reduction in reductions_of_tiles(program.graph))
        self.slots = Slots(program.graph, self.division, fragment, down_first=self._down_first)

    def held(self, i: int) -> Any:
        """What an operand's values are in registers."""
        return HELD["int32" if self.kinds[i] == "mask" else self.kinds[i]]

    def walked(self, s: Any) -> tuple[Any, Any]:
        """How far down and right a walk over subtiles is at step `s`.

        It goes along rows, so that the two stores which fill one line of memory follow each other soon. With
        reductions along columns it goes down, and one column of subtiles holds partial results.
        """
        down, across = self.division.down, self.division.across
        return (s % down, s // down) if self._down_first else (s // across, s % across)

    def pieces(self, access: Access, spot: Spot, place: Place, team: Team) -> list[Any]:
        """Of each register the pieces of its column, or None; see `Division.pieces`."""
        columns = [spot.right * self.design.subtile[1] + column for _, column in self.fragment.registers]
        return [self.division.pieces(access.inner[1], column, team.columns[0], place) for column in columns]

    def begins(self, s: int) -> bool:
        """Whether subtile `s` of the last walk is computed behind other walks."""
        block = self.slots.subtiles if len(self.walks) > 1 else self.division.subtiles
        return s % block == 0

    def is_read_ahead(self, s: int) -> bool:
        """Whether what subtile `s` of the last walk reads is read while the one before is computed."""
        return self.reads_ahead and not self.begins(s)


class Given(NamedTuple):
    """What the launch was given: operands, numbers, outputs, the workspace of reductions or None, and (M, N, L).

    `ends`: the same as far as the values of a tile belong to it.
    """

    tensors: Any
    numbers: Any
    outputs: Any
    workspace: Any
    shape: Any
    ends: Any

    def limits(self, access: Access) -> list[Any]:
        """Up to where an output is written: what does not vary over an axis is written once."""
        return [end if axis in access.axes else 1 for axis, end in zip("mnl", self.ends, strict=True)]


class Shared(NamedTuple):
    """The epilogue's shared memory: what each access has, by its number, and what a cluster tells."""

    own: Sequence[Any]
    heard: Any


class Tile(NamedTuple):
    """What a warp group holds while it is at a tile: scalars and vectors, partial results of what is merged and of
    segments that the last walk completes, and what rows and segments make: of a lane's own slots, and `shown` of all.
    """

    place: Place
    held: dict[int, Any]
    kept: list[Any]
    late: list[Any]
    lines: dict[Any, Any]
    shown: dict[Any, Any]


class Spot(NamedTuple):
    """A subtile: how far down and right it is in the warp group's, and where this thread's values lie in the result."""

    down: Any
    right: Any
    rows: Sequence[Any]
    columns: Sequence[Any]


class Before(NamedTuple):
    """What a warp group did before a tile: how many tiles, and how often their operands filled all their stages."""

    tiles: Any
    rounds: Any


class Last(NamedTuple):
    """Whether a tile is the CTA's last one, `within`: this warp group's number among those that share the tile, and by
    round of subtiles where the operands of the last tile were loaded early."""

    is_last: Any
    within: Any
    starts: Mapping[int, Sequence[Any]]


class Team:
    """A thread of a warp group at a tile, and the places of its values in a subtile.

    `mma` says which values a thread has: a tiled multiplication, or what stands in its place. `group` is the warp
    group's number. `own` has what each access made of it for itself.
    """

    def __init__(
        self, scene: Scene, mma: Any, thread: Any, group: Any, before: Before, shared: Shared, given: Given, last: Last
    ) -> None:
        self.mma, self.thread, self.group, self.before = mma, thread, group, before
        self.shared, self.given, self.last = shared, given, last
        self.shape = mma.partition_shape_C(scene.design.subtile)
        self.count = cute.size(self.shape)
        places = mma.get_slice(thread).partition_C(cute.make_identity_tensor(scene.design.subtile))
        self.rows = [places[registers[0]][0] for registers in scene.fragment.by_row]
        self.columns = [places[registers[0]][1] for registers in scene.fragment.by_column]
        self.own: dict[int, Any] = {}


class Lifecycle:
    """The accesses `members`, numbers among the program's tensors or outputs. `number` is this one's among all."""

    deposits = False
    """Whether `deposit` writes to shared memory."""

    def __init__(self, scene: Scene, members: Sequence[int], number: int) -> None:
        self.scene, self.members, self.number = scene, members, number

    def carriers(self, given: Any) -> tuple[Any, ...]:
        """On the host: TMA's descriptors for the members; `given` are all operands, or all outputs."""
        return ()

    def allocate(self, allocator: Any) -> Any:
        """Shared memory that needs no wide alignment."""
        return None

    def buffers(self, allocator: Any, allocated: Any, carriers: Any, given: Any) -> Any:
        """All shared memory: what `allocate` gave, and what needs wide alignment."""
        return allocated

    @property
    def barriers(self) -> int:
        """How many barriers `initialise` has to do with."""
        return 0

    def initialise(self, own: Any) -> None:
        """One thread, before all else."""

    def begin(self, team: Team) -> None:
        """A warp group, once its tile is multiplied."""


class Loads(Lifecycle):
    """Operands that travel one way."""

    def fetch(self, place: Place, thread: Any, given: Given) -> dict[int, Any]:
        """Before the main loop: values that the tile needs, in registers. Lanes outside the result read its edge."""
        return {}

    def deposit(self, held: Fragments, own: Any, group: Any, thread: Any) -> None:
        """Behind the main loop: what was fetched, to shared memory."""

    def arrive(self, walk: int, s: int, team: Team) -> dict[int, Any]:
        """What subtile `s` of a walk reads ahead, while the one before is computed."""
        return {}

    def visit(self, i: int, like: Any, spot: Spot, tile: Tile, team: Team) -> Any:
        """An operand's values at a subtile, shaped as `like`."""
        raise NotImplementedError

    def rows(self, i: int, like: Any, places: Places, tile: Tile, team: Team) -> Any:
        """An operand's values of rows or segments, one for each of a thread's slots."""
        raise NotImplementedError


class Stores(Lifecycle):
    """Outputs that travel one way."""

    def store(self, results: Sequence[Any], spot: Spot, tile: Tile, team: Team) -> None:
        """Values of a subtile, in the outputs' dtypes."""

    def store_rows(self, nodes: Sequence[Node], places: Places, tile: Tile, team: Team) -> None:
        """Those of `nodes` that are stored, values of which a row or segment has one."""
