"""A bounded cache of values by key. It removes the least recently used ones first, and threads may share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from itertools import count
from threading import RLock
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

CACHES: list[LRU[Any, Any]] = []
"""All caches of the process; CONTRIBUTING has a row for each."""


def forget() -> None:
    """Empty every cache, for tests and benchmarks that begin without cached results."""
    for cache in CACHES:
        cache.clear()


def _renew_locks() -> None:
    for cache in CACHES:
        cache._lock = RLock()


if hasattr(os, "register_at_fork"):  # another thread may hold a lock while this one forks
    os.register_at_fork(after_in_child=_renew_locks)


class LRU(Generic[K, V]):
    """A dictionary of at most `bound` entries. When it is full, the least recently used eighth is removed.

    A lookup takes no lock and hashes the key once, since each launch makes one. Values are made outside the lock: two
    threads may make a value for the same key, and both then get the value that was stored first.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        CACHES.append(self)
        self._lock = RLock()
        self._clock = count()
        self._entries: dict[K, list[Any]] = {}  # the value, and when it was used last

    def get(self, key: K) -> V | None:
        """The value of `key`, which then counts as used, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = next(self._clock)
        return entry[0]  # type: ignore[no-any-return]  # what `put` was given

    def put(self, key: K, value: V) -> V:
        """Store `value` unless `key` has a value already; return the value that is stored."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                return entry[0]  # type: ignore[no-any-return]
            if len(self._entries) >= self.bound:
                by_use = sorted(self._entries, key=lambda one: self._entries[one][1])
                for old in by_use[: len(self._entries) - self.bound + 1 + self.bound // 8]:
                    del self._entries[old]
            self._entries[key] = [value, next(self._clock)]
            return value

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made by `make` and kept if there is none. An exception of `make` is not kept."""
        found = self.get(key)
        return self.put(key, make()) if found is None else found

    def drop(self, key: K, value: V | None) -> None:
        """Forget `key` if it still has this value: another thread may have put a newer one."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry[0] is value:
                del self._entries[key]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
