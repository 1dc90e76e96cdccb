"""The intermediate representation: nodes, graphs, types. It knows no operations."""

from epifuse.base.dtypes import Kind
from epifuse.ir.graph import Graph, Load, Output, rewrite
from epifuse.ir.node import Builder, Node
from epifuse.ir.types import Dims, Factor, Type

__all__ = ["Builder", "Dims", "Factor", "Graph", "Kind", "Load", "Node", "Output", "Type", "rewrite"]
