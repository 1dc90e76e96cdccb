"""What a name in an epilogue stands for: an object, never a string, so that shadowing is Python's own."""

from __future__ import annotations

import builtins
import inspect
import math
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from epifuse.errors import Loc, fail, kind_of
from epifuse.frontend.hints import undefined_hint, unknown_function_hint
from epifuse.fusion import vocabulary
from epifuse.fusion.vocabulary import VOCABULARY, Entry


@dataclass(frozen=True)
class Reader:
    """Reads a captured object again when arguments are bound. Readers of one place are equal."""

    place: Hashable
    read: Callable[[], Any] = field(compare=False)

    def __call__(self) -> Any:
        return self.read()


@dataclass(frozen=True)
class Static:
    """A value that is fixed when the epilogue is parsed: a string, None, a dtype, a tuple of integers, a truth."""

    value: Any


@dataclass(frozen=True)
class FunctionRef:
    """A vocabulary function, and through which library it was named: "epifuse", "torch" or "builtin"."""

    entry: Entry
    origin: str
    spelled: str


@dataclass(frozen=True)
class HostFunction:
    """A function of `math`."""

    function: Callable[..., Any]
    spelled: str


@dataclass(frozen=True)
class Helper:
    """A function of the user's own, to be inlined."""

    function: types.FunctionType
    spelled: str
    receiver: Instance | None = None


@dataclass(frozen=True)
class Instance:
    """The object whose method is an epilogue: its attributes may be looked up without running anything."""

    value: Any
    spelled: str


@dataclass(frozen=True)
class Module:
    """A module (or our vocabulary's namespace): its attributes may be looked up without running anything."""

    module: Any
    spelled: str
    reader: Reader


@dataclass(frozen=True)
class Number:
    """A captured number: where to read it again when arguments are bound."""

    reader: Reader
    spelled: str


Meaning = Static | FunctionRef | HostFunction | Helper | Instance | Module | Number

_OURS = types.SimpleNamespace(**{name: entry.function for name, entry in VOCABULARY.items()})
_STRING_NAMES: dict[str, Any] = {
    **{name: entry.function for name, entry in VOCABULARY.items()},
    "torch": torch,
    "F": F,
    "math": math,
    "ef": _OURS,
    "epifuse": _OURS,
}
_STRING_MODULES = (torch, torch.nn, F, torch.special, math, _OURS)
_MISSING = object()


def is_number(value: object) -> bool:
    """True for what an epilogue can capture as a number."""
    return isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))


