"""GEMM by mma.sync, with the graph's epilogue on the accumulator.

It is for every GPU that has no kernel of its own, and for operands that TMA cannot address. Eight warps copy A and B
into stages of swizzled shared memory (`copies.py`), read them by ldmatrix, and multiply fragments of 16 x 8. Warps lie
one below the other, so that four of them have 64 rows in the order of a wgmma accumulator. So the epilogue is the same
as in Hopper's kernel: it reads from `Fragment` how values lie. Its operands and outputs go direct, without TMA. There
are as many CTAs as multiprocessors, and each takes one tile after the other.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from epifuse.providers.cutedsl.design import MATH_GROUPS, WARP_GROUP, WARPS, Design
from epifuse.providers.cutedsl.kernels import direct, mma_8bit
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Before, Given, Last
from epifuse.providers.cutedsl.kernels.compat import LayoutEnum, SmemAllocator
from epifuse.providers.cutedsl.kernels.copies import Copies
from epifuse.providers.cutedsl.kernels.epilogue import Epilogue
from epifuse.providers.cutedsl.kernels.fragment import Fragment
from epifuse.providers.cutedsl.kernels.merge import merging_kernels
from epifuse.providers.cutedsl.kernels.parts import in_turn, parts_of, woven
from epifuse.providers.cutedsl.kernels.place import Place
from epifuse.providers.cutedsl.kernels.raster import Raster, raster, tile_of
from epifuse.providers.cutedsl.kernels.swizzle import swizzled
from epifuse.providers.cutedsl.program import Program

THREADS = MATH_GROUPS * WARP_GROUP
_BYTE = 8  # bits
_ROWS = 16  # of the fragments of one warp
_BLOCK = 32  # bytes of K that one multiplication takes
_COLUMNS = 16  # columns of B that one ldmatrix reads
_HELD = 32, 16  # elements of a thread on their way through registers; the second if it has more than 64 accumulators
_STRIP = 64  # columns whose fragments are read while the columns before are multiplied: 16 registers a block of K


class Sm80Gemm:
    """D = epilogue(A @ B). Tensors come as (M,K,L), (K,N,L) and (M,N,L); a stride is 0 where a value does not vary.

    Without batches, A and B have no L.
    """

    def __init__(
        self, design: Design, program: Program, types: tuple, accumulator: Any, along_k: tuple[bool, bool]
    ) -> None:
        """`along_k` says for A and for B whether neighbours in memory lie along K, if they lie along any mode."""
        self.design, self.program, self.types, self.accumulator = design, program, types, accumulator
        self.is_tf32, self.in_bytes = types[0] is Float32, types[0].width == _BYTE
        self.dtype = mma_8bit.PAIR if self.in_bytes else types[0]
        self.stages = design.stages
        self.depth = 8 * design.k_bytes // self.dtype.width
        # Whether lines of a stage lie along K: ldmatrix transposes only elements of 16 bits, so tf32 must.
        self.by_k = [by_k or self.is_tf32 for by_k in along_k]
        self.copies = [
            Copies(
                self.dtype,
                (rows, self.depth),
                max(vector * types[0].width // self.dtype.width, 1),
                THREADS,
                by_k=by_k,
                line=design.k_bytes if self.by_k[i] else rows * self.dtype.width // 8,
            )
            for i, (rows, vector, by_k) in enumerate(zip(design.brought, design.copied, along_k, strict=True))
        ]
        self.held = sum(copies.count for copies in self.copies if copies.by_registers)
        # Elements that go through registers leave fewer of them for fragments beside many accumulators.
        self.crowded = self.held > 0 and design.rows * design.tile[1] > WARP_GROUP * _STRIP
        self.strip = min(_STRIP // 2 if self.crowded else _STRIP, design.tile[1])
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
        ctas: Int32,
        band: Int32,
        ranks: Int64,
        stream: Any,
    ):
        a, b = _with_batches(a), _with_batches(b)
        a, b = self.elements(a), cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0, 2]))
        b = woven(self.elements(b), self.program.order)
        tile = (*self.design.brought, self.depth)
        mma = self.multiplication(self.design.sharing)
        atom = self.multiplication(1)
        fragment = Fragment.of_accumulators(atom, self.design.subtile)
        self.epilogue = Epilogue(self.design, self.program, fragment, self.parts(atom, fragment))
        tensors, outputs = self.epilogue.whole(tensors, outputs)
        majors = [LayoutEnum.ROW_MAJOR if by_k else LayoutEnum.COL_MAJOR for by_k in self.by_k]
        smem_a = sm90.make_smem_layout_a(majors[0], tile, self.dtype, self.stages)
        smem_b = sm90.make_smem_layout_b(majors[1], tile, self.dtype, self.stages)
        columns = cute.size(b, mode=[0]) // self.design.parts
        shape = (cute.size(a, mode=[0]), columns, cute.size(a, mode=[2]))
        order = raster(shape, self.design.step, band)
        self.kernel(a, b, tensors, numbers, outputs, workspaces, mma, atom, smem_a, smem_b, shape, order).launch(
            grid=(1, 1, ctas), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )
        for merging in self.merging:
            merging.launch(workspaces[0], tensors, numbers, outputs, shape, ctas, stream)

    def elements(self, tensor: cute.Tensor) -> cute.Tensor:
        """Return A or B, (rows, K, L), with the elements that are copied and read: pairs if numbers have 8 bits."""
        return mma_8bit.in_pairs(tensor) if self.in_bytes else tensor

    def parts(self, atom: cute.TiledMma, fragment: Fragment) -> Any:
        """Return which accumulators belong to which part of a row: strips of 8 columns of both parts take turns."""
        if self.design.parts == 1:
            return None
        rows = Fragment.of_accumulators(atom, (self.design.subtile[0], self.design.tile[1]))
        return parts_of(fragment, rows, self.design.columns, in_turn)

    def multiplication(self, groups: int) -> cute.TiledMma:
        """Return the multiplication of `groups` times four warps, one below the other."""
        k = 8 * _BLOCK // self.dtype.width
        op = warp.MmaTF32Op((_ROWS, 8, k)) if self.is_tf32 else warp.MmaF16BF16Op(self.dtype, Float32, (_ROWS, 8, k))
        warps = WARPS * groups
        return cute.make_tiled_mma(
            cute.make_mma_atom(op), cute.make_layout((warps, 1, 1)), permutation_mnk=(_ROWS * warps, _COLUMNS, k)
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        tensors: tuple,
        numbers: tuple,
        outputs: tuple,
        workspaces: tuple,
        mma: cute.TiledMma,
        atom: cute.TiledMma,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        shape: cute.Shape,
        order: Raster,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
        own = thread % WARP_GROUP
        allocator = SmemAllocator()
        small = self.epilogue.allocate(allocator)
        buffers = tuple(
            allocator.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner) for layout in (smem_a, smem_b)
        )
        carriers = self.epilogue.carriers(tensors, outputs)
        shared = self.epilogue.buffers(allocator, small, carriers, tensors, outputs)
        workspace = workspaces[0] if const_expr(len(workspaces) > 0) else None
        given = Given(tensors, numbers, outputs, workspace, shape, shape)
        _, _, turn = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        blocks = (cute.size(a, mode=[1]) + (self.depth - 1)) // self.depth
        registers, sums = self.accumulators(mma)
        carried = self.epilogue.partials.carry()
        executed = Int32(0)
        self.begin(turn, order, (a, b), buffers, thread)
        while turn < order.total:
            tile = tile_of(turn, order, (1, 1), (0, 0))
            at = self.place(tile, group)
            held = self.epilogue.fetch(at, own, given)
            sources = self.sources(tile, (a, b), buffers, thread)
            registers.fill(self.accumulator(0))
            self.product(blocks, (a, b), sources, buffers, mma, sums, thread, group)
            self.begin(turn + step, order, (a, b), buffers, thread)
            threads = self.epilogue.team(atom, own, group, Before(executed, 0), shared, given, Last(False, group, {}))
            tile = direct.begin(self.epilogue, at, held, threads)
            direct.subtiles(self.epilogue, registers, tile, threads)
            self.epilogue.leave(tile, carried, threads)
            executed += 1
            turn += step
        if const_expr(len(carried) > 0):
            self.epilogue.partials.leave_carried(carried, self.epilogue.division.warp_of_all(group, own // 32), given)

    def place(self, tile: tuple, group: Any) -> Place:
        """Return the place of a warp group. It shares a tile with the other one, or has one of two tiles abreast."""
        m, n, l = tile
        return Place(m, n, l, group) if self.design.abreast == 1 else Place(m, n * self.design.abreast + group, l, 0)

    def accumulators(self, mma: cute.TiledMma) -> Any:
        """Return a thread's registers of a tile, subtile by subtile, and a view to which multiplications add."""
        _, down, across = mma.partition_shape_C(self.design.tile)
        registers = cute.make_rmem_tensor(4 * down * across, self.accumulator)
        layout = cute.make_layout(((2, 2), down, across), stride=((1, 2), 4 * across, 4))
        return registers, cute.make_tensor(registers.iterator, layout)

    def mma_accumulator(self, mma: cute.TiledMma, sums: cute.Tensor) -> Any:
        """What the tensor cores add to: the sums, or registers beside them, whose values are promoted to the sums."""
        if not self.design.promoted:
            return sums
        registers, added = self.accumulators(mma)
        registers.fill(Float32(0))
        return added

    @cute.jit
    def promote(self, sums: cute.Tensor, added: cute.Tensor, k: Int32, blocks: Int32):
        """Add `added` to the sums in float32, after every `design.promoted` products and after the last block of K."""
        stages = self.design.promoted // self.design.k_bytes
        if k % stages == stages - 1 or k == blocks - 1:
            sums.store(sums.load() + added.load())
            added.fill(Float32(0))

    def bring(self, pair, sources, buffers, k, stage, piece) -> None:
        """Start to copy block `k` of K by cp.async, or a `piece` (number, count) of it."""
        for copies, tensor, source, buffer in zip(self.copies, pair, sources, buffers, strict=True):
            if not copies.by_registers:
                copies.bring(source, tensor, buffer, k, stage, piece)

    def fetch(self, pair, sources, k, piece) -> list:
        """Load a piece of block `k` of K into registers: of A and B, what cp.async cannot copy. None for the rest."""
        return [
            copies.fetch(source, tensor, k, piece) if copies.by_registers else None
            for copies, tensor, source in zip(self.copies, pair, sources, strict=True)
        ]

    def deposit(self, held, sources, buffers, stage, piece) -> None:
        """Store in a stage what `fetch` loaded."""
        for copies, values, source, buffer in zip(self.copies, held, sources, buffers, strict=True):
            if values is not None:
                copies.deposit(source, values, buffer, stage, piece)

    def pieces(self, steps: int) -> int:
        """In how many pieces `fetch` and `deposit` move a block of K. Registers hold one piece at a time, and each
        piece takes at least two of `steps` steps."""
        pieces = 1
        while 4 * pieces <= steps and self.held > pieces * _HELD[self.crowded]:
            pieces *= 2
        return pieces

    def sources(self, tile: tuple, pair: tuple, buffers: tuple, thread: Any) -> tuple:
        """Where this thread's copies of A and of B begin."""
        m, n, l = tile
        return tuple(
            copies.source(tensor, rows, l, thread, buffer)
            for copies, tensor, rows, buffer in zip(self.copies, pair, (m, n), buffers, strict=True)
        )

    @cute.jit
    def begin(self, turn: Int32, order: Raster, pair: tuple, buffers: tuple, thread: Int32):
        """Start to fill all stages but one for the tile of `turn`, if there is one. The epilogue before hides that."""
        if turn < order.total:
            sources = self.sources(tile_of(turn, order, (1, 1), (0, 0)), pair, buffers, thread)
            for stage in cutlass.range(self.stages - 1, unroll=1):
                self.bring(pair, sources, buffers, stage, stage, (0, 1))
                cute.arch.cp_async_commit_group()

    def begin_by_registers(self, pair: tuple, sources: tuple, buffers: tuple) -> None:
        """Fill all stages but one with what goes through registers, at once: accumulators need no registers yet."""
        held = [self.fetch(pair, sources, stage, (0, 1)) for stage in range(self.stages - 1)]
        for stage, values in enumerate(held):
            self.deposit(values, sources, buffers, stage, (0, 1))

    @cute.jit
    def product(
        self,
        blocks: Int32,
        pair: tuple,
        sources: tuple,
        buffers: tuple,
        mma: cute.TiledMma,
        sums: cute.Tensor,
        thread: Int32,
        group: Int32,
    ):
        """The main loop over `blocks` blocks of K, of which `begin` started the first ones. At its end no copy is under
        way, and all stages are free."""
        factors = self.factors(mma, buffers, thread)
        added = self.mma_accumulator(mma, sums)
        steps = self.steps()
        pieces = self.pieces(len(steps))
        beside = len(steps) // pieces  # steps that hide the loads of one piece
        self.begin_by_registers(pair, sources, buffers)
        cute.arch.cp_async_wait_group(self.stages - 2)
        cute.arch.sync_threads()
        first = group * (self.design.tile[1] // self.strip) if const_expr(self.design.abreast > 1) else 0  # strip of B
        self.read(factors, steps[0], 0, first)
        reading, writing = Int32(0), Int32(self.stages - 1)
        for k in cutlass.range(blocks, unroll=1):
            held: dict[int, Any] = {}  # by the number of a piece
            for i in cutlass.range_constexpr(len(steps)):
                if const_expr(i % beside == beside - 1):
                    # Into the stage of the block before this one, which no thread reads any more.
                    self.deposit(held[i // beside], sources, buffers, writing, (i // beside, pieces))
                if const_expr(i == len(steps) - 1):
                    # Now the next stage is there for all threads, and no thread reads the stage that is written next.
                    cute.arch.cp_async_wait_group(self.stages - 2)
                    cute.arch.sync_threads()
                    reading, writing = (reading + 1) % self.stages, reading
                self.read(factors, steps[(i + 1) % len(steps)], reading, first)
                if const_expr(i < len(steps) - 1):
                    # Piece by piece, because no read of fragments is issued before the copies that stand above it.
                    self.bring(pair, sources, buffers, k + self.stages - 1, writing, (i, len(steps) - 1))
                if const_expr(i == len(steps) - 2):
                    cute.arch.cp_async_commit_group()
                if const_expr(i % beside == 0):
                    held[i // beside] = self.fetch(pair, sources, k + self.stages - 1, (i // beside, pieces))
                self.multiply(mma, factors, steps[i], added)
            if const_expr(self.design.promoted > 0):
                self.promote(sums, added, k, blocks)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def steps(self) -> list:
        """Return the steps of a stage: (block of K, strip of columns)."""
        return [
            (block, strip)
            for block in range(self.design.k_bytes // _BLOCK)
            for strip in range(self.design.tile[1] // self.strip)
        ]

    def factors(self, mma: cute.TiledMma, buffers: tuple, thread: Any) -> Any:
        """For A and B: the copy by ldmatrix, its source and its target, and the fragments that are multiplied.

        For B they are divided into strips of columns. If two tiles are side by side, the source has the strips of both
        tiles, and the rest those of one.
        """
        thread = thread % (WARP_GROUP * self.design.sharing)
        own = mma.get_slice(thread)
        first = (None, None, 0)
        of_tile = cute.local_tile(buffers[1][first], (self.design.tile[1], self.depth), (0, 0))
        fragments = (
            mma.make_fragment_A(own.partition_A(buffers[0][first])),
            mma.make_fragment_B(own.partition_B(of_tile)),
        )
        found = []
        makers = cute.make_tiled_copy_A, cute.make_tiled_copy_B
        strips = None, self.strip // _COLUMNS
        for make, buffer, fragment, by_k, width in zip(makers, buffers, fragments, self.by_k, strips, strict=True):
            copy = make(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not by_k, 4), self.dtype), mma)
            mine = copy.get_slice(thread)
            from_, to = mine.partition_S(buffer), copy.retile(fragment)
            if width is not None:
                from_ = cute.logical_divide(from_, (None, width, None, None))
                to = cute.logical_divide(to, (None, width, None))
                fragment = cute.logical_divide(fragment, (None, width * _COLUMNS // 8, None))
            found.append((copy, from_, to, fragment))
        return found

    def read(self, factors: Any, step: tuple, stage: Any, first: Any) -> None:
        """Read the fragments of a step from a stage; those of A only with the first strip."""
        (copy_a, from_a, to_a, _), (copy_b, from_b, to_b, _) = factors
        block, strip = step
        if strip == 0:
            cute.copy(copy_a, self.block(0, from_a, block, stage), to_a[None, None, block])
        strips = from_b[None, (None, first + strip), None, None]
        cute.copy(copy_b, self.block(1, strips, block, stage), to_b[None, (None, strip), block])

    def block(self, operand: int, source: cute.Tensor, block: int, stage: Any) -> cute.Tensor:
        """Return what a thread reads of a block of K. If lines lie along K, the address is that of the first block and
        one xor. So the main loop swizzles no address, and takes 0.98 of the time of before (mma_sync_h200.json)."""
        if not self.by_k[operand]:
            return source[None, None, block, stage]
        first = source[None, None, 0, 0]
        before = stage * (self.design.brought[operand] * self.design.k_bytes)
        address = swizzled(Int32(first.iterator.toint()), self.design.k_bytes) + before
        place = cute.make_ptr(self.dtype, address ^ (block * _BLOCK), cute.AddressSpace.smem, assumed_align=_BLOCK // 2)
        return cute.make_tensor(place, first.layout)

    def multiply(self, mma: cute.TiledMma, factors: Any, step: tuple, sums: cute.Tensor) -> None:
        """Multiply the fragments that were read for a step."""
        block, strip = step
        a, b = factors[0][3][None, None, block], factors[1][3][None, (None, strip), block]
        own = cute.logical_divide(sums, (None, None, self.strip // 8))[None, None, (None, strip)]
        if self.in_bytes:
            mma_8bit.multiply(self.types, own, a, b)
            return
        if self.is_tf32:
            if strip == 0:
                _round(a)
            _round(b)
        cute.gemm(mma, own, a, b, own)


def _round(fragment: Any) -> None:
    """Round float32 to the nearest tf32: mma.sync itself would cut off bits."""
    for i in range(cute.size(fragment)):
        value = fragment[i]
        fragment[i] = Int32(cute.arch.cvt_f32_tf32(value.bitcast(Float32)))


def _with_batches(tensor: Any) -> Any:
    """Return a matrix as a batch of one matrix."""
    if cute.rank(tensor) == 3:
        return tensor
    layout = cute.make_layout((*tensor.shape, Int32(1)), stride=(*tensor.stride, Int64(0)))
    return cute.make_tensor(tensor.iterator, layout)
