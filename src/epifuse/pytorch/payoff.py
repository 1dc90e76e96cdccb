"""What fusing a product saves, beside a product and the loops that PyTorch's compiler would run around it."""

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
    is_part,
    is_reduction,
    is_view,
    is_work,
    name_of,
    tensors_of,
)

_PRODUCT_LIKE = ("convolution", "convolution_backward", "_scaled_mm", "_int_mm", "_grouped_mm")


def has_loop(node: FxNode) -> bool:
    """Whether Inductor computes `node` in a loop that it fuses with its neighbours', so that what the node reads of one
    need not be stored."""
    from torch._inductor.lowering import fallbacks, lowerings  # imported by now: the pass runs inside Inductor

    if node.op != "call_function" or node.target in PRODUCTS or name_of(node) in _PRODUCT_LIKE:
        return False
    target: Any = node.target
    return is_part(node) or (target in lowerings and target not in fallbacks)


class Moved(NamedTuple):
    """Bytes around a product: what it is itself, what the epilogue reads and writes, and what Inductor's loops move
    where the product is apart and where it is fused.

    Fusing removes three things of Inductor's: so many `kernels`; the `instructions` of the loop around the product,
    which overlap its bytes on a GPU; and `sums`, the bytes that a later kernel reads again to add up columns.
    `drawn` are instructions of that loop too; fusing leaves them in a loop of their own, ahead of the product.
    """

    product: int
    operands: int
    outputs: int
    loops_apart: int
    loops_fused: int
    kernels: int
    sums: int = 0
    instructions: int = 0
    drawn: int = 0

    @property
    def saved(self) -> int:
        """Bytes that do not travel when the cone is one kernel."""
        return self.product + self.loops_apart + self.sums - (self.operands + self.outputs + self.loops_fused)


def moved(cone: Cone, target: Target) -> Moved:
    """Bytes that move where `cone` is one kernel, and where it is not.

    Apart: the product is written, and the loop around it reads it again. A value that only other loops read is computed
    in these loops. Sums along M that Inductor splits are kernels of their own. Fused: every output is written, and the
    loops that need it read it. Operands are read in both cases. An operand that only the cone needs is also written:
    apart, the loop around the product would compute it without storing it.
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
    # A sum of everything is added up by the loop, which takes as long as if it read all twice.
    behind = again if has_own and any(map(sums_columns, split)) else 0
    fused = sum(bytes_of(each) for each in dict.fromkeys(map(_source, cone.operands)) if _is_only_ours(each, cone))
    fused += sum(bytes_of(node) for node in outputs if any(map(has_loop, cone.readers(node))))
    # The loop around the product is there in any case where it computes something else as well.
    kernels = (has_own and not is_met) + _KERNELS_OF_SUMS * bool(split)
    apart += again - behind
    stores = sum(map(bytes_of, outputs))
    drawn = (
        (_IN_LOOPS.get(name_of(node), 1) + _AROUND) * elements_of(node) for node in drawn_ahead(cone) if is_drawn(node)
    )
    return Moved(product, operands, stores, apart, fused, kernels, behind, _instructions(cone), sum(drawn))


_WHOLE = 64
"""Sums for each multiprocessor from which on Inductor does not split them (`Reduction.num_splits`): the loop that
stores what is summed adds it up on its way."""
_KERNELS_OF_SUMS = 2
"""Where it does: one kernel for the parts, one for the parts' sum."""

_IN_LOOPS = {
    **dict.fromkeys(("div", "reciprocal", "exp"), 9),
    "sigmoid": 12,
    "tanh": 21,
    **dict.fromkeys(("expm1", "log", "log2", "log10"), 25),
    **dict.fromkeys(("erf", "log1p"), 28),
    "inductor_random": 80,
}
"""Instructions for a value, of what takes more than one in the machine code of Inductor's loops
(loop_instructions.json). A random number by the time of a loop that draws 16384 x 1024 of them and stores a mask: 51 us
on an H200, as long as 87 instructions a value (model_time_gpt2_h200.json)."""
_AROUND = 6
"""Of a loop around them, for each value: addresses, loads, conversions and stores (a cast, in the same file)."""


_IN_REGISTERS, _BLOCK = 1024, 2048
"""Inductor holds a row of at most so many values in registers (`should_use_persistent_reduction`), in lanes whose
number is a power of two. It walks along a longer one in blocks, twice: for what is reduced, and for what follows. Its
softmax takes 70 us for 12608 rows of 1920 values on an H100 (sites_h100_second.json, apart less product), as long as 80
instructions a value; in registers it takes 30."""


