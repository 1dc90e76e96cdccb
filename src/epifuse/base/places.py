"""A place in a person's source, and how an error shows it: the file, the line, and a caret under the fault."""

from __future__ import annotations

import os
from typing import NamedTuple
from unicodedata import combining, east_asian_width


class Loc(NamedTuple):
    """A place in a person's source: 1-based line, 0-based column, and how many characters to underline (`width`)."""

    file: str
    line: int
    column: int
    width: int
    text: str
    via: Loc | None = None
    """The call that led here, for a line inside a helper."""

    def __str__(self) -> str:
        stripped = self.text.lstrip()
        indent = self.column - (len(self.text) - len(stripped))
        start = max(indent - _MARGIN, 0) if len(stripped) > _WIDEST else 0
        end, caret = start + _WIDEST, indent - start
        left, right = _CUT if start else "", _CUT if end < len(stripped) else ""
        shown = left + stripped[start + len(left) : end - len(right)] + right
        width = max(min(self.width, len(shown) - caret), 1)
        text = f"  {_short(self.file)}:{self.line}\n    {shown}\n    {_blank(shown[:caret])}{'^' * width}"
        return text + "".join(f"\n  called from\n{call._replace(via=None)}" for call in self._calls())

    def _calls(self) -> list[Loc]:
        """The calls that led here, innermost first. Of more than four, the three innermost and the outermost."""
        calls: list[Loc] = []
        call = self.via
        while call is not None:
            calls.append(call)
            call = call.via
        return calls if len(calls) <= _DEEPEST else [*calls[: _DEEPEST - 1], calls[-1]]


_WIDEST = 110
_MARGIN = 40
_CUT = "..."
_DEEPEST = 4


def _blank(text: str) -> str:
    """Blanks as wide as `text` in a terminal."""
    return "".join(
        "\t" if c == "\t" else "" if combining(c) else "  " if east_asian_width(c) in "WF" else " " for c in text
    )


def _short(file: str) -> str:
    try:
        return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    except OSError:  # the working directory is gone
        return file
