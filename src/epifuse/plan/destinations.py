"""Checks of where results go: shapes, dtypes, and which memory an output may share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from epifuse.base.dtypes import is_storable
from epifuse.base.errors import EpifuseError, fail
from epifuse.ir import Dims, Graph, Load, Output
from epifuse.ir.graph import topological
from epifuse.ir.types import Dim, dim_size, factors_of, shape_of
from epifuse.passes.spelling import reductions_under, spelled
from epifuse.request.checks import check_device, check_tensor
from epifuse.request.problem import Problem, TensorInfo


def check_output(output: Output, info: TensorInfo, graph: Graph, problem: Problem) -> None:
    """Raise unless a destination has the right shape, dtype and device, and no two elements share an address."""
    name = output.name
    check_device(f"output '{name}'", info, problem.a.device)
    if not is_storable(info.dtype):
        raise fail("output_dtype", None, name=name, dtype=info.dtype)
    want = shape_of(output.dims or (), problem.extents)
    if not _fits(info.shape, want, output, graph, problem):
        raise _misshapen(output, want, info.shape, graph, problem)
    if _overlaps_itself(info):
        raise fail("output_expanded", None, name=name)


def _misshapen(
    output: Output, want: tuple[int, ...], shape: tuple[int, ...], graph: Graph, problem: Problem
) -> EpifuseError:
    reductions = [spelled(node, problem) for node in reductions_under(output.node)]
    if graph.stages[output.node].kind != "finish" or not reductions:
        return fail("output_shape", None, name=output.name, want=want, shape=shape)
    shown = " and ".join(dict.fromkeys(f"{name}(x{dims})" for name, dims in reductions))
    accum = problem.accum_shape
    return fail("reduced_shape", None, name=output.name, reductions=shown, accum=accum, want=want, shape=shape)


def _fits(shape: tuple[int, ...], want: tuple[int, ...], output: Output, graph: Graph, problem: Problem) -> bool:
    """Whether a destination may have this shape.

    It is the one that torch gives. For a reduction it may also be the keepdim shape, with or without its leading ones.
    """
    if shape == want:
        return True
    axes = [factor.axis for dim in output.dims or () for factor in dim]
    if axes != sorted(axes) or any(len(dim) > 1 for dim in output.dims or ()):
        return False  # permuted or merged dims: elements would be written in another order than the shape says
    present = {*axes}
    # A reduction along an axis of extent 1 was removed before, so its output need not be finished after all tiles.
    if graph.stages[output.node].kind != "finish" and any(problem.extents[a] != 1 for a in {*"lmn"} - present):
        return False
    kept = tuple(problem.extents[axis] if axis in present else 1 for axis in ("lmn" if problem.batched else "mn"))
    if any(factor.size(problem.extents) != problem.extents[factor.axis] for factor in factors_of(output.dims or ())):
        return False  # only a part of an axis, which a reshape has cut
    return shape in [kept[start:] for start in range(len(kept)) if all(extent == 1 for extent in kept[:start])]


def _overlaps_itself(info: TensorInfo) -> bool:
    reach = 0
    for stride, extent in sorted(zip(info.strides, info.shape, strict=True)):
        if extent <= 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def check_described(out: Any, graph: Graph, problem: Problem) -> None:
    """Raise unless `out`, which only describes D, has the shape of the product or of the epilogue's output D."""
    check_tensor("out", out, torch.device(problem.a.device))
    made = next(shape_of(output.dims or (), problem.extents) for output in graph.outputs if output.name == "D")
    if tuple(out.shape) not in (made, problem.accum_shape):
        raise fail("out_shape", None, want=made, shape=tuple(out.shape))


class Placed(NamedTuple):
    """A tensor in memory. `address` is that of its first element in bytes, or None if it has no memory."""

    address: int | None
    info: TensorInfo


