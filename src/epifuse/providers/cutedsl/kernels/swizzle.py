"""Where in shared memory the bytes of a line lie, so that a warp's accesses are of different banks."""

from typing import Any

from epifuse.providers.cutedsl.design import K_SPAN

PATTERN_LINES = 8
"""Lines after which the order is the same again."""
_UNIT = 16  # bytes that keep their order


def swizzled(address: Any, line: int = K_SPAN) -> Any:
    """Where what would lie at an address lies. Eight lines of `line` bytes begin at a multiple of their size.

    The units of 16 bytes of a line lie at their own number xor the line's.
    """
    return address ^ (address >> 3 & (line - _UNIT))
