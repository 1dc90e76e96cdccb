"""Hopper GEMM: persistent, warp-specialised, TMA with cluster multicast, the graph's epilogue on the accumulator.

Warp group 0 loads A and B, two others multiply and run the epilogue: together on one tile (cooperative), or each on
its own, taking turns at the tensor cores so that one's epilogue hides behind the other's main loop (ping-pong). The
epilogue works on subtiles of 64 rows a warp group; its loop is unrolled, because a run-time index into the accumulator
would move it to local memory. One output leaves through swizzled shared memory and TMA, the rest by direct access.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from epifuse.providers.cutedsl.emit import HELD, walk
from epifuse.providers.cutedsl.program import Design, Program

try:
    from cutlass.memory import SmemAllocator
    from cutlass.tensor_utils import LayoutEnum
except ImportError:  # their home in CuTe DSL 4.7
    from cutlass.utils import LayoutEnum, SmemAllocator

WARP_GROUP = 128
MATH_GROUPS = 2
PRODUCER_REGISTERS = 24
MATH_REGISTERS = 240
TOGETHER = 1  # named barriers: the warp groups of a tile (two ids), and whose turn it is (two ids)
TURN = 3
FIRST_MATH_WARP = 4


class Sm90Gemm:
    """D = epilogue(A @ B). Tensors come as (M,K,L), (N,K,L) and (M,N,L); a stride is 0 where a value does not vary."""

    def __init__(self, design: Design, program: Program) -> None:
        self.design = design
        self.program = program
        self.tile = (*design.tile, 64)
        self.cluster = design.cluster
        self.pingpong = design.pingpong
        self.groups = 1 if design.pingpong else MATH_GROUPS  # warp groups that share a tile
        self.stages = design.stages
        # Register order is (values, columns, rows): a subtile taller than one 64-row atom a group would break it.
        self.subtile = (64 * self.groups, 32)
        self.store_stages = 2

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        tensors: tuple,
        scalars: tuple,
        outputs: tuple,
        clusters: Int32,
        stream: Any,
    ):
        bm, bn, bk = self.tile
        layout_a, layout_b = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        mma = sm90.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            layout_a.sm90_mma_major_mode(),
            layout_b.sm90_mma_major_mode(),
            Float32,
            (self.groups, 1, 1),
            tiler_mn=(64, bn),
        )
        smem_a = sm90.make_smem_layout_a(layout_a, self.tile, a.element_type, self.stages)
        smem_b = sm90.make_smem_layout_b(layout_b, self.tile, b.element_type, self.stages)
        first = (None, None, 0)
        tma_a, tensor_a = _load_atom(a, cute.slice_(smem_a, first), (bm, bk), self.cluster[1])
        tma_b, tensor_b = _load_atom(b, cute.slice_(smem_b, first), (bn, bk), self.cluster[0])
        d = outputs[self.program.staged]
        self.d_type, self.d_layout = d.element_type, LayoutEnum.from_tensor(d)
        teams = MATH_GROUPS // self.groups
        smem_d = sm90.make_smem_layout_epi(d.element_type, self.d_layout, self.subtile, self.store_stages * teams)
        tma_d, tensor_d = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), d, cute.slice_(smem_d, first), self.subtile
        )
        self.stage_bytes = cute.size_in_bytes(a.element_type, cute.slice_(smem_a, first)) + cute.size_in_bytes(
            b.element_type, cute.slice_(smem_b, first)
        )

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            buffer_a: cute.struct.Align[cute.struct.MemRange[a.element_type, cute.cosize(smem_a)], 1024]
            buffer_b: cute.struct.Align[cute.struct.MemRange[b.element_type, cute.cosize(smem_b)], 1024]
            buffer_d: cute.struct.Align[cute.struct.MemRange[d.element_type, cute.cosize(smem_d)], 1024]

        self.Shared = Shared
        loads = (tma_a, tensor_a, tma_b, tensor_b)
        self.kernel(loads, (tma_d, tensor_d), tensors, scalars, outputs, mma, smem_a, smem_b, smem_d, d.shape).launch(
            grid=(*self.cluster, clusters),
            block=(WARP_GROUP * (1 + MATH_GROUPS), 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        loads: tuple,
        store: tuple,
        tensors: tuple,
        scalars: tuple,
        outputs: tuple,
        mma: cute.TiledMma,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        smem_d: cute.ComposedLayout,
        shape: cute.Shape,
    ):
        tma_a, tensor_a, tma_b, tensor_b = loads
        tma_d, tensor_d = store
        bm, bn, bk = self.tile
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
        if warp == 0:
            for atom in (tma_a, tma_b, tma_d):
                cpasync.prefetch_descriptor(atom)

        shared = SmemAllocator().allocate(self.Shared)
        cluster = cute.make_layout((*self.cluster, 1))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = cluster.get_flat_coord(rank)
        # One arrival per consumer warp of each CTA that reads this CTA's data.
        readers = self.cluster[0] + self.cluster[1] - 1
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers * self.groups * 4),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, *self.cluster, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        buffer_a = shared.buffer_a.get_tensor(smem_a.outer, swizzle=smem_a.inner)
        buffer_b = shared.buffer_b.get_tensor(smem_b.outer, swizzle=smem_b.inner)
        buffer_d = shared.buffer_d.get_tensor(smem_d.outer, swizzle=smem_d.inner)
        tiles_a = cute.local_tile(tensor_a, (bm, bk), (None, None, None))
        tiles_b = cute.local_tile(tensor_b, (bn, bk), (None, None, None))
        tiles_d = cute.local_tile(tensor_d, (bm, bn), (None, None, None))
        k_tiles = cute.size(tiles_a, mode=[3])
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        # Tiles in units of clusters; a cluster takes every grid-th, so that neighbours share operands in L2.
        across_m = cute.ceil_div(shape[0], bm * self.cluster[0])
        across_n = cute.ceil_div(shape[1], bn * self.cluster[1])
        total = across_m * across_n * shape[2]
        _, _, turn = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()

        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                mask_a = cute.make_layout_image_mask(cluster, place, mode=1) if const_expr(self.cluster[1] > 1) else 0
                mask_b = cute.make_layout_image_mask(cluster, place, mode=0) if const_expr(self.cluster[0] > 1) else 0
                to_a, from_a = _partition(tma_a, place[1], self.cluster[1], buffer_a, tiles_a)
                to_b, from_b = _partition(tma_b, place[0], self.cluster[0], buffer_b, tiles_b)
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
                while turn < total:
                    m, n, l = self.tile_of(turn, across_m, across_n, place)
                    for k in cutlass.range(k_tiles, unroll=1):
                        pipe.producer_acquire(state)
                        barrier = pipe.producer_get_barrier(state)
                        cute.copy(
                            tma_a,
                            from_a[None, m, k, l],
                            to_a[None, state.index],
                            tma_bar_ptr=barrier,
                            mcast_mask=mask_a,
                        )
                        cute.copy(
                            tma_b,
                            from_b[None, n, k, l],
                            to_b[None, state.index],
                            tma_bar_ptr=barrier,
                            mcast_mask=mask_b,
                        )
                        state.advance()
                    turn += step
                pipe.producer_tail(state)
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            team = group - 1 if const_expr(self.pingpong) else Int32(0)
            within = Int32(0) if const_expr(self.pingpong) else group - 1
            member = thread % WARP_GROUP + within * WARP_GROUP
            storer = FIRST_MATH_WARP + team * 4
            uniform = mma.get_slice(cute.arch.make_warp_uniform(within * WARP_GROUP))
            own = mma.get_slice(member)
            fragment_a = mma.make_fragment_A(uniform.partition_A(buffer_a))
            fragment_b = mma.make_fragment_B(uniform.partition_B(buffer_b))
            accum = cute.make_rmem_tensor(mma.partition_shape_C((bm, bn)), Float32)
            places = own.partition_C(cute.make_identity_tensor((bm, bn)))

            atom = sm90.get_smem_store_op(self.d_layout, elem_ty_d=self.d_type, elem_ty_acc=Float32)
            base = cute.make_copy_atom(
                cute.nvgpu.warp.StMatrix8x8x16bOp(self.d_layout.is_m_major_c(), 4), cutlass.Float16
            )
            to_shared = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(base, mma))
            mine = to_shared.get_slice(member)
            slots = mine.partition_D(buffer_d)
            values, coordinates = to_shared.retile(accum), to_shared.retile(places)
            sub = cute.shape(mine.partition_S(buffer_d))[:3]
            staged = cute.make_rmem_tensor(sub, self.d_type)
            count = cute.size(staged)
            sub_n = bn // self.subtile[1]
            subtiles = sub_n * (bm // self.subtile[0])
            drain = pipeline.PipelineTmaStore.create(
                num_stages=self.store_stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.groups * WARP_GROUP),
            )
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            executed = Int32(0)
            stride = step
            if const_expr(self.pingpong):
                # The second group takes every other tile, and skips the stages of the first group's.
                turn += team * step
                stride = 2 * step
                if team == 1:
                    read.advance(k_tiles)
                    free.advance(k_tiles)
                    cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=MATH_GROUPS * WARP_GROUP)
            while turn < total:
                m, n, l = self.tile_of(turn, across_m, across_n, place)
                if const_expr(self.pingpong):
                    cute.arch.barrier(barrier_id=TURN + team, number_of_threads=MATH_GROUPS * WARP_GROUP)
                mma.set(warpgroup.Field.ACCUMULATE, False)
                for k in cutlass.range(k_tiles, unroll=1):
                    pipe.consumer_wait(read)
                    warpgroup.fence()
                    for block in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                        at = (None, None, block, read.index)
                        cute.gemm(mma, accum, fragment_a[at], fragment_b[at], accum)
                        mma.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                    read.advance()
                    if k > 0:
                        warpgroup.wait_group(1)
                        pipe.consumer_release(free)
                        free.advance()
                if const_expr(self.pingpong):
                    cute.arch.barrier_arrive(barrier_id=TURN + 1 - team, number_of_threads=MATH_GROUPS * WARP_GROUP)
                warpgroup.wait_group(0)
                pipe.consumer_release(free)
                free.advance()
                if const_expr(self.pingpong):
                    read.advance(k_tiles)
                    free.advance(k_tiles)

                divided = cute.zipped_divide(tiles_d[None, None, m, n, l], self.subtile)
                from_shared, to_global = cpasync.tma_partition(
                    tma_d, 0, cute.make_layout(1), cute.group_modes(buffer_d, 0, 2), divided
                )
                for s in cutlass.range_constexpr(subtiles):
                    x = cute.make_rmem_tensor(sub, Float32)
                    for i in cutlass.range_constexpr(count):
                        x[i] = values[s * count + i]
                    rows = [m * bm + coordinates[s * count + i][0] for i in range(count)]
                    columns = [n * bn + coordinates[s * count + i][1] for i in range(count)]
                    found = self.epilogue(x.load(), rows, columns, l, tensors, scalars, shape)
                    for index in cutlass.range_constexpr(len(outputs)):
                        if const_expr(index != self.program.staged):
                            _store_direct(outputs[index], found[index], sub, rows, columns, l, shape)
                    staged.store(found[self.program.staged].to(self.d_type))
                    slot = (executed * subtiles + s) % self.store_stages + team * self.store_stages
                    if warp == storer:
                        drain.producer_acquire()
                    cute.arch.barrier(barrier_id=TOGETHER + team, number_of_threads=self.groups * WARP_GROUP)
                    cute.copy(to_shared, staged, slots[None, None, None, slot])
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=TOGETHER + team, number_of_threads=self.groups * WARP_GROUP)
                    if warp == storer:
                        cute.copy(tma_d, from_shared[None, slot], to_global[None, (s // sub_n, s % sub_n)])
                        drain.producer_commit()
                executed += 1
                turn += stride
            if warp == storer:
                drain.producer_tail()

    def tile_of(self, turn, across_m, across_n, place):
        """Coordinates of this CTA's tile: bands of `raster` clusters along m, walked column by column."""
        each = across_m * across_n
        l, r = turn // each, turn % each
        band_size = self.design.raster * across_n
        first = (r // band_size) * self.design.raster
        height = cutlass.min(across_m - first, Int32(self.design.raster))
        within = r % band_size
        m, n = first + within % height, within // height
        return m * self.cluster[0] + place[0], n * self.cluster[1] + place[1], l

    def epilogue(self, accum, rows, columns, batch, tensors, scalars, shape):
        """The outputs' fragments, by walking the graph."""
        program = self.program

        def leaf(node):
            if node.op == "accum":
                return accum
            if node.op == "index":
                axis = node.attr[0].axis
                return _fill(
                    accum.shape,
                    Int32,
                    [{"m": rows, "n": columns}.get(axis, [batch] * len(rows))[i] for i in range(len(rows))],
                )
            if node in program.scalars:
                kind = program.graph.types[node].kind
                value = cute.full_like(
                    accum, scalars[program.scalars.index(node)], HELD["float" if kind == "mask" else kind]
                )
                return value != 0.0 if kind == "mask" else value
            return _load_direct(
                program, node, tensors[program.tensors.index(node)], accum.shape, rows, columns, batch, shape
            )

        values = walk(program.graph, leaf, accum)
        return [values[output.node] for output in program.graph.outputs]


def _load_atom(tensor, layout, box, readers):
    op = cpasync.CopyBulkTensorTileG2SOp() if readers == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(op, tensor, layout, box, num_multicast=readers)


def _partition(atom, place, readers, buffer, tiles):
    return cpasync.tma_partition(
        atom, place, cute.make_layout(readers), cute.group_modes(buffer, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def _fill(shape, dtype, values):
    out = cute.make_rmem_tensor(shape, dtype)
    for i in range(len(values)):
        out[i] = values[i]
    return out.load()


@cute.jit
def _guarded_store(tensor: cute.Tensor, value, row, column, batch, shape):
    if cute.elem_less((row, column), (shape[0], shape[1])):
        tensor[row, column, batch] = value


def _load_direct(program, node, tensor, shape, rows, columns, batch, extents):
    """An operand, element by element, each address once.

    Value i and i ^ 2 share a column, values with equal bit 1 share a row (accumulator layout of one 64-row atom). Lanes
    outside the result read its edge: a branch around each load would wait for one before it starts the next.
    """
    kind = program.graph.types[node].kind
    held = HELD["int32" if kind == "mask" else kind]
    axes = program.graph.types[node].axes
    out = cute.make_rmem_tensor(shape, held)
    for i in range(len(rows)):
        first = i if {"m", "n"} <= axes else i & ~2 if "n" in axes else i & 2 if "m" in axes else 0
        if first != i:
            out[i] = out[first]
        else:
            row, column = cutlass.min(rows[i], extents[0] - 1), cutlass.min(columns[i], extents[1] - 1)
            out[i] = tensor[row, column, batch].to(held)
    return out.load() != 0 if kind == "mask" else out.load()


def _store_direct(tensor, value, shape, rows, columns, batch, extents):
    converted = cute.make_rmem_tensor(shape, tensor.element_type)
    converted.store(value.to(tensor.element_type))
    for i in range(len(rows)):
        _guarded_store(tensor, converted[i], rows[i], columns[i], batch, extents)
