"""The front end's one cache: what reading a text, a code object or an object gave before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from epifuse.base.cache import LRU

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that was read, and from what."""

    read: Callable[[], Any]
    """The object it was made from, or None once that is gone."""
    value: Any


KEPT: LRU[Hashable, Kept] = LRU(1024)


def remembered(
    what: str,
    of: Any,
    make: Callable[[], T],
    further: Hashable = (),
    is_current: Callable[[T], bool] | None = None,
) -> T:
    """What `make` gave when it was last asked `what` about `of` and `further`, while that `is_current`.

    A string is found by its text, anything else as the very object, which is not kept alive. Errors are not remembered.
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
