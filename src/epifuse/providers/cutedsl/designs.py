"""The designs for which kernels can be built: the candidates that planning chooses from. Imports no cutlass."""

from __future__ import annotations

from dataclasses import replace

from epifuse.base.target import TARGETS
from epifuse.plan import KernelSpec
from epifuse.providers.cutedsl.design import MATH_GROUPS, MMA_SYNC, TCGEN05, Design

_DOWN, _ACROSS, _ALONE = (2, 1), (1, 2), (1, 1)

DESIGNS = tuple(
    Design(tile, cluster, pingpong, spans)
    for tile, pingpong, spans, clusters in (
        ((128, 256), False, 1, (_DOWN, _ACROSS, _ALONE)),
        ((128, 224), False, 1, (_DOWN,)),
        ((256, 128), False, 1, (_DOWN, _ACROSS)),
        ((128, 192), True, 1, (_DOWN, _ACROSS, _ALONE)),
        ((128, 192), False, 1, (_DOWN, _ACROSS)),
        ((128, 160), True, 1, (_DOWN, _ACROSS)),
        ((128, 128), True, 1, (_DOWN, _ACROSS, _ALONE)),
        ((128, 96), True, 1, (_DOWN, _ACROSS, _ALONE)),
        ((128, 64), True, 1, (_DOWN, _ALONE)),
        ((64, 128), True, 1, (_DOWN, _ACROSS, _ALONE)),
        ((64, 256), True, 1, (_DOWN, _ACROSS, _ALONE)),
        ((64, 64), True, 2, (_DOWN, _ACROSS, _ALONE)),
    )
    for cluster in clusters
)
"""Candidates. A ping-pong tile has one warp group, whose registers hold 128 x 192 at most. If a CTA has only one tile,
two warp groups that share it run its epilogue in half the time, and hold operands that one has no registers for.

64 x 64 multiplies 128 bytes of K so fast that waiting for a stage shows, so it has two spans a stage. Wider tiles would
have too few stages then. Clusters that were within 1 % of another design for 563 drawn products are left out; they were
measured with an earlier order of tiles (benchmarks/results/{picked,drawn}_*.json)."""

NARROW_DESIGNS = tuple(
    Design(tile, cluster, True) for tile, cluster in (((128, 80), _DOWN), ((128, 112), _ACROSS), ((128, 144), _ACROSS))
)
"""Further candidates where tiles are few: a multiprocessor with two tiles takes twice as long as one with one tile. 512
x 3584 x 14336 has 112 tiles of 128 x 128, or 128 tiles of 128 x 112, which take 0.89 of the time. With these three, and
tiles of 96 and 112 rows where A and B are exchanged, the fastest design takes 0.98 of the time of the earlier one for
108 products with few tiles (widths_h200.json). Other widths and clusters gained less, and more parts of K gained only
for two of 22 weight gradients. Subtiles have 16 columns: `refusals.untried` says what these designs do not support."""

HEAD_DESIGNS = (Design((192, 128), _ACROSS, True),)
"""Further candidates where a tile has whole heads of 128 columns, or is of one region of N. They take as long as 128 x
192, and for plain products they would gain 0.3 % (drawn_h100_second.json). With K of 512 and 768 an epilogue of heads
takes 1 % less time on average than in 128 x 128 (heads_short_k_h100.json)."""

ROW_DESIGNS = tuple(
    Design(tile, cluster, pingpong)
    for tile, pingpong in (((128, 256), False), ((128, 128), True), ((64, 128), True))
    for cluster in ((1, 4), (1, 8))
)
"""Further candidates where values need whole rows, which the CTAs of a cluster hold together."""

SPLIT_DESIGNS = tuple(
    Design(tile, cluster, True, spans, split=split)
    for tile, spans, cluster, splits in (
        ((128, 192), 1, _DOWN, (2, 4)),
        ((128, 160), 1, _DOWN, (2,)),
        ((128, 128), 1, _DOWN, (2, 3, 4, 8)),
        ((128, 128), 1, _ALONE, (4,)),
        ((64, 128), 1, _DOWN, (3, 4)),
        ((64, 64), 2, _DOWN, (2,)),
        ((64, 64), 2, _ALONE, (2, 4, 8)),
    )
    for split in splits
)
"""Further candidates where tiles are few and K is long: neighbouring clusters each multiply a part of a tile's K, and
one of them adds up the sums.

Tiles of 128 x 256 came within 10 % of these at best: their sums take 4 us a tile (benchmarks/results/split_h100.json).
Other numbers of parts and other clusters of these tiles were at most 3 % faster on 27 products (split_many_h100.json,
split_many_h100_second.json)."""

SPLIT_ROW_DESIGNS = tuple(replace(design, split=2) for design in ROW_DESIGNS if design.cluster == (1, 4))
"""`ROW_DESIGNS` in clusters of four, with K in two parts. Each CTA of the cluster that has the first part adds the sums
of one CTA of the other cluster."""

PLAIN_DESIGNS = (*DESIGNS, *NARROW_DESIGNS, *HEAD_DESIGNS, *ROW_DESIGNS, *SPLIT_DESIGNS, *SPLIT_ROW_DESIGNS)


