"""A tree as text and as a picture, in the colours of Colfax's article on epilogue visitor trees."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from epifuse.forms.evt.outline import outline
from epifuse.forms.evt.part import Part
from epifuse.tools import debug

_COLOURS = {
    "visitor": ("#111827", "#111827"),
    "operation": ("#fee2e2", "#dc2626"),
    "matrix": ("#dcfce7", "#16a34a"),
    "scalar": ("#dbeafe", "#2563eb"),
    "store": ("#fef3c7", "#d97706"),
}
"""Fill and border colours: visitors black, operations red, matrices and vectors green, scalars blue, stores yellow."""

_DASHED = 'style=dashed, constraint=false, color="#dc2626"'

_DEFAULTS = (
    "graph [bgcolor=white, nodesep=0.25, ranksep=0.35, pad=0.2]",
    'node [fontname="Helvetica", fontsize=12, shape=box, style="rounded,filled", margin="0.12,0.06", height=0.3]',
    'edge [fontname="Helvetica", fontsize=9, fontcolor="#6b7280", color="#6b7280", arrowsize=0.6]',
)


def text(tree: Part) -> str:
    """The tree as text, with one line for each node. A tree visitor is shown as its operation; the numbers of the nodes
    whose values a node takes follow an arrow."""
    return "\n".join(line.text for line in outline(tree))


def to_dot(tree: Part) -> str:
    """The tree in DOT. Each visitor is above its children, and a tree visitor's operation is its leftmost child. Edges
    of a topological visitor are dashed."""
    lines = outline(tree)
    rows = list(_DEFAULTS)
    for at, (node, below) in enumerate(_positions(tree)):
        label = lines[at].label
        if node.operator is not node:
            rows += [_box(f"n{at}", type(node).__name__, node), _box(f"n{at}_op", label, node.operator)]
            rows.append(f"n{at} -> n{at}_op")
        else:
            rows.append(_box(f"n{at}", label, node))
        rows += [f'n{at} -> n{child} [label="{_mark(lines[child].before)}"]' for child in below]
        taken = [(source, taker) for taker, sources in enumerate(node.edges) for source in sources]
        rows += [f"n{below[source]} -> n{below[taker]} [{_DASHED}]" for source, taker in taken]
    body = "\n".join(f"  {row}" for row in rows)
    return f"digraph tree {{\n{body}\n}}\n"


def to_svg(tree: Part, path: str | os.PathLike[str]) -> Path:
    """Lay out `to_dot(tree)`, and write it as a picture. Raises `UnsupportedError` without the package pygraphviz."""
    return debug.draw(to_dot(tree), path)


def _box(name: str, title: str, node: Part) -> str:
    fill, border = _COLOURS[node.drawn]
    ink = "white" if node.drawn == "visitor" else "#111827"
    label = f'<FONT COLOR="{ink}">{escape(title)}</FONT>'
    return f'"{name}" [label=<{label}>, fillcolor="{fill}", color="{border}"]'


def _mark(before: str) -> str:
    """The role of a child, from the start of its line (`before`): such as `2` in a topological visitor, or `input` in a
    split tree."""
    return before.rpartition("─ ")[2].strip(": ")


def _positions(tree: Part) -> list[tuple[Part, list[int]]]:
    """Each node, in the order of the outline, with the positions of its children in this list."""
    found: list[tuple[Part, list[int]]] = []
    stack: list[tuple[Part, list[int]]] = [(tree, [])]
    while stack:
        node, siblings = stack.pop()
        siblings.append(len(found))
        below: list[int] = []
        found.append((node, below))
        stack.extend((child, below) for child in reversed(node.below))
    return found
