"""What planning must know of the rows of the device tables: one row an operation. Imports no cutlass.

The tables themselves, `primitives.py` and `kernels/reduce.py`, need cutlass; a test compares their rows with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from epifuse.ir import Graph, Node
from epifuse.providers.cutedsl.precision import Accuracy

Registers = Literal["few", "some", "many", "most"]
"""What a function takes of a thread's registers. *few*: it leaves room for reductions beside it. *some*: beside them
200 to 2800 bytes spill. *many*: it also spills in the fewer registers that hide behind a main loop. *most*: so it does,
and beside a large accumulator even alone; not with `fast_math`."""


class Cost(NamedTuple):
    """What a function takes of a thread: registers, and instructions for one value, about, computed in full; `spilling`
    are those that it is as slow as where it spills, beside 128 accumulators or more. None where nothing was measured.
    """

    registers: Registers
    instructions: int
    spilling: int | None = None


_HELD = Cost("few", 0)
_LIGHT, _SHORT = Cost("few", 1), Cost("few", 3)
_PLAIN, _WIDE, _WAVE = Cost("some", 3), Cost("many", 3), Cost("most", 3)

LEAVES: Mapping[str, Cost] = {
    "accum": _HELD,
    "load": _HELD,
    "const": _HELD,
    "index": _LIGHT,
    "reduce": _LIGHT,
    "pick": _HELD,
    "cast": Cost("some", 0),
    "debug_print": _PLAIN,
}
"""Operations that are no functions of the vocabulary."""

PRIMITIVES: Mapping[str, Cost] = {
    "add": _LIGHT,
    "sub": _LIGHT,
    "mul": _LIGHT,
    "div": _PLAIN,
    "floor_divide": _PLAIN,
    "remainder": _PLAIN,
    "pow": _WIDE,
    "neg": _LIGHT,
    "abs": _LIGHT,
    "sign": _PLAIN,
    "multiply_add": _LIGHT,
    "maximum": _LIGHT,
    "minimum": _LIGHT,
    "clip": _LIGHT,
    "sqrt": _PLAIN,
    "rsqrt": _PLAIN,
    "reciprocal": _PLAIN,
    "exp": _PLAIN,
    "exp2": _PLAIN,
    "log": _PLAIN,
    "log2": _PLAIN,
    # 512 x 65536 x 1024, a binary cross-entropy in 128 x 256 (sites_h100_fourth.json): 325 us, apart 200.
    "log1p": Cost("some", 27, spilling=140),
    "sin": _WAVE,
    "cos": _WAVE,
    "tan": _WAVE,
    "atan2": Cost("some", 30),
    "tanh": _PLAIN,
    "erf": Cost("some", 30),
    "floor": _PLAIN,
    "ceil": _PLAIN,
    "round": _PLAIN,
    "eq": _PLAIN,
    "ne": _PLAIN,
    "lt": _PLAIN,
    "le": _PLAIN,
    "gt": _PLAIN,
    "ge": _PLAIN,
    "logical_and": _PLAIN,
    "logical_or": _PLAIN,
    "logical_not": _PLAIN,
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _PLAIN),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), _PLAIN),
    "where": _LIGHT,
    "philox_rand": _WIDE,
    "philox_rand_cpp": _WIDE,
}

FAST: Mapping[str, Cost] = {
    "sigmoid": _SHORT,
    "silu": _SHORT,
    "gelu_tanh": _SHORT,
    "gelu_erf": Cost("some", 30),
    "dgelu_tanh": _PLAIN,
    "dgelu_erf": _PLAIN,
    "expm1": _PLAIN,
    "softplus": _PLAIN,
    "logsigmoid": _PLAIN,
    "mish": _PLAIN,
}
"""Activations with a fast device form; the others are computed as they are written."""


class Reduced(NamedTuple):
    """What a reduction takes: how many numbers a partial result consists of, and how long it is computed."""

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
    "sum_log1p_exp": Reduced(1, "long"),
    "mean_log1p_exp": Reduced(1, "long"),
}

COSTS: Mapping[str, Cost] = {**LEAVES, **PRIMITIVES, **FAST}


def name_of(node: Node) -> str:
    """The name of its row."""
    return str(node.attr) if node.op == "call" else node.op


def instructions(graph: Graph, *, crowded: bool) -> int:
    """Of one value of the result, about, of what is computed value by value; `crowded` beside 128 accumulators."""
    each = [COSTS[name_of(node)] for node in graph.nodes if {"m", "n"} <= graph.types[node].axes]
    return sum(one.spilling if crowded and one.spilling is not None else one.instructions for one in each)


def registers_of(node: Node, accuracy: Accuracy = "full") -> Registers:
    """What a node of a lowered graph takes, computed so exactly."""
    taken = COSTS[name_of(node)].registers
    return "some" if taken == "most" and accuracy == "fast" else taken
