"""The cache of parsed epilogues. A parse is found by its code; the `Root` of each epilogue object is read anew."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch.fx import GraphModule

from epifuse.base.errors import fail
from epifuse.frontend import modules
from epifuse.frontend.fx import parsed_module
from epifuse.frontend.names import NOTHING, RECEIVER, Reader, Root, is_called, is_number
from epifuse.frontend.python_function import Parsed, parse, vocabulary_text
from epifuse.frontend.remembered import KEPT, Kept, remembered
from epifuse.frontend.signature import held_defaults, is_fixed, written_defaults
from epifuse.frontend.source import from_string
from epifuse.fusion.vocabulary import ours


def parsed(epilogue: Any, *handed: Any) -> Parsed:
    """Parse a function, method, partial, callable object, activation module, source text or `FrontEnd`.

    `handed` are mappings from names to the values that a call passes: a parameter whose default is None or a string is
    decided while parsing, by the value passed for it. Raises `EpilogueSyntaxError` for anything outside the language.
    """
    if (seen := _earlier_parse(epilogue)) is not None:
        return seen
    if isinstance(epilogue, Parsed):
        return epilogue
    # A visitor tree or a functor is its own front end: its method returns the parse.
    if (own := getattr(type(epilogue), "__epifuse__", None)) is not None:
        return own(epilogue)  # type: ignore[no-any-return]  # declared by the class
    if isinstance(epilogue, GraphModule):
        return remembered("fx", epilogue, lambda: parsed_module(epilogue), epilogue.code)
    function, root = _function_and_root(epilogue)
    defaults = _defaults(function, root)
    decided = _decided(defaults, handed)
    found = _found(function, root, defaults, decided)
    numbers = {name: defaults[name] for name in found.defaults}
    if root is not NOTHING or not all(map(operator.is_, numbers.values(), found.defaults.values())):
        found = found.bound(root, numbers)
    if not (decided or found.fixed):
        _remember_parse(epilogue, found)
    return found


def _earlier_parse(epilogue: Any) -> Parsed | None:
    """The earlier parse of a text or of this very function, or None if there is none or what it depends on changed.

    Most launches need nothing else of this module, so it has to be fast.
    """
    if type(epilogue) is str:
        return None if (kept := KEPT.get(epilogue)) is None else kept.value
    if type(epilogue) is not FunctionType or (kept := KEPT.get(id(epilogue))) is None or kept.read() is not epilogue:
        return None
    code, defaults, reassign, found = kept.value
    if code is not epilogue.__code__ or defaults is not epilogue.__defaults__ or epilogue.__kwdefaults__:
        return None
    root = Root(epilogue.__closure__) if epilogue.__closure__ else NOTHING
    if reassign is not _reassigns(epilogue) or not found.is_current(root):
        return None
    return found if root is NOTHING else found.bound(root, found.defaults)  # type: ignore[no-any-return]


def _remember_parse(epilogue: Any, found: Parsed) -> None:
    """Remember a parse for `_earlier_parse`, without the cells of a closure, which would keep their contents alive."""
    if type(epilogue) is str:
        KEPT.put(epilogue, Kept(str, found))
    elif type(epilogue) is FunctionType and not epilogue.__kwdefaults__:
        made_of = epilogue.__code__, epilogue.__defaults__, _reassigns(epilogue)
        stale = KEPT.get(id(epilogue))
        KEPT.drop(id(epilogue), stale)
        KEPT.put(id(epilogue), Kept(weakref.ref(epilogue), (*made_of, found.bound(NOTHING, found.defaults))))


def _reassigns(function: Any) -> bool:
    return getattr(function, "__epifuse_reassign__", False) is True


def _found(function: Any, root: Root, defaults: Mapping[str, Any], decided: Mapping[str, Any]) -> Parsed:
    """The parse of this code, made now or for another object of the same code."""
    reassign = _reassigns(function)
    is_function = type(function) is FunctionType

    def make() -> Parsed:
        given = _bound_readers(function, root)
        return _shared(parse(function, reassign=reassign, given=given, root=root, handed=decided))

    return remembered(
        "epilogue",
        function.__code__ if is_function else function,
        make,
        (
            id(function.__globals__) if is_function else None,
            ours(function),  # some vocabulary functions share one code object, that of the check of their arguments
            reassign,
            root.receiver is None,
            _kinds(defaults),
            _kinds(decided),
        ),
        lambda known: known.is_current(root),
    )


def _shared(made: Parsed) -> Parsed:
    """The part of a parse that all objects of the same code share. It keeps no model and no tensor alive."""
    return made.bound(NOTHING, {name: value if is_number(value) else None for name, value in made.defaults.items()})


def parsed_method(owner: Any, method: FunctionType, accum: str) -> Parsed:
    """The method of an object as an epilogue; the names in it may be assigned again."""
    root = Root(method.__closure__ or (), owner)
    found = remembered(
        "method",
        method.__code__,
        lambda: _shared(parse(method, reassign=True, given=_bound_readers(method, root), accum=accum, root=root)),
        (id(method.__globals__), _kinds(held_defaults(method))),
        lambda known: known.is_current(root),
    )
    return found.bound(root, {name: held_defaults(method)[name] for name in found.defaults})


def parsed_once(front_end: Any, make: Callable[[], Parsed], further: Hashable = ()) -> Parsed:
    """What `make` returns for the object `front_end`. It is made again once something that it captured has changed."""
    return remembered("front end", front_end, make, further, Parsed.is_current)


def check_importable(epilogue: Any) -> None:
    """Raise `ArgumentError` unless another process can import the function of `epilogue`, as pickling needs."""
    if isinstance(epilogue, Parsed):
        raise fail("not_importable", None, name=epilogue.name)
    function = _function_and_root(epilogue).function
    if type(function) is FunctionType:
        found: Any = sys.modules.get(function.__module__)
        for name in function.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is not function:
            raise fail("not_importable", None, name=function.__qualname__)


# --- what an epilogue is made of -----------------------------------------------------------------------------------


class _FunctionAndRoot(NamedTuple):
    """What is parsed: a function or a text, and what the epilogue object has of its own."""

    function: Any
    root: Root


def _function_and_root(epilogue: Any) -> _FunctionAndRoot:
    if type(epilogue) is FunctionType:
        return _FunctionAndRoot(epilogue, Root(epilogue.__closure__) if epilogue.__closure__ else NOTHING)
    if isinstance(epilogue, str):
        return _FunctionAndRoot(epilogue, NOTHING)
    keywords: dict[str, Any] = {}
    while isinstance(epilogue, functools.partial):
        if epilogue.args:
            raise fail("partial_accum", None, name=getattr(epilogue.func, "__name__", "the epilogue"))
        keywords = {**epilogue.keywords, **keywords}
        epilogue = epilogue.func
    receiver = None
    if keywords and (text := vocabulary_text(epilogue, keywords)) is not None:
        return _FunctionAndRoot(text, NOTHING)
    if (text := modules.as_text(epilogue)) is not None:
        return _FunctionAndRoot(text, Root((), epilogue, keywords))
    if isinstance(epilogue, MethodType):
        epilogue, receiver = epilogue.__func__, epilogue.__self__
    elif is_called(epilogue):
        epilogue, receiver = inspect.getattr_static(type(epilogue), "__call__"), epilogue
    closure = epilogue.__closure__ or () if isinstance(epilogue, FunctionType) else ()
    if not closure and receiver is None and not keywords:
        return _FunctionAndRoot(epilogue, NOTHING)
    return _FunctionAndRoot(epilogue, Root(closure, receiver, keywords))


def _bound_readers(function: Any, root: Root) -> dict[str, Any]:
    """Readers of the parameters that are no operands: the object of a method, and functions that a partial fixes."""
    given: dict[str, Any] = {}
    if root.receiver is not None:
        name = modules.PARAMETER if isinstance(function, str) else function.__code__.co_varnames[0]
        given[name] = Reader(RECEIVER, lambda root: root.receiver)
    for name, value in root.keywords.items():
        if callable(value):
            given[name] = _keyword(name)
    return given


def _keyword(name: str) -> Reader:
    return Reader(("keyword", name), lambda root: root.keywords.get(name))


def _defaults(function: Any, root: Root) -> dict[str, Any]:
    """The defaults that the parameters have now."""
    if isinstance(function, str) and "=" not in function:
        held = {}
    elif isinstance(function, str):
        held = remembered("defaults", function, lambda: written_defaults(from_string(function).parameters))
    elif type(function) is not FunctionType:
        held = {}
    else:
        held = held_defaults(function) if function.__defaults__ or function.__kwdefaults__ else {}
    return {**held, **root.keywords} if root.keywords else held


def _decided(defaults: Mapping[str, Any], handed: tuple[Any, ...]) -> dict[str, Any]:
    """The values passed for parameters that are decided while parsing. An ellipsis stands for any other value than None
    or a string: it makes the parameter an operand."""
    by_name = {name: value for given in handed if isinstance(given, Mapping) for name, value in given.items()}
    return {
        name: by_name[name] if is_fixed(by_name[name]) else ...
        for name, value in defaults.items()
        if is_fixed(value) and name in by_name
    }


def _kinds(values: Mapping[str, Any]) -> Hashable:
    return tuple([(name, _kind(value)) for name, value in values.items()]) if values else ()


def _kind(value: Any) -> Any:
    """What the parse depends on in a default: the type of a number, or the value that is decided while parsing."""
    if is_fixed(value):
        return type(value), value
    if value is ...:
        return "operand"
    return "function" if callable(value) else type(value)
