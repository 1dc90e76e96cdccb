"""The providers, by name: ours, and those of other packages.

Another package's is an entry point of the group `epifuse.providers`. It names a subclass of `Provider`, or an object of
one, by the provider's own name. docs/own_kernel.md writes one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import isfunction
from typing import cast

from epifuse.plan import Allocation, Answers, Details, KernelSpec, Plan, Reason, Refusal
from epifuse.providers.base import WORKSPACE, Provider, Runner, Step
from epifuse.providers.cpu import CpuProvider
from epifuse.providers.cutedsl import CuteDslProvider
from epifuse.providers.guarded import Guarded

GROUP = "epifuse.providers"
_BY_NAME: dict[str, Provider] = {one.name: one for one in (CuteDslProvider(), CpuProvider())}

NAMES: tuple[str, ...] = tuple(_BY_NAME)
"""Ours."""

__all__ = [
    "NAMES",
    "WORKSPACE",
    "Allocation",
    "Answers",
    "Details",
    "KernelSpec",
    "Plan",
    "Provider",
    "Reason",
    "Refusal",
    "Runner",
    "Step",
    "candidates",
    "installed_ccs",
    "load",
    "names",
]


def names() -> tuple[str, ...]:
    """Ours, then those of other packages."""
    return (*NAMES, *_installed())


def load(name: str) -> Provider:
    """The provider called `name`, one of `names()`."""
    return _BY_NAME.get(name) or _installed()[name]


def candidates(wanted: Iterable[str] | None = None) -> list[tuple[Provider, tuple[KernelSpec, ...]]]:
    """These providers, or all, each with its kernels."""
    found = map(load, names() if wanted is None else wanted)
    return [(provider, provider.specs()) for provider in found]


def installed_ccs() -> set[int]:
    """The compute capabilities of GPUs that kernels of other packages name."""
    specs = (spec for provider in _installed().values() for spec in provider.specs())
    return {cc for spec in specs if spec.device == "cuda" for cc in spec.ccs}


@cache
def _installed() -> Mapping[str, Provider]:
    """Other packages' providers. One that cannot be used is left out with a warning: the others still can."""
    found: dict[str, Provider] = {}
    for point in entry_points(group=GROUP):
        try:
            provider = _made(point)
            wrong = next(_wrong(point, provider, found), None)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is None:
            found[point.name] = cast(Provider, Guarded(provider))
        else:
            warnings.warn(f"the provider '{point.name}' ({point.value}) is left out: {wrong}", stacklevel=2)
    return found


def _made(point: EntryPoint) -> Provider:
    made = point.load()
    return made() if isinstance(made, type) else made  # type: ignore[no-any-return]  # `_wrong` looks at it


_METHODS = [name for name, member in vars(Provider).items() if isfunction(member) and not name.startswith("_")]
"""What an object that is no subclass has to have. `Provider`'s attributes have defaults, and may be newer than it."""


def _wrong(point: EntryPoint, provider: Provider, found: Mapping[str, Provider]) -> Iterator[str]:
    if not all(hasattr(provider, name) for name in ("name", *_METHODS)):
        yield f"it is no {Provider.__module__}.Provider"
    if provider.name != point.name:
        yield f"it calls itself '{provider.name}'"
    if point.name in _BY_NAME or point.name in found:
        yield "there is another one of this name"
    for spec in provider.specs():
        if spec.provider != point.name:
            yield f"its kernel '{spec.name}' says that it is of the provider '{spec.provider}'"
