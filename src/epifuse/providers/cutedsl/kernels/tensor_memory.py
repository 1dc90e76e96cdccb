"""A tile's sums in tensor memory: which values of a subtile a thread has, and how they are read and replaced.

Tensor memory has 128 lanes, which are rows of a tile, and 512 columns of 32 bits. A warp reads the 32 lanes that its
number within its warp group says. Of these it takes 16 for a subtile, in the order of a wgmma accumulator. The four
threads that share a row then write whole sectors of memory, and the epilogue is the same as in other kernels.
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
_LANE = 1 << 16  # from lane to lane in an address, whose low bits are the column
_OF_WARP = LANES // WARPS
_TAKEN = SUBTILE[0] // WARPS  # lanes of a warp that are in one subtile
_WIDTH = SUBTILE[1]
_REPEATED = tcgen05.Repetition(_WIDTH // 8)  # loads of 256 bits of each lane


class Slabs:
    """The values of each thread in a subtile. It takes the place of the tiled multiplication of other kernels."""

    def fragment(self) -> Fragment:
        """Return which value of a subtile each register of a warp holds, while tracing."""
        return Fragment.of(lambda lane: self.get_slice(lane).places)

    def get_slice(self, thread: Any) -> Slab:
        """The values of one thread."""
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
        """The values' rows and columns in a subtile of 64 rows."""
        return self.places


class Sums:
    """The sums of a warp group's tile in tensor memory, from address `start` on, as one of its threads reads them."""

    def __init__(self, start: Any, design: Design, thread: Any) -> None:
        subtiles = _subtiles(start, design.columns)
        self.loading, self.storing = (_copied(operation, subtiles) for operation in (_loading(), _storing()))
        self.source = self.loading.get_slice(thread).partition_S(subtiles)
        self.target = self.storing.get_slice(thread).partition_D(subtiles)
        self.shape = _of_thread(self.loading, thread).shape

    def read(self, spot: Any, shape: Any) -> Any:
        """Return the values of a subtile."""
        values = cute.make_rmem_tensor(self.shape, Float32)
        cute.copy(self.loading, self.source[None, spot.down, None, 0, spot.right], values)
        cute.arch.fence_view_async_tmem_load()
        return cute.make_tensor(values.iterator, cute.make_layout(shape)).load()

    def replace(self, spot: Any, fragment: Any) -> None:
        """Write other values in their place, which the same thread reads later."""
        values = cute.make_rmem_tensor(self.shape, Float32)
        for i, value in enumerate(dm.numbers(fragment)):
            values[i] = value
        cute.copy(self.storing, values, self.target[None, spot.down, None, 0, spot.right])
        cute.arch.fence_view_async_tmem_store()


def _subtiles(start: Any, columns: int) -> Any:
    """A tile's tensor memory, all lanes of it, divided by the columns of subtiles."""
    memory = cute.make_tensor(start, cute.make_layout((LANES, columns), stride=(_LANE, 1)))
    return cute.flat_divide(memory, (LANES, _WIDTH))


# Operations are made while tracing, never at import: CuTe DSL refuses those that the target architecture lacks, and at
# import the target is the machine's GPU.
def _loading() -> Any:
    return tcgen05.Ld16x256bOp(_REPEATED)


def _storing() -> Any:
    return tcgen05.St16x256bOp(_REPEATED)


def _copied(operation: Any, subtiles: Any) -> Any:
    return tcgen05.make_tmem_copy(cute.make_copy_atom(operation, Float32), subtiles[None, None, 0, 0])


def _of_thread(copy: Any, thread: Any) -> Any:
    """The (lane, column) of a thread's values in the uppermost of the subtiles that lie below each other."""
    return copy.get_slice(thread).partition_D(cute.make_identity_tensor((LANES, _WIDTH)))[None, 0, None]


def _in_subtile(lane: Any, column: Any) -> tuple[Any, Any]:
    """Return (row, column) in a subtile for a lane and column of the uppermost one."""
    return lane // _OF_WARP * _TAKEN + lane % _OF_WARP, column
