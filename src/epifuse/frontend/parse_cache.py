"""Epilogues parsed before, found again by what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

from epifuse.cache import LRU
from epifuse.frontend.python_function import Parsed, parse

_PARSED: LRU[Hashable, Parsed] = LRU(512)


def parsed(epilogue: Any) -> Parsed:
    """`epilogue`, a function, source text or a `FrontEnd`, parsed; once while all that it captured is the same.

    Raises `EpilogueSyntaxError` for what the language does not hold; errors are not remembered.
    """
    if isinstance(epilogue, Parsed):
        return epilogue
    # A visitor tree or a functor is its own front end: it says itself what it parses to.
    if (own := getattr(type(epilogue), "__epifuse__", None)) is not None:
        return own(epilogue)  # type: ignore[no-any-return]  # declared by the class
    reassign = bool(getattr(epilogue, "__epifuse_reassign__", False))
    return remembered((_key(epilogue), reassign), lambda: parse(epilogue, reassign=reassign))


def remembered(key: Hashable, make: Callable[[], Parsed]) -> Parsed:
    """What `make` parsed when it was asked for `key` before, while that is current. Ids in a key must be of objects
    that the value holds."""
    known = _PARSED.get(key)
    if known is not None and known.is_current():
        return known
    made = make()
    if known is not None:
        _PARSED.drop(key, known)
    return _PARSED.put(key, made)


def _key(epilogue: Any) -> Hashable:
    """What an epilogue is made of: a lambda written in a call is a new function each time, but no new epilogue.

    Whatever has its id in here is held by `Parsed.function`, so that nothing else gets that id meanwhile.
    """
    if isinstance(epilogue, str):
        return epilogue
    if type(epilogue) is not FunctionType:
        return id(epilogue)
    by_name = epilogue.__kwdefaults__ or {}
    return (
        id(epilogue.__code__),
        id(epilogue.__globals__),
        tuple(map(id, epilogue.__closure__ or ())),
        tuple(map(id, epilogue.__defaults__ or ())),
        tuple((name, id(value)) for name, value in by_name.items()),
    )
