"""Whether the forward stores accum for the backward, or the backward computes it again, and in which dtype."""

from __future__ import annotations

import torch

from epifuse.providers.cutedsl.inputs import time_of_one
from epifuse.pytorch.derivative import Derivative
from epifuse.request.problem import Problem

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that have gradients."""


_COMPILED_ON = ("cuda",)
"""The device types on which Inductor compiles a derivative that no launch of epifuse computes. For a CPU this would
take seconds."""


def is_compiled(problem: Problem) -> bool:
    """Whether Inductor compiles a derivative that no launch of epifuse computes."""
    return problem.a.device.partition(":")[0] in _COMPILED_ON


def stored_dtype(problem: Problem, derivative: Derivative) -> torch.dtype:
    """The dtype in which accum is stored for the derivative to read it."""
    usual = problem.a.dtype if problem.a.dtype in FLOATS else problem.accumulator  # sums saturate in 8 bits
    # The epilogue applies the scales of a weight of 8 bits, so the stored sums are unscaled, and may exceed float16.
    overflows = problem.a.dtype == torch.float16 and problem.b.dtype.itemsize == 1
    return problem.float_dtype if derivative.decides or overflows else usual


def stores_first(problem: Problem, derivative: Derivative) -> bool:
    """Whether an accum that the backward computes again is stored before the derivative reads it.

    It is where gradients are combined across columns. A launch with the product would load these gradients directly,
    because only one subtile of an operand is in shared memory. With norms of heads before a rotary embedding, forward
    and backward took 1.94 to 3.32 of the time of torch.compile (derivatives_h200.json), and take 1.14 to 1.29
    (derivatives_heads_h200.json).
    """
    return problem.target.device == "cuda" and derivative.traffic.combines_columns


def pays_to_store(problem: Problem, derivative: Derivative) -> bool:
    """Whether storing accum takes less time than computing it again.

    Computing it again takes 2 L M N K more operations. Storing it takes one write and one read of accum. If no launch
    reads it, and Inductor does not compile the derivative, PyTorch's operations also write and read values in between.
    """
    if stores_first(problem, derivative):
        return True  # an accum that is computed again is stored, too
    extents, itemsize = problem.extents, stored_dtype(problem, derivative).itemsize
    elements = extents["l"] * extents["m"] * extents["n"]
    moved = 2 * elements * itemsize
    if derivative.refused is not None and not is_compiled(problem):
        by_operations, fused = derivative.traffic.in_problem(problem)
        moved += by_operations - fused
    target = problem.target
    each = time_of_one(problem) if target.device == "cuda" else 1.0
    operations, memory = target.processor.operations_a_second / each, target.processor.bytes_a_second
    return 2 * elements * extents["k"] / operations > moved / memory
