"""What a name in an epilogue stands for. Names are resolved to objects, so that shadowing works as in Python."""

from __future__ import annotations

import builtins
import inspect
import math
import sys
import types
import weakref
from collections import namedtuple
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from epifuse.base.errors import Loc, fail, kind_of
from epifuse.frontend.hints import undefined_hint, unknown_function_hint
from epifuse.frontend.modules import Activation, activation_of, is_altered
from epifuse.fusion import vocabulary
from epifuse.fusion.vocabulary import VOCABULARY, Entry
from epifuse.ir import Node


class Root(NamedTuple):
    """What distinguishes one epilogue object from others with the same code: closures of one code share one parse.

    These are the cells of the function, the object whose method it is, and the keywords that `functools.partial` fixes.
    """

    closure: tuple[types.CellType, ...] = ()
    receiver: Any = None
    keywords: Mapping[str, Any] = MappingProxyType({})


NOTHING = Root()


@dataclass(frozen=True)
class Reader:
    """Reads a captured object again when arguments are bound. `place` identifies it: readers of one place are equal."""

    place: Hashable
    read: Callable[[Root], Any] = field(compare=False)


@dataclass(frozen=True)
class Static:
    """A value that is fixed when the epilogue is parsed: a string, None, a dtype, a tuple of integers, or a bool."""

    value: Any


@dataclass(frozen=True)
class FunctionRef:
    """A vocabulary function. `origin` is the library through which it was named: "epifuse", "torch" or "builtin"."""

    entry: Entry
    origin: str
    spelled: str


@dataclass(frozen=True)
class HostFunction:
    """A function of `math`."""

    function: Callable[..., Any]
    spelled: str


@dataclass(frozen=True)
class FixedFunction:
    """A function that is called while parsing, with a string or a dtype. `wanted` says in words what it takes."""

    function: Callable[[Any], Any]
    wanted: str
    spelled: str


@dataclass(frozen=True)
class Helper:
    """A function of the user's own, to be inlined."""

    function: types.FunctionType
    spelled: str
    receiver: Instance | None = None


@dataclass(frozen=True)
class Instance:
    """An object of the user's: its attributes may be looked up without running anything."""

    value: Any
    spelled: str
    reader: Reader


@dataclass(frozen=True)
class ActivationModule(Instance):
    """A module of torch.nn that is a function of the vocabulary."""

    activation: Activation


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


def known(item: Any) -> Any:
    """The value of `item` if it is fixed when the epilogue is parsed, or written as a number; otherwise None."""
    if isinstance(item, Static):
        return item.value
    return item.attr if isinstance(item, Node) and item.op == "const" else None


Meaning = Static | FunctionRef | HostFunction | FixedFunction | Helper | Instance | ActivationModule | Module | Number

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
_FIXED: Mapping[Any, str] = {
    float: "a string, as in float('-inf'); for a tensor write x.float(); a number needs none",
    torch.finfo: "a floating-point dtype",
    torch.iinfo: "an integer dtype",
}
_MISSING = object()


def is_number(value: object) -> bool:
    """True for what an epilogue can capture as a number."""
    return isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))


@dataclass(frozen=True, slots=True)
class Guard:
    """A captured object on which the graph depends. `seen` is the object, or if `weak` a function that returns it."""

    reader: Reader
    seen: Any
    weak: bool = False

    def holds(self, root: Root) -> bool:
        """Whether the reader still reads the same object, or an equal one if it is a plain value."""
        read, seen = self.reader.read, self.seen  # calling an attribute directly would cost twice as much
        value = read(root)
        if self.weak:
            return value is seen()
        return value is seen or (type(value) is type(seen) and isinstance(seen, _PLAIN) and bool(value == seen))


_PLAIN = (str, tuple, int, float)


