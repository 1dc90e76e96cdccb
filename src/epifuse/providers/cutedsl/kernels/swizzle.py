"""The swizzle: where in shared memory the bytes of a line lie, so that a warp accesses different banks at once."""

from typing import Any

from epifuse.providers.cutedsl.design import K_SPAN

PATTERN_LINES = 8
"""Number of lines after which the order of their bytes repeats."""
_UNIT = 16  # bytes that the swizzle moves as a whole


def swizzled(address: Any, line: int = K_SPAN) -> Any:
    """Return the address at which the swizzle places the byte of `address`; a line has `line` bytes.

    Eight lines begin at a multiple of their size. In lines of 128 bytes each unit of 16 bytes lies at its own number
    xor the line's. If lines are shorter, the second number counts 128 bytes, which hold several lines.
    """
    return address ^ (address >> 3 & (line - _UNIT))
