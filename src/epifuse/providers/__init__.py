"""The providers, by name."""

from __future__ import annotations

from collections.abc import Iterable

from epifuse.plan import KernelSpec
from epifuse.providers.base import WORKSPACE, Provider, Runner, Step
from epifuse.providers.cpu import CpuProvider
from epifuse.providers.cutedsl import CuteDslProvider

_BY_NAME: dict[str, Provider] = {one.name: one for one in (CuteDslProvider(), CpuProvider())}

NAMES: tuple[str, ...] = tuple(_BY_NAME)

__all__ = ["NAMES", "WORKSPACE", "Provider", "Runner", "Step", "candidates", "load"]


def load(name: str) -> Provider:
    """The provider called `name`, one of `NAMES`."""
    return _BY_NAME[name]


def candidates(names: Iterable[str] | None = None) -> list[tuple[Provider, tuple[KernelSpec, ...]]]:
    """These providers, or all, each with its kernels."""
    found = map(load, NAMES if names is None else names)
    return [(provider, provider.specs()) for provider in found]
