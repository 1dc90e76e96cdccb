"""A tile's sums in tensor memory: which values of a subtile a thread has, and how they are read and replaced.

Tensor memory has 128 lanes, which are rows of a tile, and 512 columns of 32 bits. A warp reads the 32 lanes that its
number within its warp group says. Of these it takes 16 for a subtile, in the order of a wgmma accumulator: the four
threads that share a row then write whole sectors of memory, and the epilogue is the one of the other kernels.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from epifuse.providers.cutedsl import device_math as dm
from epifuse.providers.cutedsl.design import SUBTILE, WARP_GROUP, WARPS, Design
from epifuse.providers.cutedsl.kernels.fragment import Fragment, listed

LANES = 128
COLUMNS = 512
_LANE = 1 << 16  # of an address, whose low bits are the column
_OF_WARP = LANES // WARPS
_TAKEN = SUBTILE[0] // WARPS  # of a warp's lanes in a subtile
_WIDTH = SUBTILE[1]
_REPEATED = tcgen05.Repetition(_WIDTH // 8)  # of 256 bits of each lane


class Slabs:
    """The values of each thread in a subtile: stands where other kernels have a tiled multiplication."""

    def fragment(self) -> Fragment:
        """Which value of a subtile each register of a warp holds, while tracing."""
        return Fragment.of(lambda lane: self.get_slice(lane).places)

    def get_slice(self, thread: Any) -> Slab:
        """A thread's."""
        return Slab(thread)

    def partition_shape_C(self, subtile: tuple[int, int]) -> tuple[int, ...]:  # noqa: N802
        """How many values a thread has."""
        return (subtile[0] * subtile[1] // WARP_GROUP,)


class Slab:
    """A thread's values in a subtile."""

    def __init__(self, thread: Any) -> None:
        start = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
        copy = _copied(_loading(), _subtiles(start, _WIDTH))
        self.places = [_in_subtile(*place) for place in listed(_of_thread(copy, thread))]

    def partition_C(self, _: Any) -> list[tuple[Any, Any]]:  # noqa: N802
        """Their rows and columns, of the 64 rows of a subtile."""
        return self.places


class Sums:
    """The sums of a warp group's tile, which begin at a place in tensor memory, as one of its threads reads them."""

    def __init__(self, start: Any, design: Design, thread: Any) -> None:
        subtiles = _subtiles(start, design.columns)
        self.loading, self.storing = (_copied(operation, subtiles) for operation in (_loading(), _storing()))
        self.source = self.loading.get_slice(thread).partition_S(subtiles)
        self.target = self.storing.get_slice(thread).partition_D(subtiles)
        self.shape = _of_thread(self.loading, thread).shape

    def read(self, spot: Any, shape: Any) -> Any:
        """The values of a subtile."""
        values = cute.make_rmem_tensor(self.shape, Float32)
        cute.copy(self.loading, self.source[None, spot.down, None, 0, spot.right], values)
        cute.arch.fence_view_async_tmem_load()
        return cute.make_tensor(values.iterator, cute.make_layout(shape)).load()

    def replace(self, spot: Any, fragment: Any) -> None:
        """Others in their place, which the same thread reads later."""
        values = cute.make_rmem_tensor(self.shape, Float32)
        for i, value in enumerate(dm.numbers(fragment)):
            values[i] = value
        cute.copy(self.storing, values, self.target[None, spot.down, None, 0, spot.right])
        cute.arch.fence_view_async_tmem_store()


def _subtiles(start: Any, columns: int) -> Any:
    """All lanes of a tile by subtiles' columns."""
    memory = cute.make_tensor(start, cute.make_layout((LANES, columns), stride=(_LANE, 1)))
    return cute.flat_divide(memory, (LANES, _WIDTH))


# Made while tracing, never at import: CuTe DSL refuses an operation that the architecture compiled for lacks, and at
# import that is the GPU of the machine.
def _loading() -> Any:
    return tcgen05.Ld16x256bOp(_REPEATED)


def _storing() -> Any:
    return tcgen05.St16x256bOp(_REPEATED)


def _copied(operation: Any, subtiles: Any) -> Any:
    return tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), subtiles[None, None, 0, 0])


def _of_thread(copy: Any, thread: Any) -> Any:
    """A thread's part of the first of the subtiles below each other, by lane and column."""
    return copy.get_slice(thread).partition_D(cute.make_identity_tensor((LANES, _WIDTH)))[None, 0, None]


def _in_subtile(lane: Any, column: Any) -> tuple[Any, Any]:
    """Where a lane of the first subtile is among its rows."""
    return lane // _OF_WARP * _TAKEN + lane % _OF_WARP, column
