"""Visitor trees: an epilogue as CUTLASS users write it. A tree is read into the same graph as a Python function."""

from typing import TYPE_CHECKING

from epifuse.forms.evt import functional, fusion
from epifuse.forms.evt.from_graph import to_tree
from epifuse.forms.evt.nodes import AccFetch, AuxLoad, ColBroadcast, Operand, RowBroadcast, ScalarBroadcast, SrcFetch
from epifuse.forms.evt.operators import AuxStore, ColReduction, Compute, RowReduction, ScalarReduction
from epifuse.forms.evt.tree import EVT, SplitTreeVisitor, TopologicalVisitor
from epifuse.forms.evt.visitor import Visitor
from epifuse.frontend.hints import absent

__all__ = [
    "EVT",
    "AccFetch",
    "AuxLoad",
    "AuxStore",
    "ColBroadcast",
    "ColReduction",
    "Compute",
    "Operand",
    "RowBroadcast",
    "RowReduction",
    "ScalarBroadcast",
    "ScalarReduction",
    "SplitTreeVisitor",
    "SrcFetch",
    "TopologicalVisitor",
    "Visitor",
    "functional",
    "fusion",
    "to_tree",
]

if not TYPE_CHECKING:  # with it, a type checker would accept any name
    __getattr__ = absent(globals(), {"Sm90TreeVisitor": "write epifuse.evt.EVT"})
