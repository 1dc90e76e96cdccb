"""`debug_print` on a GPU: its value is stored like an output, and the host prints it after the launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from epifuse.ir import Graph, Node, Output
from epifuse.ir.types import Dims, Factor
from epifuse.providers.cpu.space import Space

_DTYPES = {"float": torch.float32, "int64": torch.int64, "int32": torch.int32, "mask": torch.bool}


class Print(NamedTuple):
    """One `debug_print`: the name of the output that holds its value, which no user can write, and its format."""

    output: str
    format: str


def with_prints(graph: Graph) -> tuple[Graph, tuple[Print, ...], Mapping[str, torch.dtype]]:
    """The graph with its effects as outputs, the `Print`s, and the dtypes of these outputs by name."""
    prints = tuple(Print(f"@{number}", str(node.attr)) for number, node in enumerate(graph.effects))
    sources = [node.args[0] for node in graph.effects]
    factors = Space.of(graph, {}).factors
    outputs = [Output(one.output, x, _dims(x, graph, factors)) for one, x in zip(prints, sources, strict=True)]
    dtypes = {one.output: _DTYPES[graph.types[x].kind] for one, x in zip(prints, sources, strict=True)}
    return replace(graph, outputs=(*graph.outputs, *outputs), effects=()), prints, dtypes


def _dims(node: Node, graph: Graph, factors: tuple[Factor, ...]) -> Dims:
    """The dims of a printed value, as the CPU kernel prints it: one for each factor.

    A factor of the batch axis has a dim only if the value varies over batches."""
    present = graph.types[node].factors
    batched = "l" in graph.types[node].axes
    return tuple((f,) if f in present else () for f in factors if f.axis != "l" or batched)
