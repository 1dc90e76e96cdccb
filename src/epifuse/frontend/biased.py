"""An epilogue beside a bias: what `linear` adds before it."""

from __future__ import annotations

from dataclasses import replace

from epifuse.frontend.python_function import Parsed
from epifuse.frontend.remembered import remembered
from epifuse.ir import Builder, Graph, Load, Node, rewrite
from epifuse.ir.graph import keep


def with_bias(parsed: Parsed) -> Parsed:
    """The epilogue on accum + bias."""
    graph = remembered("bias", parsed.key, lambda: _biased(parsed.graph))
    return parsed.changed(graph=graph, parameters=("bias", *parsed.parameters), key=f"bias {parsed.key}")


def _biased(graph: Graph) -> Graph:

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op != "accum":
            return keep(old, args, builder)
        return builder.node("add", builder.node("accum"), builder.node("load", attr=Load("bias")))

    biased = rewrite(graph, rule)
    return replace(biased, inputs=("bias", *biased.inputs))
