"""The key that distinguishes parses: a digest of the graph as written, with its names and all its places."""

from __future__ import annotations

import hashlib

from epifuse.base.errors import Loc
from epifuse.ir import Graph
from epifuse.ir.graph import topological


def key_of(graph: Graph, *further: object) -> str:
    """SHA-256 of the nodes in order, their places, the names of operands and outputs, and the text of `further`."""
    calls: dict[int, str] = {}
    numbers = {node: index for index, node in enumerate(topological((*graph.roots, *graph.checked)))}
    lines = [repr(further), repr(graph.inputs)]
    for node in numbers:
        places = " ".join(_place(loc, calls) for loc in graph.locs.get(node, ()))
        lines.append(f"{node.op} {node.attr!r} {[numbers[arg] for arg in node.args]} {places}")
    lines += [f"out {output.name} {numbers[output.node]}" for output in graph.outputs]
    lines += [f"effect {numbers[effect]}" for effect in graph.effects]
    lines += [f"checked {numbers[node]}" for node in graph.checked]
    return _sha("\n".join(lines))


def _place(loc: Loc, calls: dict[int, str]) -> str:
    """A digest of a place and of the calls that led there. `calls` keeps the digests of calls, by the id of the place:
    many places share the same calls, and there may be many of them."""
    path, place = [loc], loc.via
    while place is not None and id(place) not in calls:
        path.append(place)
        place = place.via
    above = "" if place is None else calls[id(place)]
    for place in reversed(path):
        above = _sha(f"{place[:-1]!r} {above}")
        calls[id(place)] = above
    return above


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
