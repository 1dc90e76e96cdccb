"""The providers, by name. Each is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from epifuse.plan import KernelSpec
from epifuse.providers.base import WORKSPACE, Provider, Runner, Step

NAMES: tuple[str, ...] = ("cutedsl", "cpu")

__all__ = ["NAMES", "WORKSPACE", "Provider", "Runner", "Step", "candidates", "load"]


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


def candidates(names: Iterable[str] | None = None) -> list[tuple[Provider, tuple[KernelSpec, ...]]]:
    """These providers, or all, each with its kernels."""
    found = map(load, NAMES if names is None else names)
    return [(provider, provider.specs()) for provider in found]
