"""The bytes that fusing saves, compared with a product of its own and the loops that Inductor would run around it.

*Apart* means: the product is a kernel of its own, and Inductor computes the rest of the cone in its loops. *Fused*
means: the whole cone (see `cone`) is one kernel.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import ceil, inf
from typing import Any, NamedTuple

from torch.fx import Node as FxNode

from epifuse.base.target import Target
from epifuse.pytorch.cone import (
    PRODUCTS,
    Cone,
    bytes_of,
    dims_of,
    elements_of,
    is_cast,
    is_drawn,
    is_picked_result,
    is_reduction,
    is_view,
    is_work,
    name_of,
    tensors_of,
)

_PRODUCT_LIKE = ("convolution", "convolution_backward", "_scaled_mm", "_int_mm", "_grouped_mm")


def has_loop(node: FxNode) -> bool:
    """Whether Inductor computes `node` in a loop that it fuses with those of neighbouring nodes.

    A value that passes between such nodes need not be stored.
    """
    from torch._inductor.lowering import fallbacks, lowerings  # already imported: the pass runs inside Inductor

    if node.op != "call_function" or node.target in PRODUCTS or name_of(node) in _PRODUCT_LIKE:
        return False
    target: Any = node.target
    return is_picked_result(node) or (target in lowerings and target not in fallbacks)


class Moved(NamedTuple):
    """Bytes that move around a product, both apart and fused.

    `product` is the size of the product's result, `operands` and `outputs` are what the epilogue reads and writes.
    `loops_apart` and `loops_fused` are what Inductor's loops move if the product is apart and if it is fused.

    Fusing removes three parts of Inductor's work: `kernels` launches; the `instructions` of the loop around the
    product, which overlap that loop's bytes on a GPU; and `bytes_reread_for_sums`, the bytes that a later kernel reads
    again to add up columns. `drawn` are instructions for random numbers in that loop; when fused, they run in a loop of
    their own ahead of the product.
    """

    product: int
    operands: int
    outputs: int
    loops_apart: int
    loops_fused: int
    kernels: int
    bytes_reread_for_sums: int = 0
    instructions: int = 0
    drawn: int = 0

    @property
    def saved(self) -> int:
        """Bytes that move apart and not fused; negative if fusing moves more."""
        fused = self.operands + self.outputs + self.loops_fused
        return self.product + self.loops_apart + self.bytes_reread_for_sums - fused


def moved(cone: Cone, target: Target) -> Moved:
    """The bytes that move if `cone` is one kernel (fused), and if it is not (apart).

    Apart: the product is written, and the loop around it reads it again. A value that only other loops read is computed
    in these loops. Sums along M that Inductor splits are kernels of their own. Fused: every output is written, and the
    loops that need it read it. Operands are read in both cases. An operand that only the cone needs has to be written
    too when it is fused; apart, the loop around the product would compute it without storing it.
    """
    product, outputs = bytes_of(cone.product), cone.outputs
    operands = sum(map(bytes_of, cone.operands))
    sums = [node for node in cone.inside if is_own_kernel(node)]
    most = _WHOLE * target.processor.multiprocessors if target.device == "cuda" else inf
    split = [node for node in sums if elements_of(node) < most]
    written = [node for node in outputs if node is not cone.product and not _is_of(node, sums, cone)]
    stored = {node for node in written if not all(map(has_loop, cone.readers(node)))}
    is_met = any(has_loop(reader) for node in outputs for reader in cone.readers(node))
    has_own = bool(written) or len(split) < len(sums)  # a loop around the product
    apart, again = sum(map(bytes_of, stored)), 0
    if has_own:
        apart += product + operands
    if split:
        bases = dict.fromkeys(_base(node.all_input_nodes[0], cone) for node in split)
        anew = [] if all(base in stored for base in bases) else [product + operands]
        again = sum([*anew, *(bytes_of(base) for base in bases if base in stored)])
    # The loop adds up a sum of all elements itself. That takes as long as if it read everything twice.
    behind = again if has_own and any(map(sums_columns, split)) else 0
    fused = sum(bytes_of(each) for each in dict.fromkeys(map(_source, cone.operands)) if _is_only_ours(each, cone))
    fused += sum(bytes_of(node) for node in outputs if any(map(has_loop, cone.readers(node))))
    # Fusing does not remove the loop around the product if it also computes something outside the cone.
    kernels = (has_own and not is_met) + _KERNELS_OF_SUMS * bool(split)
    apart += again - behind
    stores = sum(map(bytes_of, outputs))
    drawn = (
        (_IN_LOOPS.get(name_of(node), 1) + _AROUND) * elements_of(node) for node in drawn_ahead(cone) if is_drawn(node)
    )
    return Moved(product, operands, stores, apart, fused, kernels, behind, _instructions(cone), sum(drawn))


_WHOLE = 64
"""Inductor does not split a reduction with at least this many sums for each multiprocessor (`Reduction.num_splits`).
Then the loop that stores the summed values adds them up as well."""
_KERNELS_OF_SUMS = 2
"""The kernels of a reduction that Inductor splits: one for the partial sums, one that adds these."""

_IN_LOOPS = {
    **dict.fromkeys(("div", "reciprocal", "exp"), 9),
    "sigmoid": 12,
    "tanh": 21,
    **dict.fromkeys(("expm1", "log", "log2", "log10"), 25),
    **dict.fromkeys(("erf", "log1p"), 28),
    "inductor_random": 80,
}
"""Instructions for each value, for operations that take more than one in the machine code of Inductor's loops
(loop_instructions.json). That of a random number comes from the time of a loop that draws 16384 x 1024 numbers and
stores a mask: 51 us on an H200, as long as 87 instructions a value (model_time_gpt2_h200.json)."""
_AROUND = 6
"""Further instructions of a loop for each value: addresses, loads, conversions and stores (a cast, in the same
file)."""


_IN_REGISTERS, _BLOCK = 1024, 2048
"""Inductor holds a row of at most 1024 values in registers (`should_use_persistent_reduction`), in a number of lanes
that is a power of two. It walks along a longer row in blocks of 2048, twice: once to reduce it, and once for what
follows. Its softmax takes 70 us for 12608 rows of 1920 values on an H100 (sites_h100_second.json, apart less product),
as long as 80 instructions a value; in registers it takes 30."""


def _instructions(cone: Cone) -> int:
    total = _AROUND * elements_of(cone.product)
    for node in cone.body:
        if node is not cone.product and is_work(node):
            total += _IN_LOOPS.get(name_of(node), 1) * max(map(elements_of, [node, *node.all_input_nodes]))
    row = max((_row_of(node) for node in cone.inside if is_reduction(node) and _along_last(node)), default=1)
    lanes = min(_BLOCK, 1 << (row - 1).bit_length())
    return total * (lanes * ceil(row / lanes)) // row * (1 + (row > _IN_REGISTERS))


def drawn_ahead(cone: Cone) -> dict[FxNode, None]:
    """The nodes outside the cone that draw random numbers for it, with what a loop computes from them for it alone.

    An example is a dropout mask that the backward pass reads too. Without the cone, the loop around the product would
    draw the numbers.
    """
    body, found, waiting = cone.body, dict[FxNode, None](), [*cone.operands]
    while waiting:
        node = waiting.pop()
        if node not in found and (is_view(node) or _is_only_for(node, {**body, **found})):
            found[node] = None
            waiting += node.all_input_nodes
    return found if any(map(is_drawn, found)) else {}


def _is_only_for(node: FxNode, loops: Container[FxNode]) -> bool:
    """Whether a loop computes `node`, and every loop that reads it is one of `loops`."""
    return has_loop(node) and not any(has_loop(user) and user not in loops for user in node.users)


def _is_of(node: FxNode, sums: Iterable[FxNode], cone: Cone) -> bool:
    """Whether `node` is one of `sums`, or is smaller than the product and computed in the cone only from these."""
    if node in sums:
        return True
    inputs = [each for each in node.all_input_nodes if each in cone.inside]
    return bool(inputs) and bytes_of(node) < bytes_of(cone.product) and all(_is_of(x, sums, cone) for x in inputs)


def is_own_kernel(node: FxNode) -> bool:
    """Whether `node` is a reduction along M, which Inductor computes in a kernel of its own."""
    return is_reduction(node) and not _along_last(node)


def sums_columns(node: FxNode) -> bool:
    """Whether `node` reduces along M and has one result for each column, not one number."""
    return is_own_kernel(node) and elements_of(node) > 1


def _source(node: FxNode) -> FxNode:
    """The node that holds the data of a view; any other node itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_only_ours(node: FxNode, cone: Cone) -> bool:
    """Whether `node` is stored for the cone only: a loop computes it, and so does each reader outside the cone."""
    if not has_loop(node):
        return False
    stack, body = list(node.users), cone.body
    while stack:
        user = stack.pop()
        if is_view(user) and user not in body:
            stack += user.users
        elif user not in body and not has_loop(user):
            return False
    return True


