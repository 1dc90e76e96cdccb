"""Operands and outputs as tensors (M, N, L) on the device, and access to their elements."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from epifuse.providers.cutedsl.ways import Access


def whole(tensor: Any, access: Access, swapped: bool) -> Any:
    """Return a tensor as (M, N, L) of the kernel. An axis that a reshape cut becomes one mode of several pieces."""
    if not any(access.pieces):
        return with_batches(exchanged(tensor) if swapped else tensor)
    shape, stride, first = [], [], 0
    for inner in access.pieces:
        last = first + len(inner)
        shape.append((*inner, tensor.shape[last]) if inner else tensor.shape[last])
        stride.append(tensor.stride[first : last + 1] if inner else tensor.stride[last])
        first = last + 1
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


def exchanged(tensor: Any) -> Any:
    """The transposed matrix, or matrices."""
    order = [1, 0, 2][: cute.rank(tensor)]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))


def with_batches(tensor: Any) -> Any:
    """Return a matrix as a batch of one matrix, with a stride that TMA accepts. Batches are returned unchanged."""
    if cute.rank(tensor) == 3:
        return tensor
    long = 0 if cute.is_static(tensor.stride[1]) else 1
    batch = Int64(tensor.shape[long]) * tensor.stride[long]
    divisor = 128 // tensor.element_type.width
    shape, stride = (*tensor.shape, Int32(1)), (*tensor.stride, cute.assume(batch, divby=divisor))
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def coordinate(factors: Any, place: Any, shape: Any) -> Any:
    """Return the coordinate of a `place` (m, n, l) along a dim that consists of `factors`, outermost first."""
    found = Int32(0)
    extents = dict(zip("mnl", shape, strict=True))
    for factor in factors:
        own = dict(zip("mnl", place, strict=True))[factor.axis]
        own = own // factor.stride if factor.stride > 1 else own
        if factor.extent is not None:
            own, extent = own % factor.extent, factor.extent
        else:
            extent = extents[factor.axis] // factor.stride
        found = own if factor is factors[0] else found * extent + own
    return found


def element(tensor: Any, access: Access, row: Any, column: Any, batch: Any) -> Any:
    """Return a tensor of the element at a place, or of the two columns from there on if the access is of `pairs`."""
    pointer = tensor.iterator + cute.crd2idx((row, column, batch), tensor.layout)
    return cute.make_tensor(pointer.align(access.bytes_at_once), cute.make_layout(2 if access.pairs else 1))


def under(fragment: Any, shape: Any) -> Any:
    """Return the registers of a fragment as a tensor of another shape, in the same order."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(shape))


@cute.jit
def store_inside(values: cute.Tensor, to: cute.Tensor, place: tuple, limits: list):
    """Store `values` if each coordinate of `place` is below its limit."""
    if cute.elem_less(place, tuple(limits)):
        cute.autovec_copy(values, to)
