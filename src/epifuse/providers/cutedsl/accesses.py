"""Which way each operand and output travels. Imports no cutlass, so that planning needs none."""

from __future__ import annotations

from dataclasses import replace

import torch

from epifuse.ir import Graph, Load, Node, Output
from epifuse.ir.types import Dims
from epifuse.problem import Problem, TensorInfo
from epifuse.providers.cpu.space import viewed
from epifuse.providers.cutedsl.budget import fit
from epifuse.providers.cutedsl.partials import is_ragged, reductions_of, tile_nodes
from epifuse.providers.cutedsl.precision import accuracies
from epifuse.providers.cutedsl.program import Access, Design, Program

ALIGNMENT = 16  # bytes: TMA's rule for strides and bases
_STAGED = (torch.float32, torch.float16, torch.bfloat16)
_VECTOR_WAYS: dict[frozenset[str], str] = {frozenset("n"): "row", frozenset("m"): "column", frozenset(): "scalar"}


def arrange(graph: Graph, problem: Problem, design: Design) -> tuple[Program, Design] | None:
    """Program and design with its stages, or None where the design leaves A and B too little shared memory.

    What does not fit shared memory goes direct, operands and outputs in turn, the last first.
    """
    stores = [_store(output, graph, problem) for output in graph.outputs]
    in_tiles = set(tile_nodes(graph, tuple(stores)))
    loads = [(node, _load(node, graph, problem, late=node not in in_tiles)) for node in graph.loads()]
    while True:
        found = fit(design, tuple(a for _, a in loads), tuple(stores), problem.target.shared_memory)
        if found is not None:
            exactness = accuracies(graph, dict(problem.dtypes), fast_math=problem.constraints.fast_math)
            # Only reductions ask, and a kernel for each answer is one kernel more.
            ragged = bool(reductions_of(graph)) and is_ragged(design, problem.extents["m"], problem.extents["n"])
            return Program(graph, tuple(loads), tuple(stores), exactness, ragged), found
        staged_loads = [i for i, (_, access) in enumerate(loads) if access.way == "tile"]
        staged_stores = [i for i, access in enumerate(stores) if access.way == "tile"]
        if not staged_loads and not staged_stores:
            return None
        if len(staged_loads) >= len(staged_stores):
            node, access = loads[staged_loads[-1]]
            loads[staged_loads[-1]] = node, replace(access, way="direct")
        else:
            stores[staged_stores[-1]] = replace(stores[staged_stores[-1]], way="direct")


def _load(node: Node, graph: Graph, problem: Problem, *, late: bool) -> Access:
    assert isinstance(node.attr, Load)
    name, axes = node.attr.name, graph.types[node].axes
    info = problem.by_name.get(name)
    if not isinstance(info, TensorInfo):
        return Access(name, "number")
    if late:
        return Access(name, "finish", axes, info.dtype)
    if (way := _VECTOR_WAYS.get(axes - {"l"})) is not None:
        return Access(name, way, axes, info.dtype)  # type: ignore[arg-type]
    return _tile(name, _after_views(info, node.attr), node.attr.dims or (), axes)


def _after_views(info: TensorInfo, load: Load) -> TensorInfo:
    if not load.views:
        return info
    view = viewed(torch.empty_strided(info.shape, info.strides, device="meta"), load)
    return replace(info, shape=tuple(view.shape), strides=tuple(view.stride()))


def _store(output: Output, graph: Graph, problem: Problem) -> Access:
    info = dict(problem.outputs)[output.name]
    dtype = dict(problem.dtypes)[output.name]
    dims = output.dims or ()
    if graph.stages[output.node].kind == "finish":
        return Access(output.name, "finish", graph.types[output.node].axes, dtype)
    if info is None:
        shape = tuple(problem.extents[dim[0].axis] if dim else 1 for dim in dims)
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        info = TensorInfo(shape, tuple(strides), dtype, problem.a.device)
    found = _tile(output.name, info, dims, frozenset("lmn"))
    line = problem.extents["n" if found.by_rows else "m"] * dtype.itemsize
    # TMA writes whole granules of 16 bytes: a result of one float32 was written with what lies behind it.
    return found if line % ALIGNMENT == 0 else replace(found, way="direct")


def _tile(name: str, info: TensorInfo, dims: Dims, axes: frozenset[str]) -> Access:
    """By TMA where it can address the tensor, else direct."""
    strides = {dim[0].axis: stride for dim, stride in zip(dims, info.strides, strict=True) if len(dim) == 1}
    extents = {dim[0].axis: size for dim, size in zip(dims, info.shape, strict=True) if len(dim) == 1}
    direct = Access(name, "direct", axes, info.dtype)
    if info.dtype not in _STAGED or not info.aligned or not {"m", "n"} <= set(strides):
        return direct
    inner = next((axis for axis in "nm" if strides[axis] == 1), None)
    if inner is None or any(
        extents[axis] > 1 and (stride <= 0 or stride * info.dtype.itemsize % ALIGNMENT)
        for axis, stride in strides.items()
        if axis != inner
    ):
        return direct
    return Access(name, "tile", axes, info.dtype, by_rows=inner == "n")