def check_overlaps(
    product: Mapping[str, Placed],
    operands: Mapping[str, Placed],
    outputs: Mapping[str, Placed],
    graph: Graph,
    problem: Problem,
) -> tuple[tuple[str, str], ...]:
    """The pairs (output, operand) that share memory. Raises `ArgumentError` for any other overlap of addresses.

    An output may share memory with an operand if each element is read only where it is written. `product` holds A and
    B by the caller's names for them.
    """
    inputs = [(name, value, False) for name, value in product.items()]
    inputs += [(name, value, True) for name, value in operands.items()]
    aliases: dict[str, str] = {}
    for name, placed in outputs.items():
        for other, value in outputs.items():
            if other != name and _touch(placed, value):
                raise fail("overlap", None, first=name, second=other)
        for other, value, may_alias in inputs:
            if not _touch(placed, value):
                continue
            if not may_alias or name in aliases or not _same_elements(name, placed, other, value, graph, problem):
                raise fail("overlap", None, first=name, second=other)
            aliases[name] = other
    return tuple(aliases.items())


def _same_elements(name: str, placed: Placed, other: str, value: Placed, graph: Graph, problem: Problem) -> bool:
    """Whether each element of the operand is read only where the output writes the same address.

    A reduced output is written after all tiles, but maybe before other reduced outputs that read the operand.
    """

    def long(dims: Dims | None) -> list[Dim]:
        return [dim for dim in dims or () if dim_size(dim, problem.extents) != 1]

    output = next(output for output in graph.outputs if output.name == name)
    loads = [load.attr for load in graph.loads() if isinstance(load.attr, Load) and load.attr.name == other]
    return (
        _geometry(placed) == _geometry(value)
        # An operand that does not vary over rows, columns or batches would be read again after it was written.
        and (
            is_written_once(output, problem)
            or (graph.stages[output.node].kind == "finish" and not is_read_beside(other, output, graph))
        )
        and all(long(load.dims) == long(output.dims) and not load.views for load in loads)
    )


def is_written_once(output: Output, problem: Problem) -> bool:
    """Whether no two tiles write the same element: the output varies over every axis whose extent is above 1."""
    return {axis for axis in "lmn" if problem.extents[axis] > 1} <= {f.along for f in factors_of(output.dims or ())}


def _geometry(placed: Placed) -> tuple[Any, ...]:
    """The address, dtype, extents and strides of a tensor, without dims of extent 1, whose strides do not matter."""
    dims = zip(placed.info.shape, placed.info.strides, strict=True)
    return placed.address, placed.info.dtype, *(dim for dim in dims if dim[0] != 1)


def is_read_beside(operand: str, output: Output, graph: Graph) -> bool:
    """Whether another output, or a value that is printed, depends on the operand."""
    roots = (*(other.node for other in graph.outputs if other != output), *graph.effects)
    return any(isinstance(node.attr, Load) and node.attr.name == operand for node in topological(roots))


_WORK: Any = 100_000  # NumPy's stubs allow -1 and 0 only; its documentation any number


def _touch(x: Placed, y: Placed) -> bool:
    """Whether two tensors share an address. If NumPy cannot tell within its limit of work, the answer is True."""
    if x.address is None or y.address is None or x.info.device != y.info.device:
        return False
    sizes = reach(x.info), reach(y.info)
    if 0 in sizes or x.address + sizes[0] <= y.address or y.address + sizes[1] <= x.address:
        return False
    try:
        return bool(np.shares_memory(np.asarray(_Geometry(x)), np.asarray(_Geometry(y)), max_work=_WORK))
    except np.exceptions.TooHardError:
        return True


def reach(info: TensorInfo) -> int:
    """The bytes from the first element to the end of the last one; 0 for an empty tensor."""
    if 0 in info.shape:
        return 0
    last = sum(stride * (extent - 1) for stride, extent in zip(info.strides, info.shape, strict=True))
    return (last + 1) * info.dtype.itemsize


class _Geometry:
    """An array interface with an address but no memory: NumPy compares addresses and strides and never reads."""

    def __init__(self, placed: Placed) -> None:
        size = placed.info.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (placed.address, False),
            "shape": placed.info.shape,
            "strides": tuple(stride * size for stride in placed.info.strides),
        }
