"""Kernels for GPUs on which they have never run. They are compiled, and used only if asked for. Imports no cutlass."""

from epifuse.base.config import CONFIG
from epifuse.base.target import Target


def are_allowed() -> bool:
    """Whether the user asked for such kernels, by EPIFUSE_UNTESTED=1."""
    return CONFIG.untested


def refused(target: Target) -> str | None:
    """Why a kernel that never ran on such a GPU is not used, or None."""
    if are_allowed():
        return None
    return f"it has never run on a GPU of {target.name}: EPIFUSE_UNTESTED=1, set before Python starts, takes it"


def note(target: Target) -> str:
    """The note of a plan that uses such a kernel."""
    return f"compiled, never run on a GPU of {target.name}"
