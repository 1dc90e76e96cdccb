"""One bounded cache for what is found again by a key: the least recently used goes first, threads may share it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """At most `bound` values by key; a key that is put when there is no room takes the place of the one longest unused.

    The lock is held only while entries move, never while a value is made: two threads may make the value of one key,
    and all get the one that was put first.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._lock = RLock()
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of `key`, which then counts as used, or None."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> V:
        """Keep `value` unless `key` has one; the value that is kept."""
        with self._lock:
            kept = self._values.setdefault(key, value)
            self._values.move_to_end(key)
            while len(self._values) > self.bound:
                self._values.popitem(last=False)
            return kept

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made and kept where there is none. What `make` raises is not kept."""
        found = self.get(key)
        return self.put(key, make()) if found is None else found

    def drop(self, key: K, value: V) -> None:
        """Forget `key` if it still has this value: another thread may have put a newer one."""
        with self._lock:
            if self._values.get(key) is value:
                del self._values[key]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
