"""For the report: what reads a product or its epilogue and stays outside, and why."""

from __future__ import annotations

from collections.abc import Container

from torch.fx import Node as FxNode

from epifuse.pytorch.cone import PRODUCTS, Cone, Refusals, below, is_view, name_of, refused
from epifuse.pytorch.leaves import MOST_OUTPUTS

_COSTS = "fusing it would store more than it saves, or no kernel holds it as well"
_LEAVES = {f"fused{count}" for count in range(1, MOST_OUTPUTS + 1)}


def why_nothing(product: FxNode, known: Refusals) -> str:
    """Why no cone holds more than `product`: what reads it, or why the first reader stays outside."""
    cone = Cone(product, {product: None})
    every = [*cone.readers(product)]
    readers = [reader for reader in every if reader.op == "call_function"]
    if not readers:
        return "nothing in its graph reads it"
    if all(map(_is_product, readers)):
        returned = "" if len(readers) == len(every) else ", and its graph returns it"
        return f"only other products read it, or their epilogues{returned}"
    dependent = below(product)
    reasons = ((each, _why_outside(each, cone, known, dependent)) for each in readers if not _is_product(each))
    first = next((f" ({name_of(each)}: {why})" for each, why in reasons if why is not None), "")
    return f"nothing beside it is in the language or saves bytes{first}"


def neighbours(cone: Cone, known: Refusals) -> tuple[tuple[str, str], ...]:
    """The operations that read the cone's outputs and were not taken in, by name, each with the reason."""
    found: dict[str, str] = {}
    dependent = below(cone.product)
    for output in cone.outputs:
        for reader in cone.readers(output):
            if reader.op == "call_function" and not _is_product(reader) and name_of(reader) not in found:
                found[name_of(reader)] = _why_outside(reader, cone, known, dependent) or _COSTS
    return tuple(found.items())


def _why_outside(reader: FxNode, cone: Cone, known: Refusals, dependent: Container[FxNode]) -> str | None:
    """Why `cone` cannot hold the reader of one of its outputs, or None if it could. `dependent` are the nodes `below`
    the product."""
    if (why := refused(reader, cone.product, known)) is not None:
        return why
    for read in reader.all_input_nodes:
        while is_view(read) and read not in cone.inside:
            read = read.all_input_nodes[0]
        if read in dependent and read not in cone.inside:
            return f"it also reads {name_of(read)}, which is computed of the product and stays outside"
    return None


def _is_product(node: FxNode) -> bool:
    """Whether `node` is a product or a leaf, which is a product with an epilogue."""
    return node.target in PRODUCTS or name_of(node) in _LEAVES
