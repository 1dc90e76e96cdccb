"""The one bounded cache: what is used stays, what is put first wins, threads may share it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from epifuse.base.cache import LRU


def test_what_is_used_stays_and_what_is_not_goes() -> None:
    cache: LRU[str, int] = LRU(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c"), len(cache)) == (1, None, 3, 2)


def test_the_first_value_put_wins_until_it_is_dropped() -> None:
    cache: LRU[str, object] = LRU(2)
    first, second = object(), object()
    assert cache.put("a", first) is first
    assert cache.put("a", second) is first
    cache.drop("a", second)
    assert cache.get("a") is first
    cache.drop("a", first)
    assert cache.put("a", second) is second
    cache.clear()
    assert len(cache) == 0


def test_an_error_is_not_kept() -> None:
    cache: LRU[str, int] = LRU(2)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make("a", lambda: 1 // 0)
    assert cache.get_or_make("a", lambda: 2) == 2
    assert cache.get_or_make("a", lambda: 1 // 0) == 2


def test_threads_that_make_the_same_value_get_one() -> None:
    cache: LRU[int, object] = LRU(4)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: (i % 16, cache.get_or_make(i % 16, object)), range(4000)))
    assert len(cache) == 4
    one: LRU[int, object] = LRU(4)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: one.get_or_make(0, object), range(4000)))) == 1
    assert {key for key, _ in found} == set(range(16))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_that_is_forked_while_a_thread_puts_goes_on() -> None:
    cache: LRU[str, int] = LRU(2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache._lock.acquire).result()
        if (child := os.fork()) == 0:
            signal.alarm(10)
            cache.put("a", 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        pool.submit(cache._lock.release).result()
    assert os.waitstatus_to_exitcode(status) == 0
