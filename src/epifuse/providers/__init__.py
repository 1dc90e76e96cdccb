"""The providers, by name. Each is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def candidates(names: Iterable[str] | None = None) -> Iterator[tuple[KernelSpec, Provider]]:
    """Every kernel of these providers, or of all, beside its provider."""
    for name in NAMES if names is None else names:
        provider = load(name)
        yield from ((spec, provider) for spec in provider.specs())
