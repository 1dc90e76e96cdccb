"""Machine code in memory, found by the source it was made from. One thread loads a function; the others wait for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from epifuse.base.cache import LRU

Function = Callable[..., Any]

# By options, source and process. The process is part of the key, because a load that a thread of the parent had begun
# when the process forked never ends in the child.
LOADED: LRU[tuple[str, str, int], Future[Function]] = LRU(1024)


def loaded(options: str, source: str, load: Callable[[], Function]) -> Function:
    """Return the function that was compiled from `source` with `options`. The first call gets it from `load`.

    If `load` raises, every thread that waits raises the same exception, which is not kept.
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
    """Whether `loaded` would return at once, without a call of `load`."""
    found = LOADED.get((options, source, os.getpid()))
    return found is not None and found.done() and found.exception() is None
