"""Properties that are computed once for each object, in several threads and in forked children."""

import ast
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from epifuse.base.lazy import cached_property

SRC = Path(__file__).parents[1] / "src" / "epifuse"


class Lazy:
    """An object with a property."""

    def __init__(self, compute: Callable[[], object]) -> None:
        self.compute = compute

    @cached_property
    def value(self) -> object:
        """What `compute` returns first."""
        return self.compute()


def test_it_is_computed_once_for_each_object() -> None:
    first, second = Lazy(object), Lazy(object)
    assert first.value is first.value
    assert first.value is not second.value
    assert Lazy.value.__doc__ == "What `compute` returns first."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_that_is_forked_while_a_thread_computes_goes_on() -> None:
    begun, go_on = Event(), Event()

    def slowly() -> bool:
        begun.set()
        return go_on.wait(60)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lambda: Lazy(slowly).value)
        begun.wait()
        if (child := os.fork()) == 0:
            signal.alarm(10)
            Lazy(object).value  # noqa: B018 - it must not wait
            os._exit(0)
        _, status = os.waitpid(child, 0)
        go_on.set()
        assert slow.result()
    assert os.waitstatus_to_exitcode(status) == 0


def test_no_module_takes_the_one_with_a_lock() -> None:
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "functools" and path.name != "lazy.py":
                assert "cached_property" not in [name.name for name in node.names], path
