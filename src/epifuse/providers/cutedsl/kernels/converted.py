"""A of 8 bits beside B of 16: a warp group converts its rows of a stage in registers, from which wgmma takes A.

A and B are exchanged, so A is the weight. TMA brings it unconverted: memory is read at a byte an element. Of 16 numbers
along K a thread multiplies two neighbours and the two numbers eight behind them, in two rows that are eight apart. So
it loads 16 bits at a time. The loads of a warp go to different banks, because a row's 128 bytes are swizzled: each 16
bytes, as many as an instruction takes of K, lie at their own number xor the row's.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Uint16, Uint32

from epifuse.providers.cutedsl.design import K_SPAN
from epifuse.providers.cutedsl.kernels.swizzle import swizzled
from epifuse.providers.cutedsl.kernels.widen import widened

_BLOCK = 16  # numbers along K that one instruction multiplies, a byte each in shared memory
_PAIRS = (0, 8 * K_SPAN, 8, 8 * K_SPAN + 8)  # bytes from a thread's first pair, in the order of its registers


class Converted:
    """How a stage of A, of 64 rows for each warp group, becomes a fragment in registers."""

    def __init__(self, narrow: Any, wide: Any) -> None:
        self.narrow, self.wide = narrow, wide

    def start(self, mma: cute.TiledMma, buffer: cute.Tensor, thread: Any) -> Any:
        """The address of a thread's first pair in the first stage."""
        return swizzled(mma.get_slice(thread).partition_A(buffer).iterator.toint())

    def fragment(self, mma: cute.TiledMma, buffer: cute.Tensor) -> cute.Tensor:
        """Registers for the converted values of a stage."""
        stage = mma.get_slice(0).partition_A(buffer)[None, None, None, 0]
        return cute.make_rmem_tensor(mma.make_fragment_A(stage).layout, self.wide)

    def fetch(self, start: Any, buffer: cute.Tensor, stage: Any, fragment: cute.Tensor) -> None:
        """Load a thread's values of a stage of A, and convert them into `fragment`."""
        rows, depth, _ = buffer.shape
        assert cute.size(depth) == K_SPAN, "a row of a stage is one swizzle pattern"
        place = start + stage * (cute.size(rows) * K_SPAN)
        words = cute.recast_tensor(fragment, Uint32)
        for block in range(K_SPAN // _BLOCK):
            first = place ^ (block * _BLOCK)
            for i, pair in enumerate(_PAIRS):
                words[len(_PAIRS) * block + i] = widened(_loaded(first + pair), self.narrow, self.wide)

    def take(self, coming: cute.Tensor, fragment: cute.Tensor) -> None:
        """Move the fetched values `coming` to `fragment`, the registers that are multiplied.

        wgmma may still read `fragment` while the next stage is fetched, which LLVM does not know. LLVM would take one
        register for both values. The instruction between them prevents this.
        """
        words, found = cute.recast_tensor(fragment, Uint32), cute.recast_tensor(coming, Uint32)
        for i in range(cute.size(words)):
            words[i] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[found[i]]
            )


def _loaded(address):
    pointer = cute.make_ptr(Uint16, address, cute.AddressSpace.smem, assumed_align=2)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
