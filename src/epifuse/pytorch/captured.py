"""Where the values are that an epilogue captured, as paths that Dynamo can follow: steps from the function, or from the
object whose method it is.

A parse has readers for the values that it captured. This module finds the same values by plain steps of Python. Each
path is followed once, and must lead to the very object that the parse read. If no path leads to a value, the error says
which, and the graph breaks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Hashable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from epifuse.frontend import Parsed
from epifuse.frontend.names import RECEIVER, Reader, is_called, is_number
from epifuse.frontend.signature import held_defaults

Step = tuple[str, Any]
Path = tuple[Step, ...]


class Capture(NamedTuple):
    """A captured number with the name of the operand that it is; or, with an empty name, a value that shaped the graph.

    `fixed` is the value that shaped the graph if it is a number: it must not change.
    """

    name: str
    path: Path
    fixed: Any = None


class UnreadableError(Exception):
    """Raised for a captured value to which no path leads."""


def follow(function: Any, receiver: Any, path: Path) -> Any:
    """Return the value that `path` leads to. Dynamo traces this function, so that it guards every step."""
    value = function
    for step, key in path:
        if step == "receiver":
            value = receiver
        elif step == "cell":
            value = value.__closure__[key].cell_contents
        elif step == "global":
            value = value.__globals__[key]
        elif step == "module":
            value = sys.modules[key]
        elif step == "class":
            value = type(value)
        elif step == "attribute":
            value = getattr(value, key)
        elif step == "constant":
            value = key
        else:
            value = value[key]
    return value


def captures(
    function: Any, receiver: Any, parsed: Parsed, handed: Collection[str], nested: bool = False
) -> list[Capture]:
    """Return all that `parsed` depends on besides the code of `function`. `handed` are the operands that a call gives.

    `nested` says that the function was made while Dynamo traces; it has no cells then. Raises `UnreadableError`.
    """
    found = _all(function, receiver, parsed, handed)
    return [capture._replace(path=_within(function, capture.path)) for capture in found] if nested else found


def _within(function: Any, path: Path) -> Path:
    """Rewrite `path` so that Dynamo can follow it from a function that was made while it traces."""
    (step, key), *further = path
    if step == "global":
        return (("module", function.__module__), ("attribute", key), *further)
    return (("constant", follow(function, None, path)),)


def _all(function: Any, receiver: Any, parsed: Parsed, handed: Collection[str]) -> list[Capture]:
    if _is_library(function):
        return []
    finder = _Finder(function, receiver, parsed)
    found = [*_defaults(function, parsed, handed)]
    if finder.called is not None:
        found.append(Capture("", _CALLED))
    # The guard of a helper function comes before the values that the helper captures.
    for name, reader in (*(("", guard.reader) for guard in parsed.guards), *parsed.readers.items()):
        path = finder.path(reader)
        if path is not None:
            found += [Capture(name, path)] if name else _shapes(path, reader.read(parsed.root))
    return found


def _shapes(path: Path, value: Any) -> list[Capture]:
    """The captures of a value that shaped the graph, one for each item of a tuple. A number is `fixed`, because Dynamo
    makes an input of a number that changed."""
    if isinstance(value, tuple):
        return [found for index, item in enumerate(value) for found in _shapes((*path, ("item", index)), item)]
    return [Capture("", path, value if is_number(value) else None)]


def _defaults(function: Any, parsed: Parsed, handed: Collection[str]) -> Iterator[Capture]:
    if isinstance(function, str):  # the numbers are in the text, which cannot change
        yield from (
            Capture(name, (("constant", value),)) for name, value in parsed.defaults.items() if name not in handed
        )
        return
    if not isinstance(function, FunctionType):
        if parsed.defaults or parsed.fixed:
            raise UnreadableError("its defaults")
        return
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    positional = function.__defaults__ or ()
    for index, name in enumerate(names[len(names) - len(positional) :]):
        if not (is_number(positional[index]) and name in handed):
            yield _default(name, positional[index], (("attribute", "__defaults__"), ("item", index)))
    for name, value in (function.__kwdefaults__ or {}).items():
        if not (is_number(value) and name in handed):
            yield _default(name, value, (("attribute", "__kwdefaults__"), ("item", name)))
    if held_defaults(function).keys() < parsed.defaults.keys():
        raise UnreadableError("its defaults")


def _default(name: str, value: Any, path: Path) -> Capture:
    return Capture(name if is_number(value) else "", path)


_LIBRARIES = ("epifuse", "torch", "math")
_CONTENTS = {
    "code": "__code__",
    "defaults": "__defaults__",
    "keyword defaults": "__kwdefaults__",
    "function": "__func__",
    "owner": "__self__",
}


class _Finder:
    """Finds the paths to the values that the readers of one parse read."""

    def __init__(self, function: Any, receiver: Any, parsed: Parsed) -> None:
        self.function, self.receiver, self.root = function, receiver, parsed.root
        is_function = isinstance(function, FunctionType)
        self.called = inspect.getattr_static(type(receiver), "__call__") if is_called(receiver) else None
        self.functions: dict[FunctionType, Path] = {function: ()} if is_function else {}
        if self.called is not None:
            self.functions[self.called] = _CALLED

    def path(self, reader: Reader) -> Path | None:
        """The path to the value that `reader` reads; None if a library holds the value, because no one changes it."""
        value = reader.read(self.root)
        for path in self._paths(reader.place):
            if path == _LIBRARY or self._leads_to(path, value):
                if isinstance(value, FunctionType):
                    self.functions.setdefault(value, path)
                return None if path == _LIBRARY else path
        raise UnreadableError(f"{getattr(value, '__name__', value)!r}, which it captured")

    def _leads_to(self, path: Path, value: Any) -> bool:
        try:
            found = follow(self.function, self.receiver, path)
        except (AttributeError, KeyError, IndexError, TypeError):
            return False
        return found is value

    def _paths(self, place: Hashable) -> Iterator[Path]:
        """Yield the paths that a reader's `place` may stand for."""
        if place in (RECEIVER, *RECEIVER):
            yield (("receiver", None),)
        elif isinstance(place, str):  # a name in source text, which means a function of the vocabulary
            yield _LIBRARY
        elif isinstance(place, int):
            yield from self._cells(place)
        elif isinstance(place, tuple) and place[0] == "cell" and len(place) == 2:
            function = next(iter(self.functions.values()), ())
            yield (*function, ("cell", place[1]))
        elif isinstance(place, tuple) and len(place) > 1:
            *above, name = place
            if len(above) == 1 and isinstance(above[0], int) and isinstance(name, str):
                yield from self._globals(above[0], name)
            holder: Hashable = above[0] if len(above) == 1 else tuple(above)
            for path in self._paths(holder):
                if path == _LIBRARY or _is_library(follow(self.function, self.receiver, path)):
                    yield _LIBRARY
                    continue
                if name == "type":
                    yield (*path, ("class", None))
                if name == "altered":  # hooks that a module gets later: Dynamo does not look at them either
                    yield _LIBRARY
                yield (*path, ("attribute", _CONTENTS.get(str(name), name)))
                yield (*path, ("attribute", name))
                yield (*path, ("item", name))

    def _cells(self, identity: int) -> Iterator[Path]:
        for function, path in self.functions.items():
            for index, cell in enumerate(function.__closure__ or ()):
                if id(cell) == identity:
                    yield (*path, ("cell", index))

    def _globals(self, identity: int, name: str) -> Iterator[Path]:
        if any(id(vars(module)) == identity for module in list(sys.modules.values()) if _is_library(module)):
            yield _LIBRARY
        for function, path in self.functions.items():
            if id(function.__globals__) == identity:
                is_own = name in function.__globals__  # else it is one of Python's builtins
                yield (*path, ("global", name)) if is_own else _LIBRARY


_CALLED: Path = (("receiver", None), ("class", None), ("attribute", "__call__"))
_LIBRARY: Path = (("library", None),)


def _is_library(value: Any) -> bool:
    """Whether `value` is a module or a function of epifuse, of PyTorch or of `math`."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, (ModuleType, FunctionType)) and str(name).split(".")[0] in _LIBRARIES