@dataclass
class Scope:
    """Names outside the function: its closure, its globals, the builtins. A string has our vocabulary alone."""

    function: types.FunctionType | None
    guards: list[tuple[Reader, Any]] = field(default_factory=list)

    def resolve(self, name: str, loc: Loc) -> Meaning:
        """What `name` means here; raises where it means nothing an epilogue can use."""
        reader = self._reader(name)
        value = reader()
        if value is _MISSING:
            raise fail("undefined", loc, name=name, near=undefined_hint(name))
        return self.classify(value, name, reader, loc)

    def attribute(self, base: Module, name: str, loc: Loc) -> Meaning:
        """`module.name`, without the module's own `__getattr__`, which may run anything."""
        spelled = f"{base.spelled}.{name}"
        reader = Reader((*_tuple(base.reader.place), name), lambda: vars(base.reader()).get(name, _MISSING))
        value = reader()
        if value is _MISSING:
            raise fail("no_attribute", loc, module=base.spelled, name=name, near=unknown_function_hint(spelled))
        if base.module is math and isinstance(value, float):
            return Static(value)
        if base.module is builtins:
            raise fail("captured_object", loc, name=spelled, type=kind_of(value))
        return self.classify(value, spelled, reader, loc)

    def member(self, base: Instance, name: str, loc: Loc) -> Meaning:
        """`self.name`: a number is captured, a method is a helper; properties, which run, are refused."""
        spelled = f"{base.spelled}.{name}"
        reader = Reader((id(base.value), name), lambda: _member(base.value, name))
        value = reader()
        if value is _MISSING:
            raise fail("no_attribute", loc, module=base.spelled, name=name, near=unknown_function_hint(spelled))
        found = self.classify(value, spelled, reader, loc)
        # Python binds what the class holds, and neither a staticmethod nor what the object itself holds.
        bound = inspect.getattr_static(type(base.value), name, None) is value
        return replace(found, receiver=base) if isinstance(found, Helper) and bound else found

    def classify(self, value: Any, spelled: str, reader: Reader, loc: Loc) -> Meaning:
        """Sort a captured object into what the language knows; everything else is refused."""
        if isinstance(value, Instance):
            return value
        if is_number(value):
            return Number(reader, spelled)
        self.guards.append((reader, value))
        if value is None or isinstance(value, (str, torch.dtype)):
            return Static(value)
        if isinstance(value, (tuple, torch.Size)) and all(isinstance(item, int) for item in value):
            return Static(tuple(value))
        if isinstance(value, torch.Tensor):
            raise fail("captured_tensor", loc, name=spelled)
        if isinstance(value, torch.nn.Module):
            raise fail("captured_module", loc, name=spelled, type=kind_of(value))
        found = known_function(value, spelled)
        if found is not None and not (self.function is None and isinstance(found, Helper)):
            return found
        library = isinstance(value, np.ufunc) or _root(value) in ("torch", "math", "builtins", "numpy")
        if callable(value) and (self.function is None or library):
            raise fail("unknown_function", loc, name=spelled, near=unknown_function_hint(spelled, exists=True))
        reachable = isinstance(value, types.ModuleType) if self.function else value in _STRING_MODULES
        if reachable:
            return Module(value, spelled, reader)
        if isinstance(value, types.ModuleType):
            raise fail("unknown_function", loc, name=spelled, near=unknown_function_hint(spelled, exists=True))
        raise fail("captured_object", loc, name=spelled, type=kind_of(value))

    def _reader(self, name: str) -> Reader:
        function = self.function
        if function is None:
            return Reader(name, lambda: _STRING_NAMES.get(name, vars(builtins).get(name, _MISSING)))
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            return Reader(id(cell), lambda: _cell(cell))
        namespace: Mapping[str, Any] = function.__globals__
        return Reader(
            (id(namespace), name), lambda: namespace[name] if name in namespace else vars(builtins).get(name, _MISSING)
        )


def _member(holder: Any, name: str) -> Any:
    found = inspect.getattr_static(holder, name, _MISSING)
    return found.__func__ if isinstance(found, staticmethod) else found


def _tuple(place: Hashable) -> tuple[Hashable, ...]:
    return place if isinstance(place, tuple) else (place,)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the enclosing function has not assigned the name yet
        return _MISSING


def _root(value: object) -> str:
    """The package an object comes from; a function made by exec has no module."""
    return str(getattr(value, "__module__", None) or "").split(".")[0]


def known_function(value: Any, spelled: str) -> FunctionRef | HostFunction | Helper | None:
    """The function `value` is to the language, if it is one."""
    if (entry := vocabulary.ours(value)) is not None:
        return FunctionRef(entry, "epifuse", spelled)
    if (entry := vocabulary.torchs(value)) is not None:
        return FunctionRef(entry, "torch", spelled)
    if isinstance(value, types.BuiltinFunctionType) and value in vocabulary.BUILTINS:
        return FunctionRef(VOCABULARY[vocabulary.BUILTINS[value]], "builtin", spelled)
    if isinstance(value, types.BuiltinFunctionType) and value in vocabulary.MATH_FUNCTIONS:
        return HostFunction(value, spelled)
    if not isinstance(value, types.FunctionType) or _root(value) == "torch":
        return None
    return Helper(value, spelled)
