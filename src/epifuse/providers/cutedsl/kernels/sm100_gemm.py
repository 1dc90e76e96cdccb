"""GEMM by tcgen05.mma, with the graph's epilogue on sums in tensor memory: for sm_100 and sm_103. Compiled, never run.

One warp loads A and B by TMA, and one thread of another warp multiplies, for its CTA or for a pair of CTAs. Two warp
groups take tiles in turn, and run the epilogue. Tensor memory holds the sums of two tiles, one for each warp group: an
epilogue runs beside the main loop of the tiles that follow. A warp group reads its tile subtile by subtile
(`tensor_memory.py`); operands and outputs go direct. There are as many CTAs, or pairs, as run at once, and each takes
one tile after the other.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05

from epifuse.providers.cutedsl.design import MATH_GROUPS, WARP_GROUP, WARPS, Design
from epifuse.providers.cutedsl.kernels import direct
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Before, Given, Last
from epifuse.providers.cutedsl.kernels.compat import LayoutEnum, SmemAllocator, TmemAllocator
from epifuse.providers.cutedsl.kernels.epilogue import Epilogue
from epifuse.providers.cutedsl.kernels.merge import merging_kernels
from epifuse.providers.cutedsl.kernels.modes import with_batches
from epifuse.providers.cutedsl.kernels.place import Place
from epifuse.providers.cutedsl.kernels.raster import Raster, raster, tile_of
from epifuse.providers.cutedsl.kernels.states import after
from epifuse.providers.cutedsl.kernels.tensor_memory import Slabs, Sums
from epifuse.providers.cutedsl.program import Program

BUFFERS = MATH_GROUPS  # tiles in tensor memory: each warp group reads its own
MULTIPLYING = MATH_GROUPS * WARPS  # number of the warp that multiplies, behind those that run the epilogue
LOADING = MULTIPLYING + 1
THREADS = WARP_GROUP * (MATH_GROUPS + 1)
REGISTERS = 64, 224  # of a thread that loads or multiplies, and of one in an epilogue: 65,536 in three warp groups
BEGIN = direct.TOGETHER + MATH_GROUPS  # named barriers: of the threads that learn where tensor memory begins,
END = BEGIN + 1  # and of those that have read it


class Cta(NamedTuple):
    """What all roles of a CTA know: the order of tiles, the CTA's place in its pair, its first turn, its distance
    between turns, and the number of blocks of K."""

    order: Any
    place: Any
    first: Any
    step: Any
    k_tiles: Any


class Sm100Gemm:
    """D = epilogue(A @ B). Tensors come as (M,K,L), (K,N,L) and (M,N,L); a stride is 0 where a value does not vary.

    Without batches, A and B have no L.
    """

    def __init__(self, design: Design, program: Program, types: tuple, accumulator: Any = Float32) -> None:
        self.design, self.program, self.types, self.accumulator = design, program, types, accumulator
        self.cluster, self.stages = design.cluster, design.stages
        self.ctas = design.ctas  # CTAs that multiply together
        m, n = design.tile
        self.tile = m * self.ctas, n, 8 * design.k_bytes // types[0].width  # of one multiplication
        self.merging = merging_kernels(design, program)

    def multiplication(self, majors: tuple) -> cute.TiledMma:
        """Return the multiplication of a CTA, or of a pair of CTAs."""
        group = tcgen05.CtaGroup.TWO if self.ctas > 1 else tcgen05.CtaGroup.ONE
        return sm100.make_trivial_tiled_mma(*self.types, *majors, self.accumulator, group, self.tile[:2])

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
        a, b = with_batches(a), with_batches(b)
        b = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0, 2]))
        mma = self.multiplication(tuple(LayoutEnum.from_tensor(one).mma_major_mode() for one in (a, b)))
        self.epilogue = Epilogue(self.design, self.program, Slabs().fragment())
        tensors, outputs = self.epilogue.whole(tensors, outputs)
        smem_a = sm100.make_smem_layout_a(mma, self.tile, self.types[0], self.stages)
        smem_b = sm100.make_smem_layout_b(mma, self.tile, self.types[1], self.stages)
        first = (None, None, None, 0)
        one_a, one_b = cute.slice_(smem_a, first), cute.slice_(smem_b, first)
        sharing = cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (mma.thr_id.shape,))
        op = cpasync.CopyBulkTensorTileG2SOp(mma.op.cta_group)
        tma_a, tensor_a = cute.nvgpu.make_tiled_tma_atom_A(op, a, one_a, self.tile, mma, sharing.shape)
        tma_b, tensor_b = cute.nvgpu.make_tiled_tma_atom_B(op, b, one_b, self.tile, mma, sharing.shape)
        # All bytes for one multiplication arrive at the barrier of the CTA that issues it.
        each = zip(self.types, (one_a, one_b), strict=True)
        self.stage_bytes = self.ctas * sum(cute.size_in_bytes(dtype, layout) for dtype, layout in each)
        shape = (cute.size(a, mode=[0]), cute.size(b, mode=[0]), cute.size(a, mode=[2]))
        order = raster(shape, (self.tile[0], self.design.columns * self.cluster[1]), band)
        loads = (tma_a, tensor_a), (tma_b, tensor_b)
        self.kernel(loads, tensors, numbers, outputs, workspaces, mma, smem_a, smem_b, sharing, shape, order).launch(
            grid=(*self.cluster, clusters),
            block=(THREADS, 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )
        for merging in self.merging:
            merging.launch(workspaces[0], tensors, numbers, outputs, shape, clusters * self.ctas, stream)

    @cute.kernel
    def kernel(
        self,
        loads: tuple,
        tensors: tuple,
        numbers: tuple,
        outputs: tuple,
        workspaces: tuple,
        mma: cute.TiledMma,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        sharing: cute.Layout,
        shape: cute.Shape,
        order: Raster,
    ):
        (tma_a, tensor_a), (tma_b, tensor_b) = loads
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADING:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        allocator = SmemAllocator()
        arrived = allocator.allocate_array(Int64, 2 * self.stages)
        summed = allocator.allocate_array(Int64, 2 * BUFFERS)
        given_back = allocator.allocate_array(Int64, 1)
        begins = allocator.allocate_array(Int32, 1)
        small = self.epilogue.allocate(allocator)
        buffers = tuple(
            allocator.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
            for dtype, layout in zip(self.types, (smem_a, smem_b), strict=True)
        )
        carriers = self.epilogue.carriers(tensors, outputs)
        shared = self.epilogue.buffers(allocator, small, carriers, tensors, outputs)
        pipe = pipeline.PipelineTmaUmma.create(
            barrier_storage=arrived,
            num_stages=self.stages,
            producer_group=_threads(1),
            consumer_group=_threads(1),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=sharing,
            defer_sync=True,
        )
        # Each of the two buffers is read by a warp group of each CTA. Each of its warps says when it has read.
        done = pipeline.PipelineUmmaAsync.create(
            barrier_storage=summed,
            num_stages=BUFFERS,
            producer_group=_threads(1),
            consumer_group=_threads(WARPS * self.ctas),
            cta_layout_vmnk=sharing,
            defer_sync=True,
        )
        memory = TmemAllocator(
            begins,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=BEGIN, num_threads=32 * LOADING),
            allocator_warp_id=0,
            is_two_cta=self.ctas > 1,
            two_cta_tmem_dealloc_mbar_ptr=given_back,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        # What a CTA brings, in blocks of K: its rows of A, and all columns of B or, in a pair, half of them.
        rank = Int32(0)
        if const_expr(self.ctas > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        own = mma.get_slice(rank)
        (bm, bn, bk), every = self.tile, (None, None, None)
        tiles_a = own.partition_A(cute.local_tile(tensor_a, (bm, bk), every))
        tiles_b = own.partition_B(cute.local_tile(tensor_b, (bn, bk), every))
        factors = mma.make_fragment_A(buffers[0]), mma.make_fragment_B(buffers[1])
        layout = mma.make_fragment_C(cute.append(mma.partition_shape_C(self.tile[:2]), BUFFERS)).layout
        _, _, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        cta = Cta(order, (rank, 0), first, step, cute.size(tiles_a, mode=[4]))
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        # All of the above may run while the kernel before ends (kernel_variants.json#dependent-launch).
        cute.arch.griddepcontrol_wait()
        group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
        if group == MATH_GROUPS:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == LOADING:
                self.load(cta, pipe, (tma_a, tma_b), buffers, (tiles_a, tiles_b))
            if warp == MULTIPLYING:
                memory.wait_for_alloc()
                sums = cute.make_tensor(memory.retrieve_ptr(Float32), layout)
                self.multiply(cta, pipe, done, mma, sums, factors, rank)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            memory.allocate(BUFFERS * self.design.columns)
            memory.wait_for_alloc()
            start = memory.retrieve_ptr(Float32)
            workspace = workspaces[0] if const_expr(len(workspaces) > 0) else None
            given = Given(tensors, numbers, outputs, workspace, shape, shape)
            self.finish(cta, done, start, shared, given, group)
            memory.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=END, number_of_threads=MATH_GROUPS * WARP_GROUP)
            memory.free(start)

    @cute.jit
    def load(self, cta: Cta, pipe: pipeline.PipelineTmaUmma, atoms: tuple, buffers: tuple, tiles: tuple):
        """Called by one warp: load A and B of each tile, a block of K at a time."""
        (tma_a, to_a, from_a), (tma_b, to_b, from_b) = (
            (atom, *_partition(atom, buffer, own)) for atom, buffer, own in zip(atoms, buffers, tiles, strict=True)
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        turn = cta.first
        while turn < cta.order.total:
            m, n, l = tile_of(turn, cta.order, (1, 1), (0, 0))
            for k in cutlass.range(cta.k_tiles, unroll=1):
                pipe.producer_acquire(state)
                barrier = pipe.producer_get_barrier(state)
                cute.copy(tma_a, from_a[None, m, k, l], to_a[None, state.index], tma_bar_ptr=barrier)
                cute.copy(tma_b, from_b[None, n, k, l], to_b[None, state.index], tma_bar_ptr=barrier)
                state.advance()
            turn += cta.step
        pipe.producer_tail(state)

    @cute.jit
    def multiply(
        self,
        cta: Cta,
        pipe: pipeline.PipelineTmaUmma,
        done: pipeline.PipelineUmmaAsync,
        mma: cute.TiledMma,
        sums: cute.Tensor,
        factors: tuple,
        rank: Int32,
    ):
        """Called by one warp: multiply for each tile. The first CTA of a pair issues the multiplications for both."""
        fragment_a, fragment_b = factors
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        made = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, BUFFERS)
        turn = cta.first
        if rank == 0:
            while turn < cta.order.total:
                done.producer_acquire(made)
                own = sums[None, None, None, made.index]
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(cta.k_tiles, unroll=1):
                    pipe.consumer_wait(read)
                    for block in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                        index = (None, None, block, read.index)
                        cute.gemm(mma, own, fragment_a[index], fragment_b[index], own)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    pipe.consumer_release(read)
                    read.advance()
                done.producer_commit(made)
                made.advance()
                turn += cta.step
            done.producer_tail(made)

    @cute.jit
    def finish(
        self,
        cta: Cta,
        done: pipeline.PipelineUmmaAsync,
        start: cute.Pointer,
        shared: Any,
        given: Given,
        group: Int32,
    ):
        """Called by a warp group: run the epilogue of its tiles, from its buffer in tensor memory."""
        thread, _, _ = cute.arch.thread_idx()
        own = thread % WARP_GROUP
        team, within, stride = self.epilogue.division.first_and_stride(group, cta.step)
        columns = self.design.columns
        sums = Sums(start + cute.assume(group * columns, divby=columns), self.design, own)
        ready = after(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, BUFFERS), group)
        carried = self.epilogue.partials.carry()
        executed = Int32(0)
        turn = cta.first + team * cta.step
        while turn < cta.order.total:
            m, n, l = tile_of(turn, cta.order, self.cluster, cta.place)
            at = Place(m, n, l, within)
            held = self.epilogue.fetch(at, own, given)
            done.consumer_wait(ready)
            before = Before(executed, 0)
            threads = self.epilogue.team(Slabs(), own, group, before, shared, given, Last(False, within, {}))
            tile = direct.begin(self.epilogue, at, held, threads)
            if const_expr(self.epilogue.is_even):
                self.even_subtiles(sums, tile, threads)
            else:
                direct.subtiles(self.epilogue, sums, tile, threads)
            with cute.arch.elect_one():
                done.consumer_release(ready)
            self.epilogue.leave(tile, carried, threads)
            ready = after(ready, BUFFERS)
            executed += 1
            turn += stride
        if const_expr(len(carried) > 0):
            self.epilogue.partials.leave_carried(carried, self.epilogue.division.warp_of_all(group, own // 32), given)
        if const_expr(len(self.merging) > 0):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def even_subtiles(self, sums: Any, tile: Any, threads: Any):
        """Run the epilogue of a tile whose subtiles run the same code: the loop has the code of one column of them."""
        for right in cutlass.range(self.epilogue.division.across, unroll=1):
            for down in cutlass.range_constexpr(self.epilogue.division.down):
                self.epilogue.any_subtile((down, right), sums, tile, threads)


def _threads(count: int) -> pipeline.CooperativeGroup:
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


def _partition(atom: cute.CopyAtom, buffer: cute.Tensor, tiles: cute.Tensor) -> Any:
    """Return where blocks go, and where they come from. The first mode is one block, the others count blocks."""
    alone = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, alone, cute.group_modes(buffer, 0, 3), cute.group_modes(tiles, 0, 3))
