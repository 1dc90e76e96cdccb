"""Hopper GEMM: persistent, warp-specialised, TMA with cluster multicast, the graph's epilogue on the accumulator.

Warp group 0 is the producer: warp 0 loads A and B, warps 1 and 2 load the epilogue's tiles. Two consumer warp groups
multiply and run the epilogue. They share each tile (cooperative), or each has its own tiles, and they take turns at the
tensor cores, so that the epilogue of one hides behind the main loop of the other (ping-pong). The epilogue's loop over
subtiles is unrolled, because a run-time index into the accumulator would move it to local memory.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr, extract_mlir_values, new_from_mlir_values, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import MATH_GROUPS, WARP_GROUP, Design
from epifuse.providers.cutedsl.kernels import direct
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Before, Last
from epifuse.providers.cutedsl.kernels.block_scales import BlockScales
from epifuse.providers.cutedsl.kernels.compat import LayoutEnum, SmemAllocator
from epifuse.providers.cutedsl.kernels.converted import Converted
from epifuse.providers.cutedsl.kernels.direct import TOGETHER
from epifuse.providers.cutedsl.kernels.fragment import Fragment
from epifuse.providers.cutedsl.kernels.merge import merging_kernels
from epifuse.providers.cutedsl.kernels.modes import exchanged, with_batches
from epifuse.providers.cutedsl.kernels.multiply import (
    accumulator_registers,
    as_accumulators,
    in_shared_memory,
    sums,
    tiled_multiplication,
)
from epifuse.providers.cutedsl.kernels.parts import in_turn, lie_apart, parts_of, sources
from epifuse.providers.cutedsl.kernels.place import Place
from epifuse.providers.cutedsl.kernels.promotion import Promotion
from epifuse.providers.cutedsl.kernels.raster import Order, Turns
from epifuse.providers.cutedsl.kernels.regions import Regions
from epifuse.providers.cutedsl.kernels.rewrite import Rewrite
from epifuse.providers.cutedsl.kernels.split import Split
from epifuse.providers.cutedsl.kernels.states import after
from epifuse.providers.cutedsl.partials import is_carried, reductions_of
from epifuse.providers.cutedsl.program import Program

TURN = 3  # named barriers (two ids, behind those of `direct`): whose turn at the tensor cores it is
SPARE = 5  # named barrier of the producer warps: the spare stages of A and B are free

# L2 policies, in the encoding of CUTLASS's TMA::CacheHintSm90.
_EVICT_FIRST, _EVICT_NORMAL, _EVICT_LAST = 0x12F0000000000000, 0x1000000000000000, 0x14F0000000000000


class Cta(NamedTuple):
    """What all roles of a CTA know.

    `buffers` of A and B; `shared`, the epilogue's shared memory, and `carriers`, what TMA needs, for each region of N;
    `tiles` and `scales` of A and B; `turns`, the order of the tiles; `ranks` of the CTA's cluster (`Order.ranked`);
    `place` in the cluster; `first` turn, and the `step` to the next one; `part`, the number of its part of K, whose
    `k_tiles` blocks begin with block `k_first`.
    """

    buffers: tuple
    shared: Any
    carriers: tuple
    tiles: tuple
    scales: tuple
    turns: Any
    ranks: Any
    place: Any
    first: Any
    step: Any
    part: Any
    k_first: Any
    k_tiles: Any


class Hints(NamedTuple):
    """L2 policies: how long L2 keeps A, B, and what the epilogue stores."""

    a: Any
    b: Any
    outputs: Any


class Sender(NamedTuple):
    """How outputs of a warp group leave by TMA: whether this warp sends, its number among the warps that send, what TMA
    needs for the outputs, and how long L2 keeps what is sent."""

    sends: Any
    number: Any
    leaving: Any
    policy: Any


class Sm90Gemm:
    """D = epilogue(A @ B). Tensors come as (M,K,L), (K,N,L) and (M,N,L); a stride is 0 where a value does not vary.

    Without batches, A, B and the operands and outputs that travel in tiles have no L.
    """

    def __init__(self, design: Design, programs: tuple, types: tuple, accumulator: Any = Float32) -> None:
        """`programs` has a program for each region of N: mostly one, for all columns.

        `types` are those of A and B as TMA brings them: CuTe DSL 4.8.1 reads a tensor's uint8 back as int8.
        """
        program: Program = programs[0]
        self.design = design
        self.converted: Any = Converted(*types) if design.converts else None
        self.types = types = (types[1], types[1]) if design.converts else types
        self.accumulator = accumulator
        self.cluster = design.cluster
        self.pingpong = design.pingpong
        self.groups = design.sharing
        self.spare_threads = 32 * (1 + self.groups)  # threads of the producer warps that load for a tile
        self.stages = design.stages
        self.ahead = max(budget.ahead(design, one) for one in programs)
        self.reduces = any(node.op == "reduce" for one in programs for node in one.graph.nodes)
        self.scales = BlockScales(design, program.order)
        self.promotion = Promotion(design, types[0].width // 8)
        self.producer_registers = budget.producer_registers(programs)
        self.program, self.programs = program, programs
        how = design.rewritten_as_given
        self.rewrite: Any = None if how is None else Rewrite(how, types[0])
        self.split = Split(design, accumulator)
        # Ranks differ between GPUs. They must not decide which tiles a CTA adds up if it carries numbers between tiles.
        carried = any(is_carried(each) for one in programs for each in reductions_of(one.graph))
        self.order = Order(design, by_ranks=not carried)
        self.merging = merging_kernels(design, program)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        tensors: tuple,
        numbers: tuple,
        outputs: tuple,
        workspaces: tuple,
        clusters: Int32,
        band: Int32,
        ranks: Int64,
        stream: Any,
    ):
        tensors, scales = self.scales.split_off_scales(tensors)
        if const_expr(self.rewrite is not None):
            a, b, workspaces = self.rewrite.launch(a, b, workspaces[0], stream)
        if const_expr(self.design.swapped):
            a, b = exchanged(b), exchanged(a)
        a, b = with_batches(a), with_batches(b)
        b = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0, 2]))
        bm, bn = self.design.tile
        bk = 8 * self.design.k_bytes // self.types[0].width
        self.tile = bm, bn, bk
        layout_a, layout_b = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        majors = layout_a.sm90_mma_major_mode(), layout_b.sm90_mma_major_mode()
        types, self.brought = self.types, (a.element_type, b.element_type)
        columns, in_registers = budget.piece(self.design), self.design.converts
        mma = tiled_multiplication(types, majors, self.accumulator, self.groups, columns, registers=in_registers)
        # The layout of one warp group's accumulators over a subtile.
        atom = tiled_multiplication(types, majors, self.accumulator, 1, self.design.subtile[1])
        fragment = Fragment.of_accumulators(atom, self.design.subtile)
        self.regions = Regions(self.design, self.programs, fragment, self.parts(b, fragment, majors))
        self.epilogue = self.regions.first
        self.arrivals = self.epilogue.arrivals
        tensors, outputs = self.regions.whole(tensors, outputs)
        smem_a = sm90.make_smem_layout_a(layout_a, self.tile, a.element_type, self.stages)
        smem_b = sm90.make_smem_layout_b(layout_b, self.tile, b.element_type, self.stages)
        stage_a, stage_b = _stage(smem_a), _stage(smem_b)
        tma_a, tensor_a = _load_atom(a, stage_a, (bm, bk), self.cluster[1])
        parts_b = sources(b, self.program.order)
        box_b = bn // len(parts_b), bk
        one_b = sm90.make_smem_layout_b(layout_b, (bm, *box_b), b.element_type, 1)
        loads_b = tuple(_load_atom(part, _stage(one_b), box_b, self.cluster[0]) for part in parts_b)
        pairs = (a, stage_a), (b, stage_b)
        self.stage_bytes = sum(cute.size_in_bytes(tensor.element_type, stage) for tensor, stage in pairs)
        columns = cute.size(b, mode=[0])
        columns = columns // self.design.parts if self.design.parts > 1 else columns
        shape = (cute.size(a, mode=[0]), columns, cute.size(a, mode=[2]))
        step = bm * self.cluster[0], self.design.columns * self.cluster[1]
        turns = self.order.turns(shape, step, band, clusters, ranks)
        # The policy of outputs is an argument: with a constant, or none, ptxas spills up to 52 bytes more
        # (test_sm90_compile.py).
        hints = Hints(_hint(shape[1], step[1]), _hint(shape[0], step[0]), Int64(_EVICT_NORMAL))
        carriers = self.regions.carriers(tensors, outputs)
        loads = ((tma_a, tensor_a), *loads_b)
        self.kernel(
            loads,
            carriers,
            tensors,
            numbers,
            outputs,
            workspaces,
            scales,
            mma,
            atom,
            smem_a,
            smem_b,
            shape,
            turns,
            hints,
        ).launch(
            grid=(*self.cluster, clusters * self.design.split),
            block=(WARP_GROUP * (1 + MATH_GROUPS), 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )
        for merging in self.merging:
            merging.launch(workspaces[0], tensors, numbers, outputs, shape, clusters * cute.size(self.cluster), stream)

    def parts(self, b, fragment, majors):
        """Return which accumulators belong to which part of a row."""
        width, shape = self.design.columns, (self.design.subtile[0], self.tile[1])
        if self.design.parts == 1:
            return None
        mma = tiled_multiplication(self.types, majors, self.accumulator, 1, shape[1])
        rows = Fragment.of_accumulators(mma, shape)
        apart = lie_apart(b, self.program.order)
        return parts_of(fragment, rows, width, (lambda column, part: part * width + column) if apart else in_turn)

    @cute.kernel
    def kernel(
        self,
        loads: tuple,
        carriers: tuple,
        tensors: tuple,
        numbers: tuple,
        outputs: tuple,
        workspaces: tuple,
        scales: tuple,
        mma: cute.TiledMma,
        atom: cute.TiledMma,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        shape: cute.Shape,
        turns: Turns,
        hints: Hints,
    ):
        (_, tensor_a), *loads_b = loads
        bm, bn, bk = self.tile
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
        if warp == 0:
            for carrier in loads:
                cpasync.prefetch_descriptor(carrier[0])
            for own in carriers:
                for carrier in own:
                    cpasync.prefetch_descriptor(carrier[0])

        allocator = SmemAllocator()
        barriers = allocator.allocate_array(cutlass.Int64, 2 * self.stages)
        small = self.regions.allocate(allocator)
        buffer_a = allocator.allocate_tensor(self.brought[0], smem_a.outer, 1024, smem_a.inner)
        buffer_b = allocator.allocate_tensor(self.brought[1], smem_b.outer, 1024, smem_b.inner)
        shared = self.regions.buffers(allocator, small, carriers, tensors, outputs)
        cluster = cute.make_layout(self.cluster)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = cluster.get_flat_coord(rank)
        # A stage is free after one arrival of each consumer warp in each CTA that reads this CTA's data.
        readers = self.cluster[0] + self.cluster[1] - 1
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers * self.groups * 4),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, *self.cluster, 1)),
            defer_sync=True,
        )
        if const_expr(self.regions.has_barriers):
            if thread == 0:
                self.regions.initialise(shared)
                cute.arch.mbarrier_init_fence()
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        tiles_a = cute.local_tile(tensor_a, (bm, bk), (None, None, None))
        box_b = bn // len(loads_b), bk
        tiles_b = tuple(cute.local_tile(carrier[1], box_b, (None, None, None)) for carrier in loads_b)
        # Turns and steps count clusters of tiles. A cluster takes one of each wave, by its rank.
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        part = 0
        if const_expr(self.design.split > 1):
            part = self.split.part(first)
            first, step = first // self.design.split, step // self.design.split
        ranks = self.order.ranked(first, step, turns)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        # All of the above may run while the previous kernel ends (kernel_variants.json#dependent-launch).
        cute.arch.griddepcontrol_wait()
        k_first, k_tiles = self.split.blocks(cute.size(tiles_a, mode=[3]), part)
        tiles, buffers = (tiles_a, *tiles_b), (buffer_a, buffer_b)
        cta = Cta(buffers, shared, carriers, tiles, scales, turns, ranks, place, first, step, part, k_first, k_tiles)
        if group == 0:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                self.load_operands(cta, pipe, tuple(carrier[0] for carrier in loads), hints)
            if const_expr(self.regions.brings):
                if (warp == 1 or warp == 2) and part == 0:
                    self.load_tiles(cta, warp - 1)
        else:
            cute.arch.setmaxregister_increase(self.design.registers)
            workspace = workspaces[0] if const_expr(len(workspaces) > 0) else None
            given = self.regions.given(tensors, numbers, outputs, workspace, shape)
            if const_expr(self.design.split > 1):
                if part == 0:
                    self.multiply(cta, pipe, mma, atom, group - 1, given, hints.outputs, True)
                else:
                    self.multiply(cta, pipe, mma, atom, group - 1, given, hints.outputs, False)
            else:
                self.multiply(cta, pipe, mma, atom, group - 1, given, hints.outputs, True)

    @cute.jit
    def load_operands(self, cta: Cta, pipe: pipeline.PipelineTmaAsync, atoms: tuple, hints: Hints):
        """Called by warp 0: load A and B of each tile, a block of K at a time."""
        tma_a, *atoms_b = atoms
        tiles_a, *tiles_b = cta.tiles
        cluster = cute.make_layout(self.cluster)
        turn = cta.first
        mask_a = cute.make_layout_image_mask(cluster, cta.place, mode=1) if const_expr(self.cluster[1] > 1) else 0
        mask_b = cute.make_layout_image_mask(cluster, cta.place, mode=0) if const_expr(self.cluster[0] > 1) else 0
        to_a, from_a = _partition(tma_a, cta.place[1], self.cluster[1], cta.buffers[0], tiles_a)
        buffers = _shared_by(cta.buffers[1], len(atoms_b))
        each_b = tuple(
            (atom, *_partition(atom, cta.place[0], self.cluster[0], buffer, tiles))
            for atom, buffer, tiles in zip(atoms_b, buffers, tiles_b, strict=True)
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        while turn < cta.turns.total:
            m, n, l = self.order.tile(turn, cta, self.cluster)
            for k in cutlass.range(cta.k_tiles, unroll=1):
                pipe.producer_acquire(state)
                barrier = pipe.producer_get_barrier(state)
                cute.copy(
                    tma_a,
                    from_a[None, m, cta.k_first + k, l],
                    to_a[None, state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=mask_a,
                    cache_policy=hints.a,
                )
                for tma_b, to_b, from_b in each_b:
                    cute.copy(
                        tma_b,
                        from_b[None, n, cta.k_first + k, l],
                        to_b[None, state.index],
                        tma_bar_ptr=barrier,
                        mcast_mask=mask_b,
                        cache_policy=hints.b,
                    )
                state.advance()
            turn += cta.step
        if const_expr(self.design.for_few_rows and not self.merging):
            # The next launch begins on the other multiprocessors, and waits there for the end of this one
            # (next_launch_h200.json). With more tiles both launches share some of them, and the next may take longer.
            if 2 * cta.turns.total <= cta.step:
                cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.design.spare > 0):
            # Only this warp may wait: a barrier tells two phases apart, and only this warp waited for all before.
            later = state
            for _ in cutlass.range_constexpr(self.design.spare):
                pipe.sync_object_empty.wait(later.index, later.phase)
                later = after(later, 1)
            cute.arch.barrier_arrive(barrier_id=SPARE, number_of_threads=self.spare_threads)
        pipe.producer_tail(state)

    @cute.jit
    def load_tiles(self, cta: Cta, group: Int32):
        """Called by warps 1 and 2: load what the epilogue of warp group `group` reads in tiles."""
        turn = cta.first
        team, within, stride = self.epilogue.division.first_and_stride(group, cta.step)
        turn += team * cta.step
        brought = [self.arriving(region, cta) for region in range(len(self.programs))]
        arrivals = Int32(0)
        while turn < cta.turns.total:
            m, n, l = self.order.tile(turn, cta, self.cluster)
            at = Place(m, n, l, within)
            if const_expr(len(self.programs) == 1):
                coming = Int32(self.arrivals.brought)
                if const_expr(self.design.spare > 0):
                    last = turn + cta.step >= cta.turns.total
                    coming = cutlass.select_(last, Int32(self.design.load_stages), coming)
                arrivals = self.bring(self.arrivals, coming, arrivals, at, group, brought[0])
            else:
                for region in cutlass.range_constexpr(len(self.programs)):
                    own = self.regions.each[region].arrivals
                    if const_expr(bool(own.members)):
                        if self.regions.has(region, n):
                            there = self.regions.place(region, at)
                            coming = Int32(own.brought)
                            arrivals = self.bring(own, coming, arrivals, there, group, brought[region])
            turn += stride
        if const_expr(self.design.spare > 0):
            turn -= stride
            if turn >= 0 and turn + cta.step >= cta.turns.total:
                behind = after(
                    pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages),
                    (turn // cta.step + 1) * cta.k_tiles,
                )
                m, n, l = self.order.tile(turn, cta, self.cluster)
                at = Place(m, n, l, within)
                own, tma = brought[0]
                starts = self.arrivals.spare.starts(within, behind, cta.buffers, own.buffers)
                cute.arch.barrier(barrier_id=SPARE, number_of_threads=self.spare_threads)
                self.arrivals.bring_rest(starts, at, own, tma)

    def arriving(self, region, cta):
        """Return the stages in which a region's operands arrive, their carriers, and both sides of their copies."""
        arrivals = self.regions.each[region].arrivals
        own = cta.shared[region].own[arrivals.number]
        carriers = self.regions.carriers_of(region, cta.carriers)[arrivals.number]
        return own, (carriers, arrivals.partitions(own, carriers))

    @cute.jit
    def bring(self, own: Any, coming: Int32, arrivals: Int32, at: Place, group: Int32, brought: tuple):
        """Load `coming` subtiles of a tile's operands. Return `arrivals`, the number of all subtiles loaded so far."""
        for s in cutlass.range(coming, unroll=1):
            self.bring_subtile(own, s, arrivals, at, group, brought)
            arrivals += 1
        return arrivals

    def bring_subtile(self, own, s, arrivals, at, group, brought):
        """Load the subtile that comes as number `s` of a tile."""
        own.bring(own.subtile(s), arrivals, at, group, *brought)

    @cute.jit
    def multiply(
        self,
        cta: Cta,
        pipe: pipeline.PipelineTmaAsync,
        mma: cute.TiledMma,
        atom: cute.TiledMma,
        group: Int32,
        given: tuple,
        policy: Int64,
        leads: cutlass.Constexpr,
    ):
        """Called by a consumer warp group: multiply for its tiles. If its CTA `leads`, that is, has the first part of
        K, run their epilogue. Otherwise send the sums to the CTA that leads."""
        thread, _, _ = cute.arch.thread_idx()
        turn = cta.first
        team, within, stride = self.epilogue.division.first_and_stride(group, cta.step)
        own = thread % WARP_GROUP
        registers, factors = self.factors(mma, cta.buffers, within)
        senders = [self.sender(number, cta, own, policy) for number in range(len(self.regions.each) * leads)]
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        carried = self.epilogue.partials.carry() if const_expr(leads) else {}
        executed, rounds = Int32(0), Int32(0)
        turn += team * cta.step
        if const_expr(self.pingpong):
            # The second group takes every other tile, and skips the stages of the first group's tiles.
            if team == 1:
                read = after(read, cta.k_tiles)
                free = after(free, cta.k_tiles)
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=MATH_GROUPS * WARP_GROUP)
        while turn < cta.turns.total:
            m, n, l = self.order.tile(turn, cta, self.cluster)
            at = Place(m, n, l, within)
            there = self.regions.within(at, given)
            held = self.regions.fetch(at, own, there) if const_expr(leads) else []
            scales = self.scales.begin(cta.scales, at, self.epilogue, atom, own, cta.k_first)
            if const_expr(self.pingpong):
                cute.arch.barrier(barrier_id=TURN + team, number_of_threads=MATH_GROUPS * WARP_GROUP)
            read, free = self.product(scales, cta.k_tiles, read, free, pipe, mma, factors)
            if const_expr(self.pingpong):
                cute.arch.barrier_arrive(barrier_id=TURN + 1 - team, number_of_threads=MATH_GROUPS * WARP_GROUP)
            if const_expr(leads):
                starts = self.arrivals.spare.starts(
                    within, read, cta.buffers, cta.shared[0].own[self.arrivals.number].buffers
                )
                ending = Last(turn + cta.step >= cta.turns.total, within, starts)
                before = Before(executed, rounds)
                threads = self.epilogue.team(atom, own, group, before, cta.shared[0], there[0], ending)
                early = self.arrivals.early(threads) if len(self.programs) == 1 else ()
            warpgroup.wait_group(0)
            free = self.release(pipe, read, free, cta.k_tiles)
            if const_expr(self.design.split > 1):
                thread_of_tile = within * WARP_GROUP + own
                where = self.split.place(given[0].workspace, turn, cta, thread_of_tile)
                if const_expr(leads):
                    self.split.gather(registers, where, thread_of_tile, TOGETHER + group)
                else:
                    self.split.send(registers, where, cta.part, thread_of_tile, TOGETHER + group)
            if const_expr(self.pingpong):
                read = after(read, cta.k_tiles)
                free = after(free, cta.k_tiles)

            values = sums(registers, self.accumulator)
            if const_expr(not leads):
                pass
            elif const_expr(len(self.programs) == 1):
                self.finish(self.epilogue, values, at, held[0], threads, early, carried, senders[0])
                rounds += self.arrivals.rounds
            else:
                for region in cutlass.range_constexpr(len(self.programs)):
                    if self.regions.has(region, n):
                        self.finish_region(
                            self.regions.each[region],
                            values,
                            self.regions.place(region, at),
                            held[region],
                            (atom, own, group, before, cta.shared[region], there[region], ending),
                            senders[region],
                        )
                        rounds += self.regions.each[region].arrivals.rounds
            executed += 1
            turn += stride
        if const_expr(len(carried) > 0):
            self.epilogue.partials.leave_carried(
                carried, self.epilogue.division.warp_of_all(group, own // 32), given[0]
            )
        if const_expr(len(self.merging) > 0):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(leads):
            if senders[0].sends:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def sender(self, region, cta, own, policy):
        """Return the `Sender` of a warp: either one warp sends for the group, or each warp sends its own rows."""
        warp = cute.arch.make_warp_uniform(own // 32)
        departures = self.regions.each[region].departures
        carriers = self.regions.carriers_of(region, cta.carriers)[departures.number]
        leaving = carriers, departures.partitions(cta.shared[region].own[departures.number], carriers)
        if departures.senders > 1:
            return Sender(True, warp, leaving, policy)
        return Sender(warp == 0, 0, leaving, policy)

    @cute.jit
    def finish_region(self, epilogue: Any, values: cute.Tensor, at: Place, held: Any, what: tuple, sender: Sender):
        """Run the epilogue of a tile whose region is known at run time only, so that no operand was read early."""
        self.finish(epilogue, values, at, held, epilogue.team(*what), (), {}, sender)

    @cute.jit
    def finish(
        self,
        epilogue: Any,
        values: cute.Tensor,
        at: Place,
        held: Any,
        threads: Any,
        early: Any,
        carried: Any,
        sender: Sender,
    ):
        """Run the epilogue of a tile: write fetched vectors to shared memory, compute subtiles, leave reductions."""
        departures = epilogue.departures
        # If so, the last barrier of the tile before says that its vectors were read.
        was_read = const_expr(not (len(self.programs) > 1 or departures.senders > 1 or not departures.members))
        tile = direct.begin(epilogue, at, held, threads, was_read=was_read)
        self.subtiles(epilogue, values, tile, at, threads, early, sender)
        epilogue.leave(tile, carried, threads)

    @cute.jit
    def subtiles(
        self, epilogue: Any, values: cute.Tensor, tile: Any, at: Place, threads: Any, early: Any, sender: Sender
    ):
        """Compute a tile subtile by subtile, and send the outputs."""
        last, count = len(epilogue.walks) - 1, epilogue.division.subtiles
        arrivals, departures, group = epilogue.arrivals, epilogue.departures, threads.group
        slots = self.design.store_stages if departures.members else 0
        arrived = {}
        for s in cutlass.range_constexpr(count + 1):
            if const_expr(s < count):
                if const_expr(epilogue.scene.begins(s)):
                    epilogue.reduce_rows(s, values, tile, threads)
                if const_expr(not epilogue.scene.is_read_ahead(s)):
                    arrived = epilogue.arrive(last, s, threads, early)
                coming = {}
                if const_expr(epilogue.scene.is_read_ahead(s + 1)):
                    coming = epilogue.arrive(last, s + 1, threads, early)
                results = epilogue.subtile(s, values, arrived, tile, threads)
                arrived = coming
            # The subtile before leaves only now: computing this one hid the writes of that one to shared memory.
            if const_expr(s > 0 and slots > 1):
                # If an operand was read, the fence behind the read also covers the staged outputs.
                if const_expr(not arrivals.reads_behind(s + 1, early)):
                    cute.arch.fence_proxy("async.shared", space="cta")
                # The slot of this subtile is free once TMA has read the slots of all stores but the newest.
                self.vacate(slots - 2, group, departures.senders, sender)
                if sender.sends:
                    self.send(departures, s - 1, at, group, sender)
            if const_expr(s < count):
                if const_expr(slots == 1):
                    # The subtile before left at once: computing this one hid that TMA read its slot.
                    self.vacate(0, group, departures.senders, sender)
                departures.stage(s, results, threads)
                if const_expr(slots == 1):
                    cute.arch.fence_proxy("async.shared", space="cta")
                    self.meet(group, departures.senders)
                    if sender.sends:
                        self.send(departures, s, at, group, sender)

    def send(self, departures, s, at, group, sender):
        """Called by each warp that sends: send subtile `s`."""
        departures.send(s, at, group, sender.number, sender.policy, sender.leaving)

    @cute.jit
    def vacate(self, stores: cutlass.Constexpr, group: Int32, senders: cutlass.Constexpr, sender: Sender):
        """Wait until TMA has read all but the newest `stores` from their slots, for all threads that share these."""
        if sender.sends:
            cute.arch.cp_async_bulk_wait_group(stores, read=True)
        self.meet(group, senders)

    def meet(self, group: Int32, senders: int):
        """All threads that share a slot wait for each other."""
        if senders > 1:
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=TOGETHER + group, number_of_threads=WARP_GROUP)

    @cute.jit
    def release(self, pipe: pipeline.PipelineTmaAsync, read: Any, free: Any, blocks: Int32):
        """Release the stages of the last of `blocks` blocks along K.

        An epilogue that reduces has the release in a loop that ptxas unrolls. Within a branch, ptxas moved much of the
        epilogue above the release, and the producer waited: logsumexp of 16384 x 8192 x 1024 took 1.24 of cuBLAS's time
        for the product, and takes 0.88 (release_h100.json). Other epilogues were not moved, and have the branch: with
        eight operands and eight outputs the unrolled loop spills 20 bytes more.
        """
        if const_expr(self.ahead > 0 and self.reduces):
            while free.count != read.count:
                pipe.consumer_release(free)
                free.advance()
        else:
            for _ in cutlass.range(cutlass.min(blocks, self.ahead), unroll=1):
                pipe.consumer_release(free)
                free.advance()
        return free

    def factors(self, mma, buffers, within):
        """Return the registers of a thread's accumulators, and what `product` takes: the accumulators, the fragments of
        A and B in the stages, and what a promoted or a converted product needs besides."""
        uniform = mma.get_slice(cute.arch.make_warp_uniform(within * WARP_GROUP))
        rows = self.multiplied(buffers[0])
        if self.converted is not None:
            fragment_a = self.converted.fragment(mma, rows)
        else:
            fragment_a = mma.make_fragment_A(uniform.partition_A(rows))
        fragment_b = mma.make_fragment_B(uniform.partition_B(buffers[1]))
        partition = mma.partition_shape_C((self.design.height, self.design.tile[1]))
        registers = accumulator_registers(cute.size(partition), self.accumulator)
        accumulators = as_accumulators(registers, partition, self.accumulator)
        further: tuple = (self.promotion.piece(accumulators),) if self.design.promoted else ()
        if self.converted is not None:
            thread, _, _ = cute.arch.thread_idx()
            start = self.converted.start(mma, rows, within * WARP_GROUP + thread % WARP_GROUP)
            further = (start, buffers[0], self.converted.fragment(mma, rows))
        return registers, (accumulators, fragment_a, fragment_b, *further)

    def multiplied(self, buffer):
        """The stages of A with all rows that wgmma multiplies. In a low tile the rows behind its own have whatever lies
        there: the next stage, or B. Rows of a product do not depend on each other, and these rows are not stored."""
        if not self.design.is_low:
            return buffer
        (eight, _), *others = buffer.shape
        shape = (eight, self.design.height // eight), *others
        return cute.make_tensor(buffer.iterator, cute.make_layout(shape, stride=buffer.stride))

    def product(self, scales, *arguments):
        """Run the main loop over the blocks of K."""
        if self.converted is not None:
            return self.converted_product(*arguments)
        return self.promoted_product(scales, *arguments) if self.design.promoted else self.whole_product(*arguments)

    @cute.jit
    def promoted_product(
        self, scales: Any, blocks: Int32, read: Any, free: Any, pipe: Any, mma: cute.TiledMma, factors: tuple
    ):
        """Sums of a few products, scaled or not, are added up in float32. At the end all stages are released.

        Whether the next stage has arrived is asked while the last piece of this one is multiplied. The answer takes
        some 90 cycles, in which the tensor cores would wait (promotion_peek_h200.json).
        """
        accumulators, fragment_a, fragment_b, piece = factors
        mma = new_from_mlir_values(mma, extract_mlir_values(mma))
        accumulators.fill(0.0)
        last = len(self.promotion.pieces) - 1
        is_there = pipe.sync_object_full.test_wait(read.index, read.phase)
        for k in cutlass.range(blocks, unroll=1):
            own: list = []
            left: list = []
            for place in cutlass.range_constexpr(last + 1):
                # Wait again before each piece: ptxas moves no instructions across a wait, even if it is skipped because
                # the stage is there. Otherwise it puts more additions behind the next multiplication than there are
                # registers for: up to 272 bytes spill.
                pipe.consumer_wait(read, is_there)
                mma.set(warpgroup.Field.ACCUMULATE, False)
                warpgroup.fence()
                for block in cutlass.range_constexpr(self.promotion.blocks):
                    a, b = self.promotion.factors(place, block, fragment_a, fragment_b, read.index)
                    cute.gemm(mma, piece, a, b, piece)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                if const_expr(place == 0):  # not earlier: during the wait for a stage its scales arrive, too
                    if const_expr(any(self.design.scaled)):  # and not before all multiplications are issued
                        pipe.consumer_wait(read, is_there)
                    taken = self.scales.arrived(scales, k)
                    own = [self.scales.factors(taken, one, self.epilogue) for one in self.promotion.pieces]
                    self.scales.fetch(scales, k + 1)
                self.promotion.add_deferred(accumulators, left)
                if const_expr(place == last):
                    read.advance()
                    is_there = pipe.sync_object_full.test_wait(read.index, read.phase)
                warpgroup.wait_group(0)
                if const_expr(place == last):
                    pipe.consumer_release(free)
                    free.advance()
                left = self.promotion.add(place, accumulators, piece, own[place], later=place < last)
        return read, free

    @cute.jit
    def converted_product(self, blocks: Int32, read: Any, free: Any, pipe: Any, mma: cute.TiledMma, factors: tuple):
        """A is converted in registers, while the stage before is multiplied. At the end all stages are released."""
        accum, fragment_a, fragment_b, start, buffer, coming = factors
        mma = new_from_mlir_values(mma, extract_mlir_values(mma))
        mma.set(warpgroup.Field.ACCUMULATE, False)
        pipe.consumer_wait(read)
        self.converted.fetch(start, buffer, read.index, coming)
        for k in cutlass.range(blocks, unroll=1):
            self.converted.take(coming, fragment_a)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                index = (None, None, block, read.index)
                cute.gemm(mma, accum, fragment_a[None, None, block], fragment_b[index], accum)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            read.advance()
            if k + 1 < blocks:
                pipe.consumer_wait(read)
                self.converted.fetch(start, buffer, read.index, coming)
            warpgroup.wait_group(0)
            pipe.consumer_release(free)
            free.advance()
        return read, free

    @cute.jit
    def whole_product(self, blocks: Int32, read: Any, free: Any, pipe: Any, mma: cute.TiledMma, factors: tuple):
        """The tensor cores add up all of K. At the end the last multiplications are still under way."""
        accum, fragment_a, fragment_b = factors
        mma = new_from_mlir_values(mma, extract_mlir_values(mma))  # a copy: what is set in a branch stays there
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range(blocks, unroll=1):
            pipe.consumer_wait(read)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                index = (None, None, block, read.index)
                cute.gemm(mma, accum, fragment_a[index], fragment_b[index], accum)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            read.advance()
            if k >= self.ahead:
                warpgroup.wait_group(self.ahead)
                pipe.consumer_release(free)
                free.advance()
        return read, free


def _hint(extent, step):
    """The L2 policy of A, or of B, whose tiles are read once for each `step` of the other matrix's `extent`.

    What is read again leaves L2 last, and what is read once leaves first (l2_policies_h200.json).
    """
    return Int64(cutlass.select_(extent > step, Int64(_EVICT_LAST), Int64(_EVICT_FIRST)))


def _stage(stages):
    """The layout of one stage. CuTe DSL aborts when it slices a swizzled layout of 40, 56 or another odd multiple of 8
    rows, so the layout is sliced without its swizzle, which is then put on the slice."""
    return cute.make_composed_layout(stages.inner, 0, cute.slice_(stages.outer, (None, None, 0)))


def _load_atom(tensor, layout, box, readers):
    op = cpasync.CopyBulkTensorTileG2SOp() if readers == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    brought = in_shared_memory(tensor.element_type)
    # Return a plain tuple: the object that `make_tiled_tma_atom` returns cannot be an argument of a kernel.
    atom, coordinates = cpasync.make_tiled_tma_atom(
        op, tensor, layout, box, num_multicast=readers, internal_type=brought
    )
    return atom, coordinates


def _shared_by(buffer, parts):
    """The stages of B, or those of each part of its columns if each has its own descriptor."""
    rows, depth, _ = buffer.shape
    if parts == 1:
        return (buffer,)
    box = cute.size(rows) // parts, cute.size(depth)
    return tuple(cute.local_tile(buffer, box, (part, 0, None)) for part in range(parts))


def _partition(atom, place, readers, buffer, tiles):
    return cpasync.tma_partition(
        atom, place, cute.make_layout(readers), cute.group_modes(buffer, 0, 2), cute.group_modes(tiles, 0, 2)
    )
