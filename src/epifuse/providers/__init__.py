"""The providers by name: epifuse's own, and those of other packages.

Another package registers its provider as an entry point of the group `epifuse.providers`, under the provider's own
name. The entry point is a subclass of `Provider` or an object of one. docs/own_kernel.md shows how to write one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import isfunction
from typing import cast

from epifuse.base.errors import kind_of
from epifuse.plan import Allocation, Answers, Details, KernelSpec, Plan, Reason, Refusal
from epifuse.providers.base import WORKSPACE, Provider, Runner, Step
from epifuse.providers.cpu import CpuProvider
from epifuse.providers.cutedsl import CuteDslProvider
from epifuse.providers.guarded import Guarded, error_text

GROUP = "epifuse.providers"
_BY_NAME: dict[str, Provider] = {one.name: one for one in (CuteDslProvider(), CpuProvider())}

NAMES: tuple[str, ...] = tuple(_BY_NAME)
"""The names of epifuse's own providers."""

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
    """The names of all providers: epifuse's own, then those of other packages."""
    return (*NAMES, *_installed())


def load(name: str) -> Provider:
    """The provider called `name`, one of `names()`."""
    return _BY_NAME.get(name) or _installed()[name]


def candidates(wanted: Iterable[str] | None = None) -> list[tuple[Provider, tuple[KernelSpec, ...]]]:
    """The providers called `wanted`, or all of them, each with its kernels."""
    found = map(load, names() if wanted is None else wanted)
    return [(provider, provider.specs()) for provider in found]


def installed_ccs() -> set[int]:
    """The compute capabilities of the GPUs that kernels of other packages are for."""
    specs = (spec for provider in _installed().values() for spec in provider.specs())
    return {cc for spec in specs if spec.device == "cuda" for cc in spec.ccs}


@cache
def _installed() -> Mapping[str, Provider]:
    """The providers of other packages. One that cannot be used is left out with a warning; the others still work."""
    found: dict[str, Provider] = {}
    for point in entry_points(group=GROUP):
        specs: tuple[KernelSpec, ...] = ()
        try:
            provider = _made(point)
            wrong = next(_wrong(point, provider, found), None)
            if wrong is None:
                specs = provider.specs()
                wrong = next(_wrong_kernels(point, specs, found), None)
        except Exception as error:
            wrong = error_text(error)
        if wrong is None:
            found[point.name] = cast(Provider, Guarded(provider, specs))
        else:
            warnings.warn(f"the provider '{point.name}' ({point.value}) is left out: {wrong}", stacklevel=2)
    return found


def _made(point: EntryPoint) -> Provider:
    made = point.load()
    return made() if isinstance(made, type) else made  # type: ignore[no-any-return]  # `_wrong` looks at it


_METHODS = [name for name, member in vars(Provider).items() if isfunction(member) and not name.startswith("_")]
"""The methods that an object must have if it is no subclass of `Provider`. It need not have the attributes, which have
defaults and may be newer than the object."""
_NEEDED = ("specs", "supports", "build")
"""The methods for which `Provider` has no default."""


def _wrong(point: EntryPoint, provider: Provider, found: Mapping[str, Provider]) -> Iterator[str]:
    lacking = [name for name in ("name", *_METHODS) if not hasattr(provider, name)]
    lacking += [name for name in _NEEDED if getattr(type(provider), name, None) is getattr(Provider, name)]
    if lacking:
        yield f"it is no whole {Provider.__module__}.Provider: it has no '{lacking[0]}'"
    if provider.name != point.name:
        yield f"it calls itself '{provider.name}'"
    if point.name in _BY_NAME or point.name in found:
        yield "there is another one of this name"


def _wrong_kernels(point: EntryPoint, specs: tuple[KernelSpec, ...], found: Mapping[str, Provider]) -> Iterator[str]:
    if not (isinstance(specs, tuple) and all(isinstance(spec, KernelSpec) for spec in specs)):
        yield f"its specs() are {kind_of(specs)}, and no tuple of KernelSpec"
    taken = {spec.name for provider in (*_BY_NAME.values(), *found.values()) for spec in provider.specs()}
    for spec in specs:
        if not isinstance(spec.name, str):
            yield f"the name of a kernel is {kind_of(spec.name)}, and no text"
        if spec.provider != point.name:
            yield f"its kernel '{spec.name}' says that it is of the provider '{spec.provider}'"
        if spec.name in taken:
            yield f"there is another kernel of the name '{spec.name}'"
        if not (isinstance(spec.ccs, tuple) and spec.ccs and all(type(cc) is int for cc in spec.ccs)):
            yield f"the ccs of its kernel '{spec.name}' are {spec.ccs!r}, and no tuple of numbers as 90"
        elif spec.device not in ("cpu", "cuda"):
            yield f"its kernel '{spec.name}' is for the device '{spec.device}', and there are 'cpu' and 'cuda'"
        elif spec.device == "cpu" and spec.ccs != (0,):
            yield f"the ccs of its kernel '{spec.name}' are {spec.ccs}, and those of a kernel for the CPU are (0,)"
        elif spec.device == "cuda" and min(spec.ccs) <= 0:
            yield f"the ccs of its kernel '{spec.name}' are {spec.ccs}, and those of a kernel for GPUs are as (80, 90)"
        if not isinstance(spec.summary, str):
            yield f"the summary of its kernel '{spec.name}' is {kind_of(spec.summary)}, and no text"
        taken.add(spec.name)
