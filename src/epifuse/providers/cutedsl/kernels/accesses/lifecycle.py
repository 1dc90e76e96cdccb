"""Accesses in a kernel: a class with a lifecycle for each way, for all operands or all outputs that travel that way.

Once a launch run `carriers` on the host, `allocate` and `buffers` in every thread, and `initialise` in one thread. Once
a tile: `fetch` before the main loop, which hides its latency, and `deposit` behind it. Once a subtile: `arrive`, while
the subtile before is computed; `visit` and `store`, while this one is. `rows` and `store_rows` are for operands and
outputs of which a row or segment has one value.

A *way* is how a tensor is loaded or stored, as `tile` by TMA. It needs a class here, its row in `LOADS` or `STORES` of
this package, and what planning knows of it in `ways.py`.
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
        """The type of an operand's values in registers; masks are int32."""
        return HELD["int32" if self.kinds[i] == "mask" else self.kinds[i]]

    def walked(self, s: Any) -> tuple[Any, Any]:
        """Return (down, right) of the subtile at step `s` of a walk.

        A walk goes along rows, so that the two stores which fill one line of memory follow each other soon. With
        reductions down columns it goes down, so that only one column of subtiles holds partial results at a time.
        """
        down, across = self.division.down, self.division.across
        return (s % down, s // down) if self._down_first else (s // across, s % across)

    def pieces(self, access: Access, spot: Spot, place: Place, team: Team) -> list[Any]:
        """Return the pieces of each register's column, or None; see `Division.pieces`."""
        columns = [spot.right * self.design.subtile[1] + column for _, column in self.fragment.registers]
        return [self.division.pieces(access.inner[1], column, team.columns[0], place) for column in columns]

    def begins(self, s: int) -> bool:
        """Whether subtile `s` of the last walk begins a block. All other walks over the block come before it."""
        block = self.slots.subtiles if len(self.walks) > 1 else self.division.subtiles
        return s % block == 0

    def is_read_ahead(self, s: int) -> bool:
        """Whether the operands of subtile `s` of the last walk are read while the subtile before is computed."""
        return self.reads_ahead and not self.begins(s)


class Given(NamedTuple):
    """What the launch was given: operands, numbers, outputs, the workspace of reductions or None, and (M, N, L).

    `ends` is (M, N, L), limited to the rows of the present tile if the tile has fewer rows than are multiplied for it.
    """

    tensors: Any
    numbers: Any
    outputs: Any
    workspace: Any
    shape: Any
    ends: Any

    def limits(self, access: Access) -> list[Any]:
        """Where an output ends along M, N and L: at 1 if it does not vary over the axis, as it is written once."""
        return [end if axis in access.axes else 1 for axis, end in zip("mnl", self.ends, strict=True)]


class Shared(NamedTuple):
    """The epilogue's shared memory: `own` has that of each access, by number, `received` that of the exchange."""

    own: Sequence[Any]
    received: Any


class Tile(NamedTuple):
    """What a warp group holds while it computes a tile.

    `held`: scalars and vectors by operand. `kept`: partial results that are merged after all tiles. `late`: partial
    results of segments that the last walk completes. `lines`: by node the values that each row or segment has one of,
    for a lane's own slots; `shown`: the same for all slots.
    """

    place: Place
    held: dict[int, Any]
    kept: list[Any]
    late: list[Any]
    lines: dict[Any, Any]
    shown: dict[Any, Any]


class Spot(NamedTuple):
    """A subtile: its number from above and from the left, and the rows and columns of this thread's values."""

    down: Any
    right: Any
    rows: Sequence[Any]
    columns: Sequence[Any]


class Before(NamedTuple):
    """What a warp group did before a tile: how many tiles, and how many rounds in which operands filled all stages."""

    tiles: Any
    rounds: Any


class Last(NamedTuple):
    """Whether a tile is the CTA's last one, `within`, which is this warp group's number among those that share the
    tile, and `starts`: by round of subtiles, where the operands of the last tile were loaded early (`Spare.starts`)."""

    is_last: Any
    within: Any
    starts: Mapping[int, Sequence[Any]]


class Team:
    """A thread of a warp group at a tile, and the places of its values in a subtile.

    `mma` says which values a thread has: a tiled multiplication, or `Slabs` in its place. `group` is the warp group's
    number. `own` has what the `begin` of each access stored for later, by the access's number.
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
    """One access. `members` are its operands or outputs, by number. `number` is that of the access among all."""

    deposits = False
    """Whether `deposit` writes to shared memory."""

    def __init__(self, scene: Scene, members: Sequence[int], number: int) -> None:
        self.scene, self.members, self.number = scene, members, number

    def carriers(self, given: Any) -> tuple[Any, ...]:
        """On the host: what TMA needs for each member (`tile.Carrier`). `given` are all operands, or all outputs."""
        return ()

    def allocate(self, allocator: Any) -> Any:
        """Allocate shared memory that needs no wide alignment."""
        return None

    def buffers(self, allocator: Any, allocated: Any, carriers: Any, given: Any) -> Any:
        """Return all shared memory of the access: what `allocate` returned, and what needs wide alignment."""
        return allocated

    @property
    def barriers(self) -> int:
        """The number of barriers that `initialise` initialises."""
        return 0

    def initialise(self, own: Any) -> None:
        """Called by one thread, before all else: initialise the barriers."""

    def begin(self, team: Team) -> None:
        """Called by a warp group behind the main loop of a tile: prepare `team.own` for the tile."""


class Loads(Lifecycle):
    """The operands that travel one way."""

    def fetch(self, place: Place, thread: Any, given: Given) -> dict[int, Any]:
        """Before the main loop: load what the tile needs into registers. Lanes outside the result read its edge."""
        return {}

    def deposit(self, held: Fragments, own: Any, group: Any, thread: Any) -> None:
        """Behind the main loop: write what was fetched to shared memory."""

    def arrive(self, walk: int, s: int, team: Team) -> dict[int, Any]:
        """Return what subtile `s` of a walk reads ahead, by operand, while the subtile before is computed."""
        return {}

    def visit(self, i: int, like: Any, spot: Spot, tile: Tile, team: Team) -> Any:
        """Return an operand's values at a subtile, shaped as `like`."""
        raise NotImplementedError

    def rows(self, i: int, like: Any, places: Places, tile: Tile, team: Team) -> Any:
        """Return an operand's values of rows or segments, one for each of a thread's slots."""
        raise NotImplementedError


class Stores(Lifecycle):
    """The outputs that travel one way."""

    def store(self, results: Sequence[Any], spot: Spot, tile: Tile, team: Team) -> None:
        """Store the values of a subtile. `results` has those of all outputs, in their dtypes."""

    def store_rows(self, nodes: Sequence[Node], places: Places, tile: Tile, team: Team) -> None:
        """Store those members that are among `nodes`, of which a row or segment has one value."""
