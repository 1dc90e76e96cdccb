"""The front end's only cache: results that were made from a source text, a code object or another object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from epifuse.base.cache import LRU

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept:
    """A cached result, `value`, and the object that it was made from."""

    read: Callable[[], Any]
    """Returns the object that `value` was made from, or None once that object is gone. It is not called for a text."""
    value: Any


KEPT: LRU[Hashable, Kept] = LRU(1024)


def remembered(
    what: str,
    of: Any,
    make: Callable[[], T],
    further: Hashable = (),
    is_current: Callable[[T], bool] | None = None,
) -> T:
    """Return what `make` returned earlier for `what`, `of` and `further` if `is_current` accepts it, or call `make`.

    `what` names the kind of result. A string `of` is found by its text, any other object by its identity; the object is
    not kept alive. Errors are not cached.
    """
    is_text = isinstance(of, str)
    key = (what, of if is_text else id(of), further)
    known = KEPT.get(key)
    if known is not None:
        # Another object may have the id of one that is gone.
        if (is_text or known.read() is of) and (is_current is None or is_current(known.value)):
            return known.value  # type: ignore[no-any-return]  # of the type that `make` has for `what`
        KEPT.drop(key, known)
    made = make()
    return KEPT.put(key, Kept(str if is_text else weakref.ref(of), made)).value  # type: ignore[no-any-return]
