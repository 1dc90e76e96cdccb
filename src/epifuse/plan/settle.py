"""Settling a call: all checks, then the problem and the structure of its epilogue, which are what planning needs.

Everything comes from the call's signature. No data is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple, cast

import torch

from epifuse.base.dtypes import default_accumulator, is_storable
from epifuse.base.errors import fail
from epifuse.base.target import target_of
from epifuse.ir import Graph, Output
from epifuse.ir.types import INT32, Dim, dim_size, shape_of
from epifuse.passes.structure import Structure, structure_of
from epifuse.plan.destinations import Placed, check_output, check_overlaps, is_written_once
from epifuse.request.checks import check_accumulated, check_declared, check_names, check_operand, check_product
from epifuse.request.options import Options
from epifuse.request.problem import (
    UNCONSTRAINED,
    Constraints,
    HostNumber,
    OperandInfo,
    Operands,
    Problem,
    TensorInfo,
    old_content,
    settled,
)
from epifuse.request.scaled import SCALES, check_scales
from epifuse.request.signature import Call


class Settled(NamedTuple):
    """The input of planning: a problem and the structure of its epilogue."""

    problem: Problem
    structure: Structure


def settle(call: Call) -> Settled:
    """The problem and the structure of a call.

    Raises `ArgumentError` for shapes, dtypes, devices and memory that do not go together, and `EpilogueTypeError` on
    the user's line for values that do not.
    """
    infos = dict(zip(call.tensors, call.infos[2:], strict=True))
    problem = _problem(call, infos)
    structure = structure_of(call.request.parsed, problem)
    check_positions(structure.graph, problem.extents)
    return Settled(_with_outputs(call, infos, problem, structure), structure)


def check_positions(graph: Graph, extents: Mapping[str, int]) -> None:
    """Raise `EpilogueTypeError` if the graph counts positions that an int32 cannot hold."""
    for node in graph.nodes:
        if node.op == "index" and (count := dim_size(cast("Dim", node.attr), extents)) - 1 not in INT32:
            raise fail("positions", graph.loc(node), count=count)


def _problem(call: Call, infos: Mapping[str, TensorInfo]) -> Problem:
    """The problem of a call, without its outputs. `infos` describe `call.tensors` by name."""
    request, (a, b) = call.request, call.infos[:2]
    parsed, options = request.parsed, request.options
    wanted = options.accumulator_type or parsed.dtypes.get("accum")
    check_product(a, b, wanted, request.names)
    accumulator = wanted or default_accumulator(a.dtype, b.dtype)
    if parsed.dtypes:
        check_declared("accum", accumulator, parsed)
    check_names(parsed, [name for name in request.given if name not in SCALES])
    scales = check_scales(request.given, infos, (a, b), accumulator, request.names)
    operands: list[tuple[str, OperandInfo]] = []
    for name in (*parsed.parameters, *parsed.readers):
        if name in call.kinds:
            operands.append((name, HostNumber(call.kinds[name])))
        elif name in infos:
            check_operand(name, infos[name], a.device, accumulator)
            if parsed.dtypes:
                check_declared(name, infos[name].dtype, parsed)
            operands.append((name, infos[name]))
        else:
            raise fail("operand_not_given", None, name=name)
    accumulated = []
    for name in options.accumulated if options.accumulate != () else ():
        if name not in parsed.output_names:
            outputs = ", ".join(parsed.output_names)
            raise fail("unknown_output", None, option="accumulate", name=name, outputs=outputs)
        if name not in infos:
            raise fail("accumulate_new", None, name=name)
        check_accumulated(name, infos[name], a.device, accumulator)
        accumulated.append((name, infos[name].dtype))
    return Problem(
        a,
        b,
        accumulator,
        target_of(a.device),
        tuple(operands),
        by_tma=options.by_tma,
        accumulated=tuple(accumulated),
        constraints=settled(_constraints(options), a.dtype),
        scales=scales if a.shape[-1] else (),  # with K = 0 there are no blocks
    )


def _constraints(options: Options) -> Constraints:
    """The constraints that the call asks for. Mostly there are none: a shared object then saves making and checking
    one, which takes a tenth of settling."""
    plain = options.pinned is None and options.precision is None
    if plain and options.fast_math is options.allow_recompute is options.tune is options.fast_accum is False:
        return UNCONSTRAINED
    return options.constraints


def _with_outputs(call: Call, infos: Mapping[str, TensorInfo], problem: Problem, structure: Structure) -> Problem:
    """The problem with its outputs: each given destination is checked, and each other output gets a dtype."""
    parsed, graph = call.request.parsed, structure.graph
    chosen = _out_dtypes(call.request.options.out_dtypes, parsed.output_names)
    outputs: list[tuple[str, TensorInfo | None]] = []
    dtypes = []
    for output in graph.outputs:
        name = output.name
        info = infos.get(name)
        if info is None:
            dtype = chosen.get(name) or parsed.dtypes.get(name) or _default(output, structure, problem)
        else:
            check_output(output, info, graph, problem)
            dtype = info.dtype
        if parsed.dtypes:
            check_declared(name, dtype, parsed)
        dtypes.append((name, dtype))
        outputs.append((name, info))
    is_given = not infos.keys().isdisjoint(parsed.output_names)
    in_memory = _in_memory(call, problem, graph) if is_given else (problem.operands, ())
    return problem.with_outputs(tuple(outputs), tuple(dtypes), *in_memory)


def _in_memory(call: Call, problem: Problem, graph: Graph) -> tuple[Operands, tuple[tuple[str, str], ...]]:
    """The operands, with the old contents of accumulated outputs among them, and the pairs (output, operand) that share
    memory."""
    first, second, *further = map(Placed, call.addresses, call.infos)
    product = dict(zip(call.request.names, (first, second), strict=True))
    placed = dict(zip(call.tensors, further, strict=True))
    product |= {name: placed.pop(name) for name in SCALES if name in placed}
    given = {output.name: placed.pop(output.name) for output in graph.outputs if output.name in placed}
    held = {old_content(o.name): _held(given[o.name], o, graph, problem) for o in _accumulated(graph, problem)}
    aliases = check_overlaps(product, {**held, **placed}, given, graph, problem)
    return (*problem.operands, *((name, placed.info) for name, placed in held.items())), aliases


def _out_dtypes(
    asked: Mapping[str, torch.dtype] | torch.dtype | None, outputs: tuple[str, ...]
) -> Mapping[str, torch.dtype]:
    if asked is None:
        return {}
    by_name = dict.fromkeys(outputs, asked) if isinstance(asked, torch.dtype) else asked or {}
    if not isinstance(by_name, Mapping):
        raise fail("option", None, name="out_dtypes", want="a torch dtype, or dtypes by name", value=asked)
    for name, dtype in by_name.items():
        if name not in outputs:
            raise fail("unknown_output", None, option="out_dtypes", name=name, outputs=", ".join(outputs))
        if not is_storable(dtype):
            raise fail("output_dtype", None, name=name, dtype=dtype)
    return by_name


# --- outputs that are added onto what their destinations hold ---------------------------------------------------------


def _accumulated(graph: Graph, problem: Problem) -> list[Output]:
    return [output for output in graph.outputs if output.name in dict(problem.accumulated)]


def _held(given: Placed, output: Output, graph: Graph, problem: Problem) -> Placed:
    """The old content of an accumulated output as an operand of the epilogue.

    It is the destination without the dims of extent 1 that `keepdim` leaves, or a contiguous copy of the destination if
    `is_written_again`.
    """
    shape = shape_of(output.dims or (), problem.extents)
    if is_written_again(output, graph, problem):
        contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return Placed(None, given.info._replace(shape=shape, strides=contiguous, aligned=True))
    steps = iter([s for s, extent in zip(given.info.strides, given.info.shape, strict=True) if extent != 1])
    strides = tuple(next(steps) if extent != 1 else 1 for extent in shape)
    return given._replace(info=given.info._replace(shape=shape, strides=strides))


def old_contents(graph: Graph, problem: Problem, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The old contents of accumulated outputs, as tensors by operand name. They are copies if `is_written_again`."""
    found = {}
    for output in _accumulated(graph, problem):
        held = outputs[output.name].view(shape_of(output.dims or (), problem.extents))
        again = is_written_again(output, graph, problem)
        found[old_content(output.name)] = held.clone(memory_format=torch.contiguous_format) if again else held
    return found


def is_written_again(output: Output, graph: Graph, problem: Problem) -> bool:
    """Whether several tiles write the same elements of the output, so that a later tile would read a result of an
    earlier one and not the old content. False for a graph without stages, which has no tiles.
    """
    stage = graph.stages.get(output.node)
    return stage is not None and stage.kind != "finish" and not is_written_once(output, problem)


def _default(output: Output, structure: Structure, problem: Problem) -> torch.dtype:
    """The dtype of an output for which the caller gives none.

    It is that of a cast at the end of the expression, if there is one. Otherwise a float gets the dtype of A, or of the
    accumulator if A has 8 bits. Reductions, and floats over an int32 accumulator, get `problem.float_dtype`.
    """
    if output.dtype is not None and is_storable(output.dtype):
        return output.dtype
    graph = structure.graph
    kind = graph.types[output.node].kind
    if kind == "mask":
        return torch.bool
    if kind != "float":
        return torch.int64 if kind == "int64" else torch.int32
    is_finish = graph.stages[output.node].kind == "finish"
    if is_finish or problem.accumulator == torch.int32 or output.node in structure.reduced:
        return problem.float_dtype
    narrow = problem.a.dtype.itemsize == 1
    return problem.accumulator if narrow else problem.a.dtype
