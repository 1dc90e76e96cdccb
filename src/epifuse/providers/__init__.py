"""The providers, by name. Each is imported when it is first asked for."""

from __future__ import annotations

from functools import cache

from epifuse.providers.base import WORKSPACE, Provider, Runner, Step

NAMES: tuple[str, ...] = ("cutedsl", "cpu")

__all__ = ["NAMES", "WORKSPACE", "Provider", "Runner", "Step", "load"]


@cache
def load(name: str) -> Provider:
    """The provider called `name`, one of `NAMES`."""
    if name == "cpu":
        from epifuse.providers.cpu import CpuProvider

        return CpuProvider()
    if name == "cutedsl":
        from epifuse.providers.cutedsl import CuteDslProvider

        return CuteDslProvider()
    raise LookupError(name)
