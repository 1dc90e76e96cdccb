"""Kernels for GPUs on which none has run: compiled, and taken where that is asked for. Imports no cutlass."""

from epifuse.base.config import CONFIG
from epifuse.base.target import Target


def are_taken() -> bool:
    """Whether they are asked for."""
    return CONFIG.untested


def refused(target: Target) -> str | None:
    """Why a kernel that never ran on such a GPU is not taken, or None."""
    if are_taken():
        return None
    return f"it has never run on a GPU of {target.name}: EPIFUSE_UNTESTED=1, set before Python starts, takes it"


def note(target: Target) -> str:
    """For people who took one."""
    return f"compiled, never run on a GPU of {target.name}"
