"""A tree as lines, one for each node, top down. They are printed, and errors point at them. Missing names are added."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from epifuse.base.errors import Loc
from epifuse.forms.evt.part import Part

FILE = "<visitor tree>"
"""The file name in the place of an error. Its lines are those of the printed tree."""


class Line(NamedTuple):
    """One line of the outline: its node in the tree (`tree`), and the text before, of, and after its label.

    `node` is the same node with a name if it needs one, or the operator if `tree` is a tree visitor."""

    tree: Part
    node: Any
    number: int
    before: str
    label: str
    after: str

    @property
    def text(self) -> str:
        """The line as printed."""
        return self.before + self.label + self.after

    @property
    def place(self) -> Loc:
        """The line as the place to which an error points."""
        return Loc(FILE, self.number, len(self.before), len(self.label), self.text)


def outline(tree: Part) -> tuple[Line, ...]:
    """The lines of `tree`. It is iterative, because a tree may be as deep as an epilogue is long."""
    names = _used_names(tree)
    lines: list[Line] = []
    stack: list[tuple[Part, str, str, str]] = [(tree, "", "", "")]
    while stack:
        node, before, below, after = stack.pop()
        own = _named(node.operator, names)
        lines.append(Line(node, own, len(lines) + 1, before, own.label, after))
        children = node.below
        for position, child in reversed(list(enumerate(children))):
            last = position == len(children) - 1
            mark, sources = node.role(position)
            branch, rest = ("└─ ", "   ") if last else ("├─ ", "│  ")
            stack.append((child, below + branch + mark, _shortened(below + rest + " " * len(mark)), sources))
    return tuple(lines)


_DEEPEST = 90


def _shortened(prefix: str) -> str:
    """The indentation, cut at its left end to `_DEEPEST` characters: a tree may be a thousand levels deep."""
    return prefix if len(prefix) <= _DEEPEST else "…" + prefix[1 - _DEEPEST :]


def _named(node: Part, names: set[str]) -> Any:
    if node.is_named:
        return node
    free = next(name for name in _candidates(node.kind) if name not in names)
    names.add(free)
    return replace(node, name=free)  # type: ignore[type-var]  # every node is a dataclass


def _candidates(kind: str) -> Iterator[str]:
    yield kind
    yield from (f"{kind}_{number}" for number in itertools.count(2))


def _used_names(tree: Part) -> set[str]:
    """All names that occur in the tree, and the reserved ones: `accum`, and D for the result."""
    names, stack = {"D", "accum"}, [tree]
    while stack:
        node = stack.pop()
        stack.extend(node.below)
        own = node.operator
        names.update(name for name, _ in own.slots)
        names.update({own.name} if isinstance(own.name, str) else ())
    return names
