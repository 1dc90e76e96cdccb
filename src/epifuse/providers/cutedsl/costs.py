"""What planning must know of the rows of the device tables: one row an operation. Imports no cutlass.

The tables themselves, `primitives.py` and `kernels/reduce.py`, need cutlass; a test compares their rows with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from epifuse.ir import Node
from epifuse.providers.cutedsl.precision import Accuracy

Registers = Literal["few", "some", "many", "most"]
"""What a function takes of a thread's registers. *few*: it leaves room for reductions beside it. *some*: beside them
200 to 2800 bytes spill. *many*: it also spills in the fewer registers that hide behind a main loop. *most*: so it does,
and beside a large accumulator even alone; not with `fast_math`."""

LEAVES: Mapping[str, Registers] = {
    "accum": "few",
    "load": "few",
    "const": "few",
    "index": "few",
    "reduce": "few",
    "cast": "some",
    "debug_print": "some",
}
"""Operations that are no functions of the vocabulary."""

PRIMITIVES: Mapping[str, Registers] = {
    "add": "few",
    "sub": "few",
    "mul": "few",
    "div": "some",
    "floor_divide": "some",
    "remainder": "some",
    "pow": "many",
    "neg": "few",
    "abs": "few",
    "sign": "some",
    "multiply_add": "few",
    "maximum": "few",
    "minimum": "few",
    "clip": "few",
    "sqrt": "some",
    "rsqrt": "some",
    "reciprocal": "some",
    "exp": "some",
    "exp2": "some",
    "log": "some",
    "log2": "some",
    "log1p": "some",
    "sin": "most",
    "cos": "most",
    "tan": "most",
    "tanh": "some",
    "erf": "some",
    "floor": "some",
    "ceil": "some",
    "round": "some",
    "eq": "some",
    "ne": "some",
    "lt": "some",
    "le": "some",
    "gt": "some",
    "ge": "some",
    "logical_and": "some",
    "logical_or": "some",
    "logical_not": "some",
    "where": "few",
    "philox_rand": "many",
    "philox_rand_cpp": "many",
}

FAST: Mapping[str, Registers] = {
    "sigmoid": "few",
    "silu": "few",
    "gelu_tanh": "few",
    "gelu_erf": "some",
    "dgelu_tanh": "some",
    "dgelu_erf": "some",
    "expm1": "some",
    "softplus": "some",
    "logsigmoid": "some",
    "mish": "some",
}
"""Activations with a fast device form; the others are computed as they are written."""


class Reduced(NamedTuple):
    """What a reduction takes: how many numbers a partial result consists of, and how long it is computed."""

    numbers: int
    time: Literal["short", "long"]


REDUCTIONS: Mapping[str, Reduced] = {
    "sum": Reduced(1, "short"),
    "mean": Reduced(1, "short"),
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

REGISTERS: Mapping[str, Registers] = {**LEAVES, **PRIMITIVES, **FAST}


def name_of(node: Node) -> str:
    """The name of its row."""
    return str(node.attr) if node.op == "call" else node.op


def registers_of(node: Node, accuracy: Accuracy = "full") -> Registers:
    """What a node of a lowered graph takes, computed so exactly."""
    taken = REGISTERS[name_of(node)]
    return "some" if taken == "most" and accuracy == "fast" else taken
