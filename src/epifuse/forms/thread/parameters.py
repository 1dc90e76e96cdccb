"""Parameters of a functor. There are three ways to write one: a value, a pointer, or an array of pointers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from epifuse.base.errors import fail
from epifuse.frontend.names import is_number


def parameter_of(key: str, known: Container[str]) -> str | None:
    """The parameter that `key` writes: `alpha`, `alpha_ptr` and `alpha_ptr_array` all write "alpha"."""
    if key in known:
        return key
    return next((name for form in _FORMS if key.endswith(form) and (name := key.removesuffix(form)) in known), None)


def resolved(functor: str, known: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters in `written` under their own names; a value is a number, a tensor, a function or None."""
    values: dict[str, Any] = {}
    for key, value in written.items():
        name = parameter_of(key, known)
        if name is None:
            raise fail("unknown_parameter", None, function=functor, name=key, parameters=", ".join(known) or "none")
        if name in values:
            raise fail("parameter_twice", None, function=functor, name=name)
        values[name] = _FORMS[key.removeprefix(name)](key, value)
    return values


def _value(key: str, value: Any) -> Any:
    if value is not None and not is_number(value) and not isinstance(value, torch.Tensor) and not callable(value):
        raise fail("option", None, name=key, want="a number, a tensor or a function", value=value)
    return value


def _pointer(key: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise fail("option", None, name=key, want="a tensor", value=value)
    return value


def _array(key: str, value: Any) -> torch.Tensor:
    """Return one number a batch as a tensor (L, 1, 1): a view of one tensor, or a copy of several tensors' values."""
    if isinstance(value, Sequence) and value and all(isinstance(x, torch.Tensor) and x.numel() == 1 for x in value):
        value = torch.stack([x.reshape(()) for x in value])
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        raise fail("option", None, name=key, want="a tensor (L,), or a tensor of one element a batch", value=value)
    return value[:, None, None]


_FORMS: Mapping[str, Callable[[str, Any], Any]] = {"": _value, "_ptr": _pointer, "_ptr_array": _array}
