"""Tiles that TMA moves, subtile by subtile, through swizzled shared memory. Registers have the accumulator's order.

A stage here has one subtile of each operand, or of each output, and each warp group has its own stages. A producer warp
brings operands stage by stage. One mbarrier says that a stage is full: its bytes are there. Another one says that it is
empty: each warp of the warp group has read it. Outputs leave in groups of TMA stores, and a stage is free once TMA has
read its group.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import cpasync, warp

from epifuse.providers.cutedsl import tuned
from epifuse.providers.cutedsl.design import MATH_GROUPS, WARPS
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Loads, Scene, Stores, Team
from epifuse.providers.cutedsl.kernels.compat import LayoutEnum
from epifuse.providers.cutedsl.kernels.modes import under
from epifuse.providers.cutedsl.kernels.place import Place
from epifuse.providers.cutedsl.kernels.spare import Spare, leave_unless, shifted, wait_either


class Carrier(NamedTuple):
    """What TMA needs for one staged tensor: its atom, its coordinates, the layout of its buffer."""

    atom: Any
    tensor: Any
    layout: Any


class Stages(NamedTuple):
    """Shared memory: the buffer of each member, and the barriers of stages of operands."""

    buffers: Sequence[Any]
    barriers: Any


class TileLoads(Loads):
    """Operands that TMA brings."""

    def __init__(self, scene: Scene, members: Sequence[int], number: int) -> None:
        super().__init__(scene, members, number)
        self.stages, self.box = scene.design.load_stages, scene.design.subtile
        self.spare = Spare(scene.design, scene.program)
        self.bringing = [walk for walk in range(len(scene.walks)) if self._is_read(walk)]

    def _is_read(self, walk: int) -> bool:
        return any(self.scene.numbers.get(node) in self.members for node in self.scene.walks[walk].nodes)

    @property
    def brought(self) -> int:
        """How many subtiles a producer warp brings for a tile: all subtiles, for each walk that reads members."""
        return len(self.bringing) * self.scene.division.subtiles

    @property
    def rounds(self) -> int:
        """How often a tile fills all stages."""
        return self.brought // self.stages if self.members else 0

    def subtile(self, arrival: Any) -> Any:
        """The subtile of a tile that is brought as number `arrival` of those of the tile."""
        block, subtiles = self.scene.slots.subtiles, self.scene.division.subtiles
        if block == subtiles:
            return arrival % subtiles
        return arrival // (len(self.bringing) * block) * block + arrival % block

    @property
    def brought_bytes(self) -> int:
        """Bytes of one value of each member, added up."""
        return sum(self.scene.loads[i].dtype.itemsize for i in self.members)

    # Once a launch.

    def carriers(self, given: Any) -> tuple[Any, ...]:
        load = cpasync.CopyBulkTensorTileG2SOp  # made only for members: GPUs before Hopper have none
        return tuple(_carrier(load(), given[i], self.box, self.box, self.stages) for i in self.members)

    @property
    def barriers(self) -> int:
        return 2 * MATH_GROUPS * self.stages + self.spare.barriers if self.members else 0

    def allocate(self, allocator: Any) -> Any:
        return allocator.allocate_array(Int64, self.barriers) if self.members else None

    def buffers(self, allocator: Any, allocated: Any, carriers: Any, given: Any) -> Stages:
        return Stages(_buffers(allocator, carriers, [given[i] for i in self.members]), allocated)

    def initialise(self, own: Stages) -> None:
        """A stage is full after one arrival and its bytes, and empty after one arrival a warp."""
        for i in range(MATH_GROUPS * self.stages):
            cute.arch.mbarrier_init(own.barriers + 2 * i, 1)
            cute.arch.mbarrier_init(own.barriers + 2 * i + 1, WARPS)
        for i in range(self.spare.barriers):
            cute.arch.mbarrier_init(own.barriers + (self.spare.first + i), 1)

    def partitions(self, own: Stages, carriers: Any) -> list[Any]:
        """The shared and the global side of each member's copy."""
        pairs = zip(carriers, own.buffers, strict=True)
        return [_partition(carrier, buffer, self.box) for carrier, buffer in pairs]

    # The producer warp of a warp group.

    def bring(self, s: Any, arrivals: Any, place: Place, group: Any, own: Stages, tma: tuple[Any, Any]) -> None:
        """Load subtile `s` of every member once its stage is empty.

        `arrivals` counts the subtiles brought before; `tma` has the carriers and their partitions.
        """
        slot = arrivals % self.stages
        full = self._full(own, group, slot)
        cute.arch.mbarrier_wait(full + 1, ((arrivals // self.stages) & 1) ^ 1)
        self._expect(full, 1)
        slots = [to[None, 0, 0, group * self.stages + slot] for to, _ in tma[1]]
        self._copy(s, place, slots, full, tma)

    def bring_rest(self, starts: Any, place: Place, own: Stages, tma: tuple[Any, Any]) -> None:
        """Load all rounds of subtiles of the last tile but the first one into spare stages, to `starts`."""
        for round_, starts_ in starts.items():
            full = self.spare.arrival_barrier(own.barriers, place.within, round_)
            self._expect(full, self.stages)
            for slot in range(self.stages):
                pairs = zip(tma[1], starts_, strict=True)
                slots = [shifted(to[None, 0, 0, slot], start) for (to, _), start in pairs]
                self._copy(round_ * self.stages + slot, place, slots, full, tma)

    def _full(self, own: Stages, group: Any, slot: Any) -> Any:
        return own.barriers + 2 * (group * self.stages + slot)

    def _expect(self, full: Any, subtiles: int) -> None:
        """Tell a barrier how many bytes are to come."""
        bytes_each = math.prod(self.box) * self.brought_bytes
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, subtiles * bytes_each)

    def _copy(self, s: Any, place: Place, slots: Sequence[Any], full: Any, tma: tuple[Any, Any]) -> None:
        i, j = self.scene.division.subtile(*self.scene.walked(s), place)
        for index, carrier, to, (_, from_) in zip(self.members, tma[0], slots, tma[1], strict=True):
            access = self.scene.loads[index]
            l = place.l if "l" in access.axes else 0
            right = j % (access.period // self.box[1]) if access.period else j
            cute.copy(carrier.atom, from_[None, i, right, l], to, tma_bar_ptr=full)

    # A warp group.

    def begin(self, team: Team) -> None:
        buffers, tensors = team.shared.own[self.number].buffers, team.given.tensors
        readers = [_reader(team, tensors[i], buffer) for i, buffer in zip(self.members, buffers, strict=True)]
        starts = {round_: self._selected(found, team) for round_, found in team.last.starts.items()}
        team.own[self.number] = readers, starts

    def _selected(self, starts: Sequence[Any], team: Team) -> list[Any]:
        """Where the members of a round begin: in spare stages if the tile is the last one, else in their own stages."""
        slot, buffers = team.group * self.stages, team.shared.own[self.number].buffers
        own = [self.spare.own_start(slot, buffer) for buffer in buffers]
        return [cutlass.select_(team.last.is_last, *pair) for pair in zip(starts, own, strict=True)]

    def early(self, team: Team) -> list[dict[int, Any]]:
        """Return fragments of the first subtiles, read while the last multiplications are under way.

        So their stages are free again earlier. Nothing is read early where registers are lacking: with several walks
        over the accumulator, or with several operands.
        """
        several = len(self.scene.walks) > 1 or not self.scene.reads_ahead
        if not self.bringing or several or self.brought_bytes > tuned.EARLY_BYTES.value:
            return []
        early = min(tuned.EARLY_SUBTILES.value, self.stages, self.scene.division.subtiles)
        return [self._read(0, s, team) for s in range(early)]

    def reads_behind(self, s: int, early: Sequence[Any]) -> bool:
        """Whether subtile `s` of the last walk is read ahead, with a fence behind the read."""
        last = len(self.scene.walks) - 1
        return last in self.bringing and len(early) <= s < self.scene.division.subtiles and self.scene.is_read_ahead(s)

    def arrive(self, walk: int, s: int, team: Team) -> dict[int, Any]:
        return self._read(walk, s, team) if walk in self.bringing else {}

    def _read(self, walk: int, s: int, team: Team) -> dict[int, Any]:
        """Return fragments of the members at subtile `s` of a walk, and free their stage."""
        own, (readers, rounds_waiting) = team.shared.own[self.number], team.own[self.number]
        block = self.scene.slots.subtiles
        step = (s // block * len(self.bringing) + self.bringing.index(walk)) * block + s % block
        slot = step % self.stages
        full = self._full(own, team.group, slot)
        parity = (team.before.rounds + step // self.stages) & 1
        starts = rounds_waiting.get(step // self.stages)
        if starts is None:
            cute.arch.mbarrier_wait(full, parity)
            sources = [source[None, None, None, team.group * self.stages + slot] for _, _, source in readers]
        else:
            arrived = self.spare.arrival_barrier(own.barriers, team.last.within, step // self.stages)
            wait_either(team.last.is_last, arrived, full, parity)
            pairs = zip(readers, starts, strict=True)
            sources = [shifted(source[None, None, None, slot], start) for (_, _, source), start in pairs]
        found = {}
        for i, (copy, shape, _), source in zip(self.members, readers, sources, strict=True):
            fragment = cute.make_rmem_tensor(team.shape, source.element_type)
            cute.copy(copy, source, under(fragment, shape))
            found[i] = fragment.load()
        # An arrival alone may overtake a read that is still under way, and the next load then overwrites what is read:
        # one element of 58 million was wrong.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if starts is None:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full + 1)
        else:
            leave_unless(team.last.is_last, full + 1)
        return found


class TileStores(Stores):
    """Outputs that TMA stores."""

    def __init__(self, scene: Scene, members: Sequence[int], number: int) -> None:
        super().__init__(scene, members, number)
        self.stages, self.box = scene.design.store_stages, scene.design.subtile
        # If a warp's rows lie together in memory, it sends them itself, and waits for no other warp
        # (kernel_variants.json#senders). A column-major subtile leaves as a whole, or its lines would be cut in four.
        self.senders = WARPS if all(scene.program.stores[i].by_rows for i in members) else 1
        self._sent = self.box[0] // self.senders, self.box[1]  # rows and columns of a subtile that one warp sends

    def carriers(self, given: Any) -> tuple[Any, ...]:
        store = cpasync.CopyBulkTensorTileS2GOp
        return tuple(_carrier(store(), given[i], self.box, self._sent, self.stages) for i in self.members)

    def buffers(self, allocator: Any, allocated: Any, carriers: Any, given: Any) -> Stages:
        return Stages(_buffers(allocator, carriers, [given[i] for i in self.members]), None)

    def partitions(self, own: Stages, carriers: Any) -> list[Any]:
        """The shared and the global side of each member's copy."""
        return [_partition(carrier, buffer, self._sent) for carrier, buffer in zip(carriers, own.buffers, strict=True)]

    def begin(self, team: Team) -> None:
        buffers, outputs = team.shared.own[self.number].buffers, team.given.outputs
        pairs = zip(self.members, buffers, strict=True)
        team.own[self.number] = [_writer(team, outputs[i], buffer) for i, buffer in pairs]

    def stage(self, s: int, results: Sequence[Any], team: Team) -> None:
        """Write subtile `s` of the members to shared memory. `results` has the values of all outputs."""
        for i, (copy, shape, slots) in zip(self.members, team.own[self.number], strict=True):
            at = (None, None, None, team.group * self.stages + s % self.stages)
            cute.copy(copy, under(results[i], shape), slots[at])

    def send(self, s: int, place: Place, group: Any, sender: Any, policy: Any, tma: tuple[Any, Any]) -> None:
        """Called by each warp that sends: begin the TMA stores of its rows of subtile `s`."""
        slot = group * self.stages + s % self.stages
        i, j = self.scene.division.subtile(*self.scene.walked(s), place)
        for carrier, (from_, to) in zip(*tma, strict=True):
            box = to[None, i * self.senders + sender, j, place.l]
            cute.copy(carrier.atom, from_[None, sender, 0, slot], box, cache_policy=policy)
        cute.arch.cp_async_bulk_commit_group()


def _carrier(op: Any, tensor: Any, subtile: tuple[int, int], box: tuple[int, int], stages: int) -> Carrier:
    """Return the carrier for TMA copies of boxes. A subtile, for which a slot has room, holds one or more boxes."""
    major = LayoutEnum.from_tensor(tensor)
    layout = sm90.make_smem_layout_epi(tensor.element_type, major, subtile, stages * MATH_GROUPS)
    one = cute.slice_(sm90.make_smem_layout_epi(tensor.element_type, major, box, 1), (None, None, 0))
    atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, one, box)
    return Carrier(atom, coordinates, layout)


def _buffers(allocator: Any, carriers: Any, tensors: Sequence[Any]) -> list[Any]:
    layouts = (carrier.layout for carrier in carriers)
    return [
        allocator.allocate_tensor(tensor.element_type, layout.outer, 1024, layout.inner)
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]


def _partition(carrier: Carrier, buffer: Any, box: tuple[int, int]) -> Any:
    """The shared and the global side of a TMA copy of whole boxes."""
    tiles = cute.local_tile(carrier.tensor, box, (None, None, None))
    slots = cute.local_tile(buffer, box, (None, None, None))
    return cpasync.tma_partition(
        carrier.atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def _reader(team: Team, tensor: Any, buffer: Any) -> tuple[Any, Any, Any]:
    """The copy from shared memory into the accumulator's order, its shape, and this thread's side of the buffer."""
    major = LayoutEnum.from_tensor(tensor)
    if tensor.element_type.width != 16:
        return _writer(team, tensor, buffer)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(major.is_m_major_c(), 4), tensor.element_type)
    copy = cute.make_tiled_copy_C_atom(atom, team.mma)
    mine = copy.get_slice(team.thread)
    return copy, cute.shape(mine.partition_D(buffer))[:3], mine.partition_S(buffer)


def _writer(team: Team, tensor: Any, buffer: Any) -> tuple[Any, Any, Any]:
    major = LayoutEnum.from_tensor(tensor)
    atom = sm90.get_smem_store_op(major, elem_ty_d=tensor.element_type, elem_ty_acc=Float32)
    base = cute.make_copy_atom(warp.StMatrix8x8x16bOp(major.is_m_major_c(), 4), cutlass.Float16)
    copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(base, team.mma))
    mine = copy.get_slice(team.thread)
    return copy, cute.shape(mine.partition_S(buffer))[:3], mine.partition_D(buffer)
