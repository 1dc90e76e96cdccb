"""Text for the terminal: wrapped lines, and rows of a name and a text, no wider than the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator

_LEAST, _MOST = 60, 120
_LABEL = re.compile(r"\s*\S+ {2,}|\s*%\d+ = |\s+|plan \w+: ")


def width() -> int:
    """The columns of the terminal, but at least 60 and at most 120; 80 if there is no terminal."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, _LEAST), _MOST)


def wrapped(text: str, columns: int | None = None) -> str:
    """Return `text` with long lines cut between words. Continuations start below the text behind the label."""
    columns = columns or width()
    return "\n".join(one for line in text.splitlines() for one in _cut(line, columns))


def _cut(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    label = _LABEL.match(line)
    indent = min(len(label[0]) if label else 2, columns // 3)
    return textwrap.wrap(line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def rows(pairs: Iterable[tuple[str, str]], columns: int | None = None) -> Iterator[str]:
    """Yield lines in two columns, for pairs of a name and a text."""
    found = list(pairs)
    wide = max((len(name) for name, _ in found), default=0)
    columns = columns or width()
    for name, text in found:
        before = f"  {name:<{wide}}  "
        for index, paragraph in enumerate(text.splitlines() or [""]):
            first = before if index == 0 else " " * len(before)
            wrap = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
            wrap.initial_indent, wrap.subsequent_indent = first, " " * len(before)
            yield "\n".join(wrap.wrap(paragraph)) or first.rstrip()


def size(count: int) -> str:
    """A number of bytes with a unit, such as `12.3 MB`."""
    number = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{count} bytes" if unit == "bytes" else f"{number:.3g} {unit}"
