"""An epilogue with a bias, which `linear` adds to the product before the epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from epifuse.frontend.python_function import Parsed
from epifuse.frontend.remembered import remembered
from epifuse.ir import Builder, Load, Node, rewrite
from epifuse.ir.graph import keep


def with_bias(parsed: Parsed) -> Parsed:
    """The epilogue applied to accum + bias. The operand `bias` becomes its first parameter."""
    return parsed.changed(**remembered("bias", parsed.key, lambda: _biased(parsed)))


def _biased(parsed: Parsed) -> dict[str, Any]:
    """The fields of `parsed` that change. The key is one of them, so that its string is made and hashed only once."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op != "accum":
            return keep(old, args, builder)
        return builder.node("add", builder.node("accum"), builder.node("load", attr=Load("bias")))

    graph = rewrite(parsed.graph, rule)
    parameters, key = ("bias", *parsed.parameters), f"bias {parsed.key}"
    return {"graph": replace(graph, inputs=("bias", *graph.inputs)), "parameters": parameters, "key": key}
