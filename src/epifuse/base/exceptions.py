"""Every exception epifuse raises on purpose. `errors.CATALOGUE` holds their sentences.

EpifuseError
├── EpilogueSyntaxError (SyntaxError)       the epilogue's source
├── EpilogueTypeError (TypeError)           kinds and shapes that do not go together in the epilogue
├── ArgumentError (ValueError)              operands, outputs, shapes, devices, options
├── ArgumentTypeError (TypeError)           an argument of the wrong Python type
├── UnsupportedError (NotImplementedError)  correct, but no kernel supports it
├── LaunchError (RuntimeError)              planned and built, but the device or its driver did not run it
└── InternalError (RuntimeError)            a fault of epifuse: the graph broke its own rules
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from epifuse.base.places import Loc


class EpifuseError(Exception):
    """The base of everything epifuse raises on purpose. `key` names the sentence; `loc` is the place in a source."""

    key: str = ""
    loc: Loc | None = None
    message: str = ""
    values: Mapping[str, Any] = MappingProxyType({})
    """The values that the sentence was made with. An error from another process has none."""

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.key, self.loc, self.message)


class EpilogueSyntaxError(EpifuseError, SyntaxError):
    """The epilogue's source holds something outside the language."""


class EpilogueTypeError(EpifuseError, TypeError):
    """Kinds or shapes inside the epilogue do not go together."""


class ArgumentError(EpifuseError, ValueError):
    """An operand, an output or an option does not fit."""


class ArgumentTypeError(EpifuseError, TypeError):
    """An argument has the wrong Python type."""


class UnsupportedError(EpifuseError, NotImplementedError):
    """The call is correct, but no kernel can run it. The message holds the reason of each kernel."""


class LaunchError(EpifuseError, RuntimeError):
    """A kernel was planned and built, but did not run. The device's own error, if there is one, is the cause."""


class InternalError(EpifuseError, RuntimeError):
    """A fault of epifuse itself."""


def rebuild(kind: type[EpifuseError], key: str, loc: Loc | None, message: str) -> EpifuseError:
    """Make an error from its parts; pickle calls this as well."""
    error = kind(message)
    error.key, error.loc, error.message = key, loc, message
    return error