def _instructions(cone: Cone) -> int:
    total = _AROUND * elements_of(cone.product)
    for node in cone.body:
        if node is not cone.product and is_work(node):
            total += _IN_LOOPS.get(name_of(node), 1) * max(map(elements_of, [node, *node.all_input_nodes]))
    row = max((_row_of(node) for node in cone.inside if is_reduction(node) and _along_last(node)), default=1)
    lanes = min(_BLOCK, 1 << (row - 1).bit_length())
    return total * (lanes * ceil(row / lanes)) // row * (1 + (row > _IN_REGISTERS))


def drawn_ahead(cone: Cone) -> dict[FxNode, None]:
    """Random numbers that are drawn for the cone outside it, and what a loop makes of them: a mask that the backward
    pass reads too. Without the cone, the loop around the product would draw them."""
    body, found, waiting = cone.body, dict[FxNode, None](), [*cone.operands]
    while waiting:
        node = waiting.pop()
        if node not in found and (is_view(node) or _is_only_for(node, {**body, **found})):
            found[node] = None
            waiting += node.all_input_nodes
    return found if any(map(is_drawn, found)) else {}


def _is_only_for(node: FxNode, loops: Container[FxNode]) -> bool:
    """Whether a loop computes the value, and no loop but these reads it."""
    return has_loop(node) and not any(has_loop(user) and user not in loops for user in node.users)


def _is_of(node: FxNode, sums: Iterable[FxNode], cone: Cone) -> bool:
    """Whether a value is a reduction along M, or computed from one."""
    if node in sums:
        return True
    inputs = [each for each in node.all_input_nodes if each in cone.inside]
    return bool(inputs) and bytes_of(node) < bytes_of(cone.product) and all(_is_of(x, sums, cone) for x in inputs)


def is_own_kernel(node: FxNode) -> bool:
    """Whether Inductor reduces in a kernel that computes nothing else: along M."""
    return is_reduction(node) and not _along_last(node)


def sums_columns(node: FxNode) -> bool:
    """Whether it reduces along M, and has a result for each column."""
    return is_own_kernel(node) and elements_of(node) > 1


def _source(node: FxNode) -> FxNode:
    """What a view is of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_only_ours(node: FxNode, cone: Cone) -> bool:
    """Whether the value is stored for the cone alone: loops compute it and all others that read it."""
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
    """How many values a reduction along the last dim takes for each of its results."""
    return elements_of(node.all_input_nodes[0]) // elements_of(node)


def peel(cone: Cone) -> None:
    """Give back what costs more to store here than the loop around its users would read in its place.

    Without this, fusing moved 7 % more bytes than Inductor on Llama: q * cos in float32, stored beside q, and widened
    casts stored for the next product.
    """
    while (node := next((node for node in reversed(cone.inside) if _is_peeled(node, cone)), None)) is not None:
        for part in list(node.users):
            if is_part(part):
                cone.inside.pop(part, None)
        cone.drop(node)


def _is_peeled(node: FxNode, cone: Cone) -> bool:
    if node is cone.product or not is_work(node) or any(user in cone.inside for user in _work_users(node, cone)):
        return False
    size, readers = bytes_of(node), list(cone.readers(node))
    if any(is_part(user) for user in node.users):
        readers = [reader for part in node.users for reader in cone.readers(part)]
    widened = is_cast(node) and size > bytes_of(node.all_input_nodes[0])
    if widened and all(map(has_loop, readers)):
        return True  # who reads it widens it on the way
    keep = size + (size if any(map(has_loop, readers)) else 0)
    give = size if not all(map(has_loop, readers)) else 0
    for each in {_base(each, cone) for each in node.all_input_nodes if each in cone.inside}:
        others = [reader for reader in cone.readers(each) if reader is not node]
        if not others:
            give += 2 * bytes_of(each)  # stored for this one, and read
        elif not any(map(has_loop, others)):
            give += bytes_of(each)
    return give < keep


def _work_users(node: FxNode, cone: Cone) -> list[FxNode]:
    """Who computes with a value inside the cone, views and parts looked through."""
    found = []
    for user in node.users:
        if user in cone.inside:
            found += _work_users(user, cone) if is_view(user) or is_part(user) else [user]
    return found


def _base(node: FxNode, cone: Cone) -> FxNode:
    while is_view(node) and node.all_input_nodes[0] in cone.inside:
        node = node.all_input_nodes[0]
    return node