@dataclass
class Scope:
    """Names outside the function: its closure, its globals, the builtins. A source text, which has no `function`, sees
    the names in `_STRING_NAMES` and the builtins."""

    function: types.FunctionType | None
    guards: list[Guard] = field(default_factory=list)
    root: Root = NOTHING
    is_root: bool = False
    """Whether the function is the epilogue itself, whose cells are those of `root`."""

    def resolve(self, name: str, loc: Loc, own: Iterable[str] = ()) -> Meaning:
        """What `name` means here. Raises if an epilogue cannot use that. `own` are the local names, for the hint."""
        reader = self._reader(name)
        value = reader.read(self.root)
        if value is _MISSING:
            raise fail("undefined", loc, name=name, near=undefined_hint(name, own))
        return self.classify(value, name, reader, loc)

    def attribute(self, base: Module, name: str, loc: Loc) -> Meaning:
        """The meaning of `module.name`."""
        spelled = f"{base.spelled}.{name}"
        holder = base.reader.read
        reader = Reader((*_tuple(base.reader.place), name), lambda root: _named(holder(root), name))
        value = reader.read(self.root)
        if value is _MISSING:
            raise fail("no_attribute", loc, module=base.spelled, name=name, near=unknown_function_hint(spelled))
        if base.module is math and isinstance(value, float):
            return Static(value)
        if base.module is builtins:
            raise fail("captured_object", loc, name=spelled, type=kind_of(value))
        return self.classify(value, spelled, reader, loc)

    def member(self, base: Instance, name: str, loc: Loc) -> Meaning:
        """The meaning of `self.name`: a number or a method. A property is refused, because reading it runs code."""
        spelled = f"{base.spelled}.{name}"
        holder = base.reader  # not `base`: the new reader would keep its object alive
        reader = Reader((*_tuple(holder.place), name), lambda root: _member(holder.read(root), name))
        value = reader.read(self.root)
        if value is _MISSING:
            raise fail("no_attribute", loc, module=base.spelled, name=name, near=unknown_function_hint(spelled))
        found = self.classify(value, spelled, reader, loc)
        # Python binds a function that the class holds, but no staticmethod, and nothing that the object itself holds.
        bound = inspect.getattr_static(type(base.value), name, None) is value
        return replace(found, receiver=base) if isinstance(found, Helper) and bound else found

    def classify(self, value: Any, spelled: str, reader: Reader, loc: Loc) -> Meaning:
        """The meaning of a captured object. An object that the language does not know is refused."""
        if is_number(value):
            return Number(reader, spelled)
        # The attributes of an object are read and guarded one by one, so that objects of one class share one parse.
        if (activation := activation_of(value)) is not None:
            self.guard(Reader((reader.place, "type"), lambda root: type(reader.read(root))), type(value))
            self.guard(Reader((reader.place, "altered"), lambda root: is_altered(reader.read(root))), False)
            return ActivationModule(value, spelled, reader, activation)
        if reader.place == RECEIVER:
            return Instance(value, spelled, reader)
        if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
            function = Reader((reader.place, "function"), lambda root: getattr(reader.read(root), "__func__", None))
            owner = Reader((reader.place, "owner"), lambda root: getattr(reader.read(root), "__self__", None))
            self.guard(function, value.__func__)
            self.guard_content(function, value.__func__)
            return Helper(value.__func__, spelled, Instance(value.__self__, spelled, owner))
        if self.function is not None and _is_looked_into(value):
            return Instance(value, spelled, reader)
        self.guard(reader, value)
        if value is None or isinstance(value, (str, torch.dtype)):
            return Static(value)
        if isinstance(value, (tuple, torch.Size)) and all(isinstance(item, int) for item in value):
            return Static(tuple(value))
        if isinstance(value, torch.Tensor):
            raise fail("captured_tensor", loc, name=spelled)
        found = known_function(value, spelled)
        if found is not None and not (self.function is None and isinstance(found, Helper)):
            if isinstance(found, Helper):
                self.guard_content(reader, found.function)
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
            return Reader(name, lambda root: _STRING_NAMES.get(name, vars(builtins).get(name, _MISSING)))
        if name in function.__code__.co_freevars:
            index = function.__code__.co_freevars.index(name)
            cell = (function.__closure__ or ())[index]
            if self.is_root:
                return Reader(("cell", index), lambda root: _cell(root.closure[index]))
            return Reader(id(cell), lambda root: _cell(cell))
        namespace: Mapping[str, Any] = function.__globals__
        return Reader(
            (id(namespace), name),
            lambda root: namespace[name] if name in namespace else vars(builtins).get(name, _MISSING),
        )

    def guard(self, reader: Reader, value: Any) -> None:
        """Parse again once `reader` reads another object than `value`, which is not kept alive."""
        if any(guard.reader == reader for guard in self.guards):
            return
        try:
            self.guards.append(Guard(reader, weakref.ref(value), weak=True))
        except TypeError:
            self.guards.append(Guard(reader, value))

    def guard_content(self, reader: Reader, function: types.FunctionType) -> None:
        """Parse again once a helper has other code or defaults, as after a module was reloaded in place."""
        self.guard(
            Reader((reader.place, "code"), lambda root: getattr(reader.read(root), "__code__", None)), function.__code__
        )
        if (defaults := function.__defaults__) is not None:
            # Compared by identity, because (2,) equals (2.0,).
            held = Reader((reader.place, "defaults"), lambda root: getattr(reader.read(root), "__defaults__", None))
            self.guards.append(Guard(held, lambda: defaults, weak=True))
        for name, value in (function.__kwdefaults__ or {}).items():  # a dict that may be changed in place
            self.guards.append(Guard(_keyword_default(reader, name), lambda value=value: value, weak=True))