def _along_last(node: FxNode) -> bool:
    return dims_of(node) == (tensors_of(node.all_input_nodes[0])[0].dim() - 1,)


def _row_of(node: FxNode) -> int:
    """How many values a reduction reduces to each of its results."""
    return elements_of(node.all_input_nodes[0]) // elements_of(node)


def peel(cone: Cone) -> None:
    """Remove a value from the cone if storing it costs more bytes than the loops of its readers would read instead.

    Without this, fusing moved 7 % more bytes than Inductor on Llama: q * cos was stored in float32 beside q, and casts
    to a wider dtype were stored for the next product.
    """
    while (node := next((node for node in reversed(cone.inside) if _is_peeled(node, cone)), None)) is not None:
        for part in list(node.users):
            if is_picked_result(part):
                cone.inside.pop(part, None)
        cone.drop(node)


def _is_peeled(node: FxNode, cone: Cone) -> bool:
    if node is cone.product or not is_work(node) or any(user in cone.inside for user in _work_users(node, cone)):
        return False
    size, readers = bytes_of(node), list(cone.readers(node))
    if any(is_picked_result(user) for user in node.users):
        readers = [reader for part in node.users for reader in cone.readers(part)]
    widened = is_cast(node) and size > bytes_of(node.all_input_nodes[0])
    if widened and all(map(has_loop, readers)):
        return True  # the loops that read it can widen it themselves
    keep = size + (size if any(map(has_loop, readers)) else 0)
    give = size if not all(map(has_loop, readers)) else 0
    for each in {_base(each, cone) for each in node.all_input_nodes if each in cone.inside}:
        others = [reader for reader in cone.readers(each) if reader is not node]
        if not others:
            give += 2 * bytes_of(each)  # without the node, `each` is stored for its sake and read back
        elif not any(map(has_loop, others)):
            give += bytes_of(each)
    return give < keep


def _work_users(node: FxNode, cone: Cone) -> list[FxNode]:
    """The nodes in the cone that compute with `node`, directly or through views and parts of several results."""
    found = []
    for user in node.users:
        if user in cone.inside:
            found += _work_users(user, cone) if is_view(user) or is_picked_result(user) else [user]
    return found


def _base(node: FxNode, cone: Cone) -> FxNode:
    while is_view(node) and node.all_input_nodes[0] in cone.inside:
        node = node.all_input_nodes[0]
    return node
