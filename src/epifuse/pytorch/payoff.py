"""What fusing a product saves, beside a product and the loops that PyTorch's compiler would run around it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node as FxNode

from epifuse.plan import Plan
from epifuse.pytorch.cone import (
    PRODUCTS,
    Cone,
    bytes_of,
    dims_of,
    elements_of,
    is_cast,
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


def bytes_saved(cone: Cone) -> int:
    """Bytes that do not travel when the cone is one kernel.

    Apart, the product is written and read again by the loop around it, and once more by each reduction along M, which
    is a kernel of its own; what only other loops read is computed within them. Fused, every output is written, and
    read by those loops. Operands are read either way, and written where a loop would else compute them on its way.
    """
    product, outputs = cone.product, cone.outputs
    sums = [node for node in cone.inside if is_reduction(node) and not _along_last(node)]
    apart = 2 * bytes_of(product) + sum(bytes_of(node.all_input_nodes[0]) for node in sums)
    fused = 0
    for node in outputs:
        readers, size = list(cone.readers(node)), bytes_of(node)
        if node is not product and not all(map(has_loop, readers)):
            apart += size
        fused += size + (size if any(map(has_loop, readers)) else 0)
    fused += sum(bytes_of(each) for each in dict.fromkeys(map(_source, cone.operands)) if _is_only_ours(each, cone))
    return apart - fused


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


class Site(NamedTuple):
    """What the prediction depends on: the device's type, bytes saved, operations of the product, bytes of an element
    of A, whether values need whole rows, and the cost of the plan where there is one."""

    device: str
    bytes_saved: int
    operations: float
    item_bytes: int
    needs_rows: bool
    cost: float | None = None


def site_of(cone: Cone, plan: Plan | None = None) -> Site:
    """What the prediction for `cone` depends on."""
    value = tensors_of(cone.factors[0])[0]
    operations = 2.0 * elements_of(cone.product) * value.shape[-1]
    cost = None if plan is None else plan.allocation.cost
    return Site(value.device.type, bytes_saved(cone), operations, value.element_size(), needs_rows(cone), cost)


def needs_rows(cone: Cone) -> bool:
    """Whether a value of the product's size reads a reduction along rows."""
    reduced: set[FxNode] = set()
    for node in cone.inside:
        below = any(each in reduced for each in node.all_input_nodes)
        is_full = below and elements_of(node) >= elements_of(cone.product)
        if is_work(node) and (is_full or name_of(node) in ("_softmax", "_log_softmax")):
            return True
        if is_reduction(node) or below:
            reduced.add(node)
    return False


_CPU_BYTES_A_SECOND = 10e9
_CPU_CALL = 20e-6
_GPU_BYTES_A_SECOND = 4.0e12
_GPU_OPERATIONS_A_SECOND = 700e12
_MULTIPROCESSORS = 132
_GPU_CALL = 1e-6
_WHOLE_ROWS = 0.32
_AS_GOOD = 1.25


def seconds_gained(site: Site) -> float:
    """The predicted time that fusing saves; negative where it loses.

    On the CPU: bytes saved at 10 GB/s, less 20 us for what a call of ours costs the host more than one of MKL's: the
    dispatcher's way through Python (12 us), and the panel kernel's operations. Both are assumed, not fitted.

    On a GPU: bytes saved at the 4 TB/s that kernels reach on an H200, less a microsecond, and less what the product
    takes longer. Where values need whole rows that is a third of it: with layer norms of N = 1024 in clusters the
    products of a BERT-large step took 8.6 ms and cuBLAS's 6.5, while elementwise work and column sums gained what they
    saved (13.1 to 12.6 ms a step of four layers). And it is what the plan takes beyond 1.25 of the product at the full
    rate: a gradient of a weight has few tiles and a long K, which cuBLAS splits and we do not. A plan's cost counts
    multiply-adds of 16 bits on one multiprocessor. That factor is arithmetic, not a measurement.
    """
    if site.device == "cpu":
        return site.bytes_saved / _CPU_BYTES_A_SECOND - _CPU_CALL
    product = site.operations * site.item_bytes / 2 / _GPU_OPERATIONS_A_SECOND
    planned = 0.0 if site.cost is None else 2 * site.cost * _MULTIPROCESSORS / _GPU_OPERATIONS_A_SECOND
    longer = max(0.0, planned - _AS_GOOD * product) + (_WHOLE_ROWS * product if site.needs_rows else 0.0)
    return site.bytes_saved / _GPU_BYTES_A_SECOND - _GPU_CALL - longer
