"""The tuned numbers of the Hopper kernel, each with its unit, its evidence, and the reason for it. Imports no cutlass.

`measured` names experiments in benchmarks/results/kernel_variants.json, files beside that one, or tests that read how
much the compiler spills. docs/tuning.md tells what was found, and what was tried and not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Tuned(Generic[Value]):
    """One tuned number, or several of the same kind."""

    value: Value
    unit: str
    measured: tuple[str, ...]
    why: str


MODEL = ("picked_h100.json", "picked_h200.json", "drawn_h100.json", "drawn_h100_second.json", "placed_h200.json")
ORDER = ("placed_h200.json", "placement_h200.json")
EPILOGUES = ("epilogues_h100.json", "epilogues_h200.json")
COLD = ("cold_code_h200.json",)
SPLITS = ("split_h100.json",)
SPILLS = ("test_reductions_fit_beside_the_widest_accumulator",)

# How long K is.

SHORT_K = Tuned(
    2048,
    "bytes along K",
    ("reductions-128x192-k512", "stages-k512"),
    "With a shorter K, an epilogue that reduces takes longer than the main loop of a tile, and is waited for.",
)
LONG_K = Tuned(
    8192,
    "bytes along K",
    ("stages-float32-k4096", "stages-float32-k1024", "spilling-64x128"),
    "From this length on, stages of A and B gain more than shared memory for tiles of operands and outputs.",
)

# The model of waves of tiles.

RATES: Tuned[Mapping[tuple[tuple[int, int], bool], float]] = Tuned(
    {
        ((128, 128), True): 0.98,
        ((128, 192), True): 0.95,
        ((128, 192), False): 0.95,
        ((192, 128), True): 0.94,
        ((128, 160), True): 0.96,
        ((64, 256), True): 0.88,
        ((128, 256), False): 0.89,
        ((128, 224), False): 0.9,
        ((256, 128), False): 0.88,
        ((64, 128), True): 0.87,
        ((128, 96), True): 0.89,
        ((128, 64), True): 0.84,
        ((64, 64), True): 0.62,
        ((80, 128), True): 0.85,
        ((96, 256), False): 0.91,
        ((144, 128), True): 0.92,
        ((160, 128), True): 0.94,
        ((176, 128), True): 0.91,
        ((128, 80), True): 0.87,
        ((128, 112), True): 0.96,
        ((128, 144), True): 0.95,
        ((96, 128), True): 0.88,
        ((112, 128), True): 0.96,
    },
    "of the processor's operations a second, by tile and ping-pong",
    MODEL,
    "The rates of the tensor cores where neither L2 nor memory is a bound, by a fit of the model to 730 products.",
)
FEW_ROWS_RATES: Tuned[Mapping[int, float]] = Tuned(
    {16: 0.28, 32: 0.4, 64: 0.4},
    "of the processor's operations a second, by rows of a tile",
    (
        "few_columns_h200.json",
        "judged_few_rows_h200.json",
        "judged_h200_second.json",
        "judged_h200_third.json",
        "picked_h200.json",
        "placed_h200.json",
    ),
    "The rate at which a multiprocessor reads B bounds these tiles. Fitted to the products of few rows in the files.",
)
PROMOTED_RATE: Tuned[Mapping[tuple[bool, bool], float]] = Tuned(
    {(False, False): 0.95, (True, False): 0.55, (False, True): 0.77, (True, True): 0.39},
    "rate beside the same tile's, by ping-pong and by whether block scales multiply the sums",
    ("promoted-fp8", "promotion_h100.json", "eight_bit_designs_h200.json"),
    "In a shared tile one warp group multiplies while the other adds in float32. In ping-pong the tensor cores wait.",
)
CONVERTED: Tuned[Mapping[int, float]] = Tuned(
    {1: 150, 2: 110},
    "multiplications, by warp groups that convert",
    ("few_columns_h200.json",),
    "The time to convert a value of B in the main loop, by a fit: 64 along K take one group 2.6 ns, 128 take two 3.8.",
)
WAVE_HIDDEN = Tuned(0.22, "waves", MODEL, "A multiprocessor begins its next tile while others still work on theirs.")
EXPOSED_K = Tuned(
    130,
    "elements of 16 bits along K",
    (*MODEL, "trees_of_two_models_h100.json"),
    "Loads and stores that no other tile hides take as long as this much K. A fit to plain products alone gives 72.",
)
BY_ONE_GROUP = Tuned(
    4,
    "of the time of an epilogue's instructions",
    EPILOGUES,
    "By a fit, one warp group takes 4 times as long as two: each of its four warps waits for its own results.",
)
FETCHED_AHEAD = Tuned(
    52 * 1024,
    "bytes of machine code of an epilogue",
    COLD,
    "If other kernels have filled the instruction cache since, a launch waits for its code beyond these bytes.",
)
FETCHED_LATE = Tuned(3.7e9, "bytes a second", COLD, "The rate at which each multiprocessor fetches code beyond that.")
CLUSTER_LAUNCH = Tuned(0.26e-6, "seconds", MODEL, "CTAs of a cluster start together, and wait for each other.")
NEXT_LAUNCH = Tuned(
    1.6e-6,
    "seconds",
    ("next_launch_h200.json", "few_columns_h200.json"),
    "Saved by a launch of few tiles that starts while the one before ends, which leaves half of the multiprocessors.",
)
CLUSTERS_OF_FOUR = Tuned(
    1.15,
    "time",
    ("rows_of_1024_h100.json", "clusters-of-four"),
    "Four CTAs of 256 columns that share rows take 1.12 times as long as eight of 128: nothing hides their epilogue.",
)
PAIRS_THAT_EXCHANGE = Tuned(
    1.08,
    "time",
    ("gemm_epilogue.json",),
    "If a cluster shares rows, a ping-pong group waits for that of every other CTA, and its partner waits for it.",
)
SPILLING = Tuned(2.0, "time", ("spilling-64x128",), "A kernel that spills is so slow that 64 x 128 is chosen instead.")
BANDWIDTH = Tuned(0.92, "of memory's bandwidth", SPLITS, "The highest share that products with few rows reach.")
L2_EXPOSED = Tuned(0.77, "of the time", MODEL, "By a fit: this share of L2's time to send A and B counts as a bound.")
MERGED = Tuned(
    0.5,
    "of what clusters beside each other read alike",
    ORDER,
    "Requests of neighbouring clusters for the same data are merged on the way to L2 if they come at the same time.",
)
TWO_LINES = Tuned(
    2.5,
    "time of a line of L2",
    MODEL,
    "If a row begins within a line, its 128 bytes lie in two lines. With rows of 2000 bytes, L2 bounds all designs.",
)
SUM_READ = Tuned(180, "multiplications", MODEL, "Reading and adding one value, of 4 bytes, of another part of K.")
SUM_WRITTEN = Tuned(50, "multiplications", MODEL, "Writing one value of a part's sums; all parts of K do so at once.")
HANDED_OVER = Tuned(
    5_500_000, "multiplications", MODEL, "Waiting for the flags of the other parts of K: 1.8 us in all."
)
BAND = Tuned(
    8,
    "clusters along a side",
    ("bands-long-k", "stages-cool-clock", *ORDER),
    "Eight clusters share operands best. A group of multiprocessors runs as many clusters of two CTAs.",
)
SHORT_BAND = Tuned(
    4,
    "clusters along M",
    ("bands-short-k", "bands-of-two"),
    "With a short K, writing the outputs decides. Bands of four clusters write longer contiguous pieces of a row.",
)

# Stages.

FEWEST_STAGES = Tuned(
    3,
    "stages of A and B",
    ("stages-float32-k4096",),
    "Two stages do not hide the latency of a TMA load. With three a product takes a quarter longer.",
)
SHORT_STAGES = Tuned(
    4,
    "stages of A and B",
    ("stages-with-operands", "stages-k512"),
    "Enough if K is short and operands come in tiles: the shared memory that is left serves these tiles.",
)
FEWER_STAGES = Tuned(
    5, "stages of A and B", ("stages-two-operands", "stages-one-operand"), "Enough without reductions or spare stages."
)
ENOUGH_STAGES = Tuned(
    6,
    "stages of A and B",
    ("stages-row-reductions", "spare-stages", "stages-cool-clock"),
    "Enough if the epilogue reduces, or if spare stages hold the operands of a CTA's last tile.",
)
LEAST_BYTES = Tuned(
    144 << 10,
    "bytes of A and B",
    ("stages-float32-k4096", "stages-float32-k1024", "stages-bfloat16-many"),
    "If K is long, threads move 32-bit operands and outputs directly until the stages of A and B have these bytes.",
)
AHEAD_STAGES = Tuned(
    6,
    "stages of A and B",
    ("ahead-six-stages", "ahead-five-stages", "ahead-long-epilogues", "ahead-row-squares"),
    "With fewer stages, a second block of K that is being multiplied takes a stage that the loads need.",
)
EARLY_SUBTILES = Tuned(
    2, "subtiles", ("early-subtiles",), "Reading them during the last multiplications frees their stages earlier."
)
EARLY_BYTES = Tuned(
    2,
    "bytes a value",
    ("test_several_operands_are_not_read_early",),
    "With more bytes, the registers that hold operands of the first subtiles would spill.",
)

# Registers.

PRODUCER_REGISTERS = Tuned(
    (24, 40),
    "registers of a thread",
    ("test_cross_compiles_without_spills",),
    "Of a thread that loads A and B only, and of one that loads the epilogue's tiles too and holds more addresses.",
)
FEW_REGISTERS = Tuned(
    48,
    "registers of a thread beside the accumulator's",
    ("registers-bce", "registers-long-epilogues", "registers-few"),
    "With more registers, so many values are computed at once that the tensor cores wait for their accumulators.",
)
FEW_REDUCTIONS = Tuned(2, "reductions", SPILLS, "More hold too many partial results beside a large accumulator.")
ROOM_BESIDE_192 = Tuned(
    4, "fragments of 16 bits a value", (*SPILLS, "registers-or-128x192"), "More spill beside 192 accumulators a thread."
)
ROOM_BESIDE_160 = Tuned(
    6,
    "fragments of 16 bits a value",
    ("test_six_fragments_fit_beside_160_accumulators",),
    "More fragments may spill beside 160 accumulators a thread.",
)
ROOM_BESIDE_128 = Tuned(
    13,
    "fragments of 16 bits a value",
    ("spilling-64x128",),
    "With more fragments, tiles of 64 x 128 are faster than tiles of 128 x 128, whose registers then spill.",
)
ROOM_WHERE_K_IS_LONG = Tuned(
    16,
    "fragments of 16 bits a value",
    ("spilling-64x128",),
    "The same limit if K is long: the main loop then hides a part of the cost of spilling.",
)

# The merging kernel.

PARTS_AT_ONCE = Tuned(
    8,
    "parts that a thread loads before it waits",
    ("merge-four-at-once", "merge-addresses-early", "merge-then-32"),
    "Loading one part at a time waits for memory each time. For rows there are seldom more than eight a thread.",
)
WORDS_AT_ONCE = Tuned(32, "words of 32 bits", ("merge-then-32",), "More would need too many registers.")
