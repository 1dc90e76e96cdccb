"""Everything that an epilogue may call, by name and by object: epifuse's functions, torch's, math's, and builtins."""

from __future__ import annotations

import builtins
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F

from epifuse.base.lazy import cached_property
from epifuse.fusion import activation, bits, composites, forms, philox, primitives, reduction

Group = Literal["primitive", "activation", "macro", "reduction", "form"]


@dataclass(frozen=True)
class Entry:
    """One name of the vocabulary. The parser inlines a macro. It makes one node of an activation, for which a provider
    may have a faster form."""

    name: str
    group: Group
    function: Callable[..., Any]

    @cached_property
    def signature(self) -> inspect.Signature:
        """The parameters as they are written in an epilogue."""
        return inspect.signature(self.function)

    @property
    def body(self) -> Callable[..., Any]:
        """The function without decorators, as the parser reads it."""
        body: Callable[..., Any] = inspect.unwrap(self.function)
        return body

    @property
    def rounds_once(self) -> bool:
        """Whether it computes in float32 on values of 16 bits and rounds only its result."""
        return hasattr(self.function, "rounds_once")

    @property
    def summary(self) -> str:
        """First paragraph of the docstring."""
        return " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())


def is_static(parameter: inspect.Parameter) -> bool:
    """True for a parameter that is fixed when the epilogue is parsed: annotated, and not with `Value`."""
    return parameter.annotation not in (inspect.Parameter.empty, "Value")


def public_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions a module defines itself, in order of definition, private ones left out."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def _entries() -> dict[str, Entry]:
    apart = (*philox.__all__, *bits.__all__)
    entries = {
        name: Entry(name, "primitive", getattr(primitives, name)) for name in primitives.PRIMITIVES if name not in apart
    }
    entries |= {name: Entry(name, "primitive", getattr(bits, name)) for name in bits.__all__}
    for name, function in public_functions(activation).items():
        static = builtins.any(map(is_static, inspect.signature(function).parameters.values()))
        entries[name] = Entry(name, "macro" if static else "activation", function)
    for name, function in public_functions(composites).items():
        entries[name] = Entry(name, "macro", function)
    for name in reduction.REDUCTIONS:
        entries[name] = Entry(name, "reduction", getattr(reduction, name))
    for name in ("softmax", "log_softmax"):
        entries[name] = Entry(name, "macro", getattr(reduction, name))
    for name, function in public_functions(forms).items():
        entries[name] = Entry(name, "macro" if name in ("max", "min", "clamp") else "form", function)
    return entries | {name: Entry(name, "primitive", getattr(philox, name)) for name in philox.__all__}


VOCABULARY: dict[str, Entry] = _entries()

_TORCH_SPELLINGS = {
    "absolute": "abs",
    "negative": "neg",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "expit": "sigmoid",
}
"""PyTorch's names that differ from epifuse's. Others, such as gelu and clamp, are the same."""

_TORCH_NAMESPACES: tuple[Any, ...] = (torch, F, torch.special)
_NOT_TORCH = frozenset({"cast", "debug_print", "index_m", "index_n", "index_l", "clip", "dropout"})

METHODS: dict[str, str] = {
    **{name: name for name in VOCABULARY if hasattr(torch.Tensor, name) and name not in _NOT_TORCH},
    **{name: ours for name, ours in _TORCH_SPELLINGS.items() if ours and hasattr(torch.Tensor, name)},
    "clip": "clamp",
    "view": "reshape",
}
"""The tensor methods that an epilogue may call, each with its name in the vocabulary."""

CAST_METHODS: dict[str, torch.dtype] = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}

BUILTINS: dict[Any, str] = {
    getattr(builtins, name): name for name in ("max", "min", "sum", "abs", "round", "any", "all", "pow")
}
"""Builtins that mean functions of the vocabulary in an epilogue. `ef.reference` replaces the same ones."""

_NOT_OF_NUMBERS = ("dist", "frexp", "fsum", "modf", "prod", "sumprod")
MATH_FUNCTIONS: frozenset[Any] = frozenset(
    value for name, value in vars(math).items() if callable(value) and name not in _NOT_OF_NUMBERS and name[0] != "_"
)


def _torch_objects() -> dict[int, str]:
    found: dict[int, str] = {}
    spellings: Mapping[str, str] = {
        **{name: name for name in VOCABULARY if name not in _NOT_TORCH},
        **{name: ours for name, ours in _TORCH_SPELLINGS.items() if ours},
        "clip": "clamp",
    }
    for namespace in _TORCH_NAMESPACES:
        for name, ours in spellings.items():
            if (function := getattr(namespace, name, None)) is not None:
                found.setdefault(id(function), ours)
    return found


_TORCH_OBJECTS = _torch_objects()
_OUR_OBJECTS: dict[int, str] = {id(entry.function): name for name, entry in VOCABULARY.items()}


def ours(value: object) -> Entry | None:
    """The entry of `value` if it is a function of epifuse, else None."""
    name = _OUR_OBJECTS.get(id(value))
    return VOCABULARY[name] if name else None


def torchs(value: object) -> Entry | None:
    """The entry that PyTorch's function `value` corresponds to, or None."""
    name = _TORCH_OBJECTS.get(id(value))
    return VOCABULARY[name] if name else None
