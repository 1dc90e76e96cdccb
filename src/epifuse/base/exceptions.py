"""Every exception epifuse raises on purpose. What they say stands in `errors.CATALOGUE`.

EpifuseError
├── EpilogueSyntaxError (SyntaxError)       what stands in the epilogue's source
├── EpilogueTypeError (TypeError)           kinds and shapes that do not go together in the epilogue
├── ArgumentError (ValueError)              operands, outputs, shapes, devices, options
├── ArgumentTypeError (TypeError)           an argument of the wrong Python type
├── UnsupportedError (NotImplementedError)  correct, but no kernel carries it
├── LaunchError (RuntimeError)              planned and built, but the device or its driver did not run it
└── InternalError (RuntimeError)            a fault of ours: the graph broke its own rules
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from epifuse.base.places import Loc


class EpifuseError(Exception):
    """The base of everything epifuse raises on purpose. `key` names the sentence; `loc` is the place, if it has one."""

    key: str = ""
    loc: Loc | None = None
    message: str = ""
    values: Mapping[str, Any] = MappingProxyType({})
    """What the sentence was made with; an error that comes from another process has none."""

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
    """Correct, but nothing here can run it. The message holds the reason of each kernel."""


class LaunchError(EpifuseError, RuntimeError):
    """A kernel did not run though it was planned and built; what the device said is the cause."""


class InternalError(EpifuseError, RuntimeError):
    """A fault of epifuse itself."""


def rebuild(kind: type[EpifuseError], key: str, loc: Loc | None, message: str) -> EpifuseError:
    """An error with its parts; pickle calls it too."""
    error = kind(message)
    error.key, error.loc, error.message = key, loc, message
    return error
