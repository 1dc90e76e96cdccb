"""How long a Hopper kernel waits for its own machine code.

The compiler unrolls an epilogue for all values of a thread. Between two launches in a model other kernels fill the
instruction cache, and a launch has to fetch its code again: 1024 x 4096 x 1024 with a cross-entropy in 128 x 256 takes
23 us right after a launch of the same kernel, and 42 us after other kernels (cold_code_h200.json).
"""

from __future__ import annotations

from epifuse.providers.cutedsl import tuned
from epifuse.providers.cutedsl.design import WARP_GROUP, Design

_INSTRUCTION = 16  # bytes


def waited_for(instructions: int, design: Design) -> float:
    """Seconds that each launch waits for the code of an epilogue with `instructions` instructions for one value."""
    size = _INSTRUCTION * instructions * design.rows * design.columns // WARP_GROUP
    return max(0, size - tuned.FETCHED_AHEAD.value) / tuned.FETCHED_LATE.value
