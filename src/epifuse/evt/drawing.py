"""A tree as text and as a picture, in the colours of the article's figures."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from epifuse import debug
from epifuse.evt.nodes import (
    AccFetch,
    AuxLoad,
    AuxStore,
    ColBroadcast,
    Compute,
    Operand,
    Operation,
    Reduction,
    RowBroadcast,
    ScalarBroadcast,
    SrcFetch,
)
from epifuse.evt.outline import outline
from epifuse.evt.tree import EVT, SplitTreeVisitor, TopologicalVisitor, children_of
from epifuse.evt.visitor import Visitor

_MATRIX, _SCALAR, _VISITOR = ("#dcfce7", "#16a34a"), ("#dbeafe", "#2563eb"), ("#111827", "#111827")
_OPERATION, _STORE = ("#fee2e2", "#dc2626"), ("#fef3c7", "#d97706")
_COLOURS: tuple[tuple[tuple[Any, ...], tuple[str, str]], ...] = (
    ((EVT, TopologicalVisitor, SplitTreeVisitor), _VISITOR),
    ((AccFetch, SrcFetch, AuxLoad, RowBroadcast, ColBroadcast, Operand), _MATRIX),
    ((ScalarBroadcast,), _SCALAR),
    ((Compute, Operation), _OPERATION),
    ((AuxStore, Reduction), _STORE),
)
"""Fill and border: tree visitors black, operations red, matrices and vectors green, scalars blue, stores yellow."""

_DASHED = 'style=dashed, constraint=false, color="#dc2626"'

_DEFAULTS = (
    "graph [bgcolor=white, nodesep=0.25, ranksep=0.35, pad=0.2]",
    'node [fontname="Helvetica", fontsize=12, shape=box, style="rounded,filled", margin="0.12,0.06", height=0.3]',
    'edge [fontname="Helvetica", fontsize=9, fontcolor="#6b7280", color="#6b7280", arrowsize=0.6]',
)


def text(tree: Visitor) -> str:
    """One line a node; a tree visitor is shown by its operation, what a node takes from others after an arrow."""
    return "\n".join(line.text for line in outline(tree))


def to_dot(tree: Visitor) -> str:
    """DOT: each visitor above its children, the operation of a tree visitor leftmost; edges of a DAG dashed."""
    lines = outline(tree)
    rows = list(_DEFAULTS)
    for at, (node, below) in enumerate(_positions(tree)):
        label = lines[at].label
        if isinstance(node, EVT):
            rows += [_box(f"n{at}", "EVT", node), _box(f"n{at}_op", label, node.node_op), f"n{at} -> n{at}_op"]
        else:
            rows.append(_box(f"n{at}", label, node))
        rows += [f'n{at} -> n{child} [label="{_mark(lines[child].before)}"]' for child in below]
        if isinstance(node, TopologicalVisitor):
            taken = [(source, taker) for taker, sources in enumerate(node.edges) for source in sources]
            rows += [f"n{below[source]} -> n{below[taker]} [{_DASHED}]" for source, taker in taken]
    body = "\n".join(f"  {row}" for row in rows)
    return f"digraph tree {{\n{body}\n}}\n"


def to_svg(tree: Visitor, path: str | os.PathLike[str]) -> Path:
    """Write `to_dot(tree)`, laid out. Raises `UnsupportedError` without the package pygraphviz."""
    return debug.draw(to_dot(tree), path)


def _box(name: str, title: str, node: Visitor) -> str:
    fill, border = next(colours for kinds, colours in _COLOURS if isinstance(node, kinds))
    ink = "white" if (fill, border) == _VISITOR else "#111827"
    label = f'<FONT COLOR="{ink}">{escape(title)}</FONT>'
    return f'"{name}" [label=<{label}>, fillcolor="{fill}", color="{border}"]'


def _mark(before: str) -> str:
    """What a child is to its parent: `2` of a topological visitor, `input` of a split tree."""
    return before.rpartition("─ ")[2].strip(": ")


def _positions(tree: Visitor) -> list[tuple[Visitor, list[int]]]:
    """Each node of the outline with the positions of its children."""
    found: list[tuple[Visitor, list[int]]] = []
    stack: list[tuple[Visitor, list[int]]] = [(tree, [])]
    while stack:
        node, siblings = stack.pop()
        siblings.append(len(found))
        below: list[int] = []
        found.append((node, below))
        stack.extend((child, below) for child in reversed(children_of(node)))
    return found