def _keyword_default(reader: Reader, name: str) -> Reader:
    return Reader(
        ((reader.place, "keyword defaults"), name),
        lambda root: (getattr(reader.read(root), "__kwdefaults__", None) or {}).get(name, _MISSING),
    )


RECEIVER = ("receiver",)
"""The place, as in `Reader`, of the object whose method is the epilogue."""


def _is_looked_into(value: object) -> bool:
    """Whether `value` is an object of the user's whose attributes an epilogue may name."""
    if isinstance(value, torch.nn.Module):
        return True
    return not isinstance(value, (torch.Tensor, types.ModuleType, type)) and _root(type(value)) not in _LIBRARIES


_LIBRARIES = ("torch", "math", "builtins", "numpy", "functools", "epifuse")


def is_called(value: object) -> bool:
    """Whether calling `value` runs a Python function of its class, and nothing around it."""
    call = inspect.getattr_static(type(value), "__call__", None)
    return isinstance(call, types.FunctionType) and not isinstance(value, torch.nn.Module)


def _named(module: Any, name: str) -> Any:
    """`module.name`, without the module's own `__getattr__`, which may run anything; epifuse's only imports a form."""
    found = vars(module).get(name, _MISSING)
    return getattr(module, name, _MISSING) if found is _MISSING and module is sys.modules.get("epifuse") else found


_PLACES = (types.MemberDescriptorType, type(vars(namedtuple("_One", ("field",)))["field"]))
"""The types of descriptors that classes hold for attributes in __slots__, and for the fields of named tuples."""


def _member(holder: Any, name: str) -> Any:
    """`holder.name`, read without running a property or a `__getattr__`."""
    found = _found_statically(holder, name)
    if isinstance(found, _PLACES):  # reading it runs nothing
        try:
            return found.__get__(holder)
        except AttributeError:
            return _MISSING
    if found is _MISSING and isinstance(holder, torch.nn.Module):
        for held in ("_modules", "_parameters", "_buffers"):
            found = vars(holder).get(held, {}).get(name, found)
    return found.__func__ if isinstance(found, staticmethod) else found


def _found_statically(holder: Any, name: str) -> Any:
    """A faster `inspect.getattr_static`, which takes 5 us for an object that is no class. Each launch calls this."""
    if isinstance(holder, type):
        return inspect.getattr_static(holder, name, _MISSING)
    held = next((vars(owner)[name] for owner in type(holder).__mro__ if name in vars(owner)), _MISSING)
    try:
        own = object.__getattribute__(holder, "__dict__")
    except AttributeError:  # it has only slots
        return held
    return held if hasattr(type(held), "__set__") else own.get(name, held)


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


def known_function(value: Any, spelled: str) -> FunctionRef | HostFunction | FixedFunction | Helper | None:
    """What `value` is as a function of the language, or None if it is none."""
    if (entry := vocabulary.ours(value)) is not None:
        return FunctionRef(entry, "epifuse", spelled)
    if (entry := vocabulary.torchs(value)) is not None:
        return FunctionRef(entry, "torch", spelled)
    if isinstance(value, types.BuiltinFunctionType) and value in vocabulary.BUILTINS:
        return FunctionRef(VOCABULARY[vocabulary.BUILTINS[value]], "builtin", spelled)
    if isinstance(value, types.BuiltinFunctionType) and value in vocabulary.MATH_FUNCTIONS:
        return HostFunction(value, spelled)
    if isinstance(value, type) and value in _FIXED:
        return FixedFunction(value, _FIXED[value], spelled)
    if not isinstance(value, types.FunctionType) or _root(value) == "torch":
        return None
    return Helper(value, spelled)
