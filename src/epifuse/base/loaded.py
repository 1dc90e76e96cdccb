"""Machine code in memory, found by the source it was made from. One thread loads a function, the others wait for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from epifuse.base.cache import LRU

Function = Callable[..., Any]

# By what it was compiled with, the source, and the process: what a thread of the parent was loading when it forked is
# never there in the child.
LOADED: LRU[tuple[str, str, int], Future[Function]] = LRU(1024)


def loaded(options: str, source: str, load: Callable[[], Function]) -> Function:
    """The function that was compiled from `source` with `options`; `load` gives it the first time.

    What `load` raises, every thread that waited raises too; it is not kept.
    """
    key = (options, source, os.getpid())
    if (found := LOADED.get(key)) is not None:
        return found.result()
    mine = Future[Function]()
    found = LOADED.put(key, mine)
    if found is mine:
        try:
            mine.set_result(load())
        except BaseException as error:
            LOADED.drop(key, mine)
            mine.set_exception(error)
    return found.result()


def is_loaded(options: str, source: str) -> bool:
    """Whether `loaded` would answer at once."""
    found = LOADED.get((options, source, os.getpid()))
    return found is not None and found.done() and found.exception() is None
