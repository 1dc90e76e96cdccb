"""What planning must know of each operation on the device, one row for each. Imports no cutlass.

The device tables themselves, `primitives.py` and `kernels/reduce.py`, need cutlass. A test compares their rows with
these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from epifuse.ir import Graph, Node
from epifuse.providers.cutedsl import segments
from epifuse.providers.cutedsl.precision import Accuracy
from epifuse.providers.cutedsl.program import Program

Registers = Literal["few", "some", "many", "most"]
"""How many of a thread's registers a function takes. *few*: reductions have room beside it. *some*: beside reductions
200 to 2800 bytes spill. *many*: it also spills with the fewer registers of an epilogue that a main loop hides. *most*:
as *many*, and beside a large accumulator it spills even without reductions, except with `fast_math`."""


class Cost(NamedTuple):
    """What a function takes of a thread: registers, and machine instructions for one value in full accuracy and in its
    `narrow` form (epilogue_instructions.json). `narrow` is None if the two are the same."""

    registers: Registers
    instructions: int
    narrow: int | None = None

    def of(self, accuracy: Accuracy) -> int:
        """Instructions for one value at this accuracy."""
        return self.instructions if accuracy == "full" or self.narrow is None else self.narrow


_HELD, _ONE, _TWO = Cost("few", 0), Cost("few", 1), Cost("few", 2)
_SOME = Cost("some", 1)

LEAVES: Mapping[str, Cost] = {
    "accum": _HELD,
    "load": _HELD,
    "const": _HELD,
    "index": _ONE,
    "reduce": _TWO,
    "pick": _HELD,
    "cast": Cost("some", 0),
    "debug_print": _SOME,
}
"""Operations of a graph that are not functions of the vocabulary."""

PRIMITIVES: Mapping[str, Cost] = {
    "add": _ONE,
    "sub": _ONE,
    "mul": _ONE,
    "div": Cost("some", 11, 7),
    "floor_divide": Cost("some", 9),
    "remainder": Cost("some", 7),
    "pow": Cost("many", 72),
    "neg": _ONE,
    "abs": _ONE,
    "sign": Cost("some", 5),
    "multiply_add": _ONE,
    "maximum": _ONE,
    "minimum": _ONE,
    "clip": _TWO,
    "sqrt": Cost("some", 14, 5),
    "rsqrt": Cost("some", 5),
    "reciprocal": Cost("some", 10, 6),
    "exp": Cost("some", 8, 5),
    "exp2": Cost("some", 5),
    "log": Cost("some", 25, 15),
    "log2": Cost("some", 27, 15),
    "log1p": Cost("some", 26, 14),
    "sin": Cost("most", 75),
    "cos": Cost("most", 75),
    "tan": Cost("most", 81),
    "atan2": Cost("some", 45),
    "tanh": Cost("some", 15, 1),
    "erf": Cost("some", 20),
    "floor": _SOME,
    "ceil": _SOME,
    "round": _SOME,
    "eq": _SOME,
    "ne": _SOME,
    "lt": _SOME,
    "le": _SOME,
    "gt": _SOME,
    "ge": _SOME,
    "logical_and": _SOME,
    "logical_or": _SOME,
    "logical_not": _SOME,
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _SOME),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), _SOME),
    "where": _ONE,
    "philox_rand": Cost("many", 40),
    "philox_rand_cpp": Cost("many", 40),
}

FAST: Mapping[str, Cost] = {
    "sigmoid": Cost("few", 12, 5),
    "silu": Cost("few", 13, 6),
    "gelu_tanh": Cost("few", 7),
    "gelu_erf": Cost("some", 24, 16),
    "dgelu_tanh": Cost("some", 26, 15),
    "dgelu_erf": Cost("some", 31, 20),
    "expm1": Cost("some", 21, 12),
    "softplus": Cost("some", 19, 13),
    "logsigmoid": Cost("some", 19, 13),
    "mish": Cost("some", 15, 12),
    "floor_power_of_two": Cost("few", 4),
}
"""Activations with a fast device form. All others are computed by their definition in the vocabulary."""


class Reduced(NamedTuple):
    """What a reduction takes: how many numbers a partial result has, and whether it takes a short or a long time."""

    numbers: int
    time: Literal["short", "long"]


REDUCTIONS: Mapping[str, Reduced] = {
    "sum": Reduced(1, "short"),
    "mean": Reduced(1, "short"),
    "prod": Reduced(1, "short"),
    "sum_of_squares": Reduced(1, "short"),
    "norm": Reduced(1, "short"),
    "amax": Reduced(1, "short"),
    "amin": Reduced(1, "short"),
    "absmax": Reduced(1, "short"),
    "any": Reduced(1, "short"),
    "all": Reduced(1, "short"),
    "logsumexp": Reduced(2, "long"),  # the largest value, and the sum of exponentials over it
    "sum_of_exponentials": Reduced(2, "long"),  # the same
    "place_of_largest": Reduced(2, "long"),  # the largest value, and its place
    "sum_log1p_exp": Reduced(1, "long"),
    "mean_log1p_exp": Reduced(1, "long"),
}

_IN_PLACE = 7
"""Instructions of a load or store without TMA, counted in the machine code: address, bounds check, and the move itself.
With them the design that is chosen for a plain product at odd N takes 1.057 of the fastest one's time, and without them
1.095: geometric means of 24 products on an H200 (odd_columns_h200.json)."""
_LANES_OF_A_ROW = 4
"""Lanes that share a row. Each has a quarter of a segment's columns, and all compute the values of the segment."""

COSTS: Mapping[str, Cost] = {**LEAVES, **PRIMITIVES, **FAST}


def name_of(node: Node) -> str:
    """The name of the node's row in `COSTS`."""
    return str(node.attr) if node.op == "call" else node.op


def instructions(graph: Graph, accuracies: Mapping[Node, Accuracy]) -> int:
    """The approximate number of instructions for one value of the result. A value that a segment has once is computed
    by all lanes that share its row, so its instructions are divided among the values of the segment."""
    once = segments.values(graph)
    share = min(1.0, _LANES_OF_A_ROW / next(iter(segments.widths(graph)), 1))
    spread = (n for n in graph.nodes if {"m", "n"} <= graph.types[n.args[0] if n.op == "reduce" else n].axes)
    taken = ((node, COSTS[name_of(node)].of(accuracies.get(node, "full"))) for node in spread)
    return round(sum(cost * (share if node in once and node.op != "reduce" else 1.0) for node, cost in taken))


def moving(program: Program) -> float:
    """The approximate number of instructions for one value of the result that load and store without TMA."""
    accesses = (*(access for _, access in program.loads), *program.stores)
    return sum(_IN_PLACE * a.dtype.itemsize / a.bytes_at_once for a in accesses if a.travels.in_place)


def registers_of(node: Node, accuracy: Accuracy = "full") -> Registers:
    """The register class of a node of a lowered graph at this accuracy."""
    taken = COSTS[name_of(node)].registers
    return "some" if taken == "most" and accuracy == "fast" else taken
