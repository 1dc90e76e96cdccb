"""Caches: few, each with an owner; CONTRIBUTING lists them, and nothing else of the package keeps what it met."""

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base import cache
from epifuse.base.cache import LRU

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LISTED = {(path, name) for name, path in re.findall(r"^\| [^|]+ \| `(\w+)` in `src/([\w/]+\.py)`", PAGE, re.MULTILINE)}
ONCE = set(re.findall(r"`([\w.]+)`", PAGE.split("| once for each |")[1].split("\n\n")[0]))
_STATE = (dict, list, set)


def modules() -> list[ModuleType]:
    """Every module of the package; kernels need CuTe DSL."""
    found = [ef]
    for info in pkgutil.walk_packages(ef.__path__, "epifuse."):
        if not info.name.endswith("__main__"):
            try:
                found.append(importlib.import_module(info.name))
            except ModuleNotFoundError as error:
                if not str(error.name).startswith("cutlass"):
                    raise
    return found


def owned(kind: Any) -> Iterator[tuple[ModuleType, str, Any]]:
    """Module-level objects of a kind, where they are defined."""
    seen = set()
    for module in sorted(modules(), key=lambda module: -len(module.__name__)):
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            if (
                isinstance(value, kind)
                and id(value) not in seen
                and re.search(rf"^{name}\b.*=|^def {name}\b", source, re.M)
            ):
                seen.add(id(value))
                yield module, name, value


def place(module: ModuleType, name: str) -> tuple[str, str]:
    return Path(str(module.__file__)).relative_to(ROOT / "src").as_posix(), name


def test_every_cache_is_listed() -> None:
    assert {place(module, name) for module, name, _ in owned(LRU)} == LISTED
    assert len(LISTED) + 2 <= 8, "and the two kinds of files on disk"


def test_no_object_holds_a_cache_of_its_own() -> None:
    at_modules = {id(value) for _, _, value in owned(LRU)}
    ours = [one for one in cache.CACHES if type(one).__module__ == "epifuse.base.cache" and one.bound > 1]
    assert {id(one) for one in ours if _is_held_by_the_package(one)} <= at_modules


def _is_held_by_the_package(one: LRU[Any, Any]) -> bool:
    return any(one is value for module in modules() for value in vars(module).values())


def test_what_is_found_once_takes_nothing_or_is_listed() -> None:
    found = set()
    for module, name, value in owned(functools._lru_cache_wrapper):
        if inspect.signature(value.__wrapped__).parameters:
            found.add(f"{module.__name__.split('.')[-1]}.{name}")
    assert found == ONCE


def met() -> dict[tuple[str, str], int]:
    """How much every module-level container holds."""
    return {place(module, name): len(value) for module, name, value in owned(_STATE)}


def test_nothing_else_grows() -> None:
    before = met()
    a, b = torch.ones(6, 4), torch.ones(4, 5)
    for m in range(1, 4):
        ef.gemm(a[:m], b, epilogue=lambda accum, C: ef.relu(accum) + C, C=torch.ones(5))
        ef.linear(a[:m], torch.ones(5, 4), torch.ones(5), epilogue=ef.silu)
        ef.gemm(a[:m], b, epilogue="def epi(accum): D = softmax(accum); return D")
    with pytest.raises(ef.errors.EpifuseError):
        ef.gemm(a, a)
    assert {name: count for name, count in met().items() if count > before.get(name, 0)} == {}


def test_the_least_recently_used_goes_first() -> None:
    small: LRU[int, int] = LRU(8)
    try:
        for number in range(8):
            small.put(number, number)
        small.get(0)
        small.put(8, 8)
        assert small.get(0) == 0
        assert small.get(1) is None
        assert len(small) <= 8
    finally:
        cache.CACHES.remove(small)