SWAPPED_DESIGNS = tuple(
    Design((rows, columns), _ALONE, columns <= 64, 2, swapped=True, split=split)
    for columns, splits in ((64, (1, 2, 4, 8)), (56, (1,)), (48, (1,)), (40, (1,)), (128, (1, 2, 4)))
    for split in splits
    for rows in (16, 32, 64)
)
"""Candidates for few rows, with A and B exchanged (`swap.py`), as tiles of the result.

wgmma multiplies at least 64 rows of its first operand, here columns of the result. A tile of fewer columns multiplies
64 as well, and stores only its own: for 5120 columns, 128 tiles of 40 take 0.94 of the time of 80 tiles of 64. Tiles of
32 columns were faster for two of 16 layers, by 2 % at most (few_columns_h200.json). Eight rows took as long as sixteen.
Four and eight parts of K are for products that have few columns, too. Tiles of 128 columns are for a weight of 8 bits
only, because two warp groups convert half of it each: 0.81 of the time for 28672 columns (the same file)."""

WIDE_SWAPPED_DESIGNS = tuple(
    Design(tile, cluster, pingpong, swapped=True, split=split)
    for tile, cluster, pingpong, splits in (
        ((80, 128), _DOWN, True, (1,)),
        ((96, 128), _ACROSS, True, (1,)),
        ((112, 128), _ACROSS, True, (1,)),
        ((144, 128), _ACROSS, True, (1, 3)),
        ((160, 128), _ACROSS, True, (1, 3)),
        ((176, 128), _ACROSS, True, (1,)),
        ((192, 128), _ACROSS, True, (1,)),
        ((96, 256), _ACROSS, False, (1,)),
    )
    for split in splits
)
"""Candidates for more rows, with A and B exchanged, as tiles of the result. wgmma multiplies 64 rows, but any multiple
of 8 columns. So 298 rows take two tiles of 160, where they would take three of 128.

Among 42 further tiles and clusters those of 80, 96 and 192 rows and 128 x 224 above gained most: with them the fastest
design takes 0.6 % less for 105 drawn products of more than 256 rows, and 2 % less for those where cuBLAS had been
faster. All 42 would gain a further 0.6 % and 1.7 % (widths_h100.json). Three parts of K are for few tiles: for 260 x
1536 x 8960 other tiles took at least 1.25 of their time (split_many_h100_second.json)."""


MULTISTAGE_DESIGNS = tuple(
    Design(tile, (1, 1), False, instruction=MMA_SYNC, abreast=abreast)
    for tile, abreast in (
        ((256, 64), MATH_GROUPS),
        ((256, 128), 1),
        ((128, 64), MATH_GROUPS),
        ((128, 128), 1),
        ((128, 32), MATH_GROUPS),
        ((128, 256), 1),
    )
)
"""Candidates of the kernel for mma.sync. A warp reads all rows of B that its warp group multiplies, and its own rows of
A. So two tiles of 128 x 64 abreast take 0.85 of the time of one of 128 x 128 (mma_sync_h100.json), and two of 256 x 64
take 0.98 to 1.00 of the time of one of 256 x 128 (mma_sync_h200.json). Tiles of 128 columns are for heads and whole
rows, and the last one is for the widest rows."""


TENSOR_MEMORY_DESIGNS = tuple(
    Design(tile, cluster, True, instruction=TCGEN05)
    for tile in ((128, 256), (128, 128), (128, 64))
    for cluster in (_DOWN, _ALONE)
)
"""Candidates of the kernel for tcgen05.mma. A tile belongs to one CTA. Its 128 rows are the lanes of tensor memory, and
two tiles take at most all of its columns. A cluster of two is a pair of CTAs that multiply together."""


_ANY: tuple[int, ...] = (80, 86, 89, 90, 120)
_HOPPER, _TENSOR_MEMORY = (90,), (100, 103)


def _spec(design: Design) -> KernelSpec:
    (m, n), (cm, cn) = design.tile, design.cluster
    if design.by_warps:
        summary, abreast = "persistent, cp.async + mma.sync", "_abreast" if design.abreast > 1 else ""
        name, ccs = f"sm80_gemm_{m}x{n}_{design.schedule}{abreast}", _ANY
    elif design.in_tensor_memory:
        summary = "persistent warp-specialised TMA + tcgen05.mma"
        name, ccs = f"sm100_gemm_{m}x{n}_{design.schedule}_{cm}x{cn}", _TENSOR_MEMORY
    else:
        summary, ccs = "persistent warp-specialised TMA + wgmma", _HOPPER
        name = f"sm90_gemm_{m}x{n}_{design.schedule}_{cm}x{cn}"
        name += f"_split{design.split}" if design.split > 1 else ""
    never = tuple(cc for cc in ccs if not TARGETS[cc].has_wgmma)
    return KernelSpec(name, "cutedsl", "cuda", ccs, summary, design, never)


PLAIN_SPECS = tuple(map(_spec, PLAIN_DESIGNS))
SWAPPED_SPECS = tuple(map(_spec, SWAPPED_DESIGNS))
WIDE_SWAPPED_SPECS = tuple(map(_spec, WIDE_SWAPPED_DESIGNS))
MULTISTAGE_SPECS = tuple(map(_spec, MULTISTAGE_DESIGNS))
TENSOR_MEMORY_SPECS = tuple(map(_spec, TENSOR_MEMORY_DESIGNS))
HOPPER_SPECS = PLAIN_SPECS + SWAPPED_SPECS + WIDE_SWAPPED_SPECS + MULTISTAGE_SPECS
"""The kernels that run on Hopper."""
SPECS = HOPPER_SPECS + TENSOR_MEMORY_SPECS
