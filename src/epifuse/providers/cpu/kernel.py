"""The CPU kernel: the product panel by panel through torch's own GEMM, the epilogue on the panel while it is in cache.

No full-size intermediate exists: a value that needs a finished reduction is computed in a second sweep over the panels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from epifuse.ir import Graph, Load, Node
from epifuse.ir.types import dim_size
from epifuse.passes.assign_stages import assign_stages, sweeps
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.lower import lower
from epifuse.plan import Plan
from epifuse.problem import Problem, TensorInfo
from epifuse.providers.cpu import product
from epifuse.providers.cpu.primitives import FAST
from epifuse.providers.cpu.program import (
    Context,
    TileProgram,
    Values,
    compile_tile,
    constants,
    dtype_of,
    evaluate_small,
    per_tile,
)
from epifuse.providers.cpu.reduce import Accumulator
from epifuse.providers.cpu.space import Space, Tile, tiles, viewed
from epifuse.providers.cpu.store import store


@dataclass(frozen=True)
class Sweep:
    """What one pass over the panels computes: values stored, reductions merged, and the program that does it."""

    number: int
    stored: tuple[tuple[str, Node], ...]
    merged: tuple[Node, ...]
    program: TileProgram


class CpuKernel:
    """One plan, ready to launch. Holds no tensor, so that it may be shared between threads."""

    def __init__(self, plan: Plan) -> None:
        self.problem: Problem = plan.problem
        self.compute = plan.problem.float_dtype
        lowered = canonicalise(lower(plan.graph, frozenset(FAST)), plan.problem)
        self.graph: Graph = assign_stages(lowered, plan.problem)
        self.space = Space.of(self.graph, plan.problem.extents)
        self.rows, self.columns = plan.allocation.tile
        self.outputs = {output.name: output for output in self.graph.outputs}
        self.constants = constants(self.graph, self.compute)
        self.context = Context(self.graph, self.space, self.compute, self._converted())
        self.sweeps = tuple(self._sweep(number) for number in range(sweeps(self.graph)))

    # --- compiling -------------------------------------------------------------------------------------------

    def _sweep(self, number: int) -> Sweep:
        stored = tuple(
            (output.name, output.node)
            for output in self.graph.outputs
            if per_tile(self.graph.stages[output.node]) and self._store_sweep(output.name) == number
        )
        merged = tuple(node for node in self.graph.nodes if self._is_merged(node) and self._sweep_of(node) == number)
        effects = tuple(node for node in self.graph.effects if self._sweep_of(node) == number)
        roots = [node for _, node in stored] + [node for node in effects if per_tile(self.graph.stages[node])]
        roots += [node if self._in_tile(node) else node.args[0] for node in merged]
        return Sweep(number, stored, merged, compile_tile(self.context, roots, number))

    def _converted(self) -> frozenset[Node]:
        """Full-size loads that each tile copies: operands of another dtype than their kind is computed in, and what an
        output takes over from an operand that another output overwrites."""
        found = []
        overwritten = set(dict(self.problem.aliases).values())
        roots = {output.node for output in self.graph.outputs}
        for node in self.graph.loads():
            held = dtype_of(self.graph.types[node].kind, self.compute)
            operand = self.problem.by_name.get(node.attr.name)
            taken_over = node in roots and node.attr.name in overwritten
            if isinstance(operand, TensorInfo) and (operand.dtype != held or taken_over):
                found.append(node)
        return frozenset(found)

    def _sweep_of(self, node: Node) -> int:
        sweep: int = self.graph.stages[node].sweep
        return max(sweep, 0)

    def _is_merged(self, node: Node) -> bool:
        stages = self.graph.stages
        return node.op == "reduce" and not per_tile(stages[node]) and per_tile(stages[node.args[0]])

    @cached_property
    def _read_in_tile(self) -> frozenset[Node]:
        """Small values that a value of their own sweep reads: complete within each tile."""
        stages = self.graph.stages
        read: set[Node] = set()
        for node in reversed(self.graph.nodes):
            if per_tile(stages[node]) or node in read:
                read.update(
                    arg
                    for arg in node.args
                    if stages[arg].kind == "finish" and stages[arg].sweep == self._sweep_of(node)
                )
        return frozenset(read)

    def _in_tile(self, node: Node) -> bool:
        return node in self._read_in_tile

    def _store_sweep(self, name: str) -> int:
        """An output that shares storage with an operand waits for the last sweep: each sweep may read the operand."""
        own: int = self.graph.stages[self.outputs[name].node].sweep
        return sweeps(self.graph) - 1 if name in dict(self.problem.aliases) else own

    # --- launching -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Run. `operands` holds tensors and numbers, `outputs` the destinations."""
        launch = _Launch(self, a, b, operands, outputs)
        launch.finish(-1)
        for sweep in self.sweeps:
            launch.sweep(sweep)
            launch.finish(sweep.number)


@dataclass
class _Memory:
    """What the tiles of one sweep write to: destinations, buffer views by tile shape, and the buffers themselves."""

    direct: Values
    home: torch.Tensor | None
    views: dict[tuple[int, ...], Values] = field(default_factory=dict)
    flat: dict[Any, torch.Tensor] = field(default_factory=dict)


class _Launch:
    """The state of one launch."""

    def __init__(
        self,
        kernel: CpuKernel,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Mapping[str, Any],
        outputs: Mapping[str, torch.Tensor],
    ) -> None:
        self.kernel = kernel
        self.graph = kernel.graph
        self.space = kernel.space
        extents = kernel.problem.extents
        self.a = _batched(a, extents["l"])
        self.b = _batched(product.prepare(a, b, kernel.problem.accumulator), extents["l"])
        self.outputs = {
            name: self.space.view(outputs[name].view(_full_shape(kernel, name)), output.dims or ())
            for name, output in kernel.outputs.items()
        }
        self.whole: Values = dict(kernel.constants)
        self.operands = operands
        for node in self.graph.loads():
            self.whole[node] = self._operand(node)
        for node in self.graph.nodes:
            if node.op == "index":
                self.whole[node] = self._index(node)
        self.accumulators: dict[Node, Accumulator] = {}

    def _operand(self, node: Node) -> torch.Tensor:
        load = node.attr
        assert isinstance(load, Load)
        value = self.operands[load.name]
        type_ = self.graph.types[node]
        dtype = dtype_of(type_.kind, self.kernel.compute)
        if not isinstance(value, torch.Tensor):
            return torch.tensor(value, dtype=dtype, device="cpu")
        view = self.space.view(viewed(value, load), load.dims or ())
        if per_tile(self.graph.stages[node]):
            return view
        # A vector is read in every tile; an output that shares its storage may be stored before the first.
        return view.to(dtype, copy=load.name in dict(self.kernel.problem.aliases).values())

    def _index(self, node: Node) -> torch.Tensor:
        dim = node.attr
        count = dim_size(dim, self.kernel.problem.extents)
        return self.space.view(torch.arange(count, dtype=torch.int32, device="cpu"), (dim,))

    # --- between sweeps ----------------------------------------------------------------------------------------

    def finish(self, sweep: int) -> None:
        """Vectors and scalars that are complete once `sweep` is done: evaluated whole, stored if they leave."""
        for node in self.graph.nodes:
            stage = self.graph.stages[node]
            if per_tile(stage) or stage.sweep != sweep or node in self.whole:
                continue
            if node in self.accumulators:
                self.whole[node] = self.accumulators[node].result()
                continue
            value = evaluate_small(self.kernel.context, node, [self.whole[arg] for arg in node.args])
            if value is not None:
                self.whole[node] = value
        for name, output in self.kernel.outputs.items():
            stage = self.graph.stages[output.node]
            if not per_tile(stage) and stage.sweep == sweep:
                destination = self.outputs[name]
                store(self.whole[output.node].expand(destination.shape), destination)

    # --- one sweep ---------------------------------------------------------------------------------------------

    def sweep(self, sweep: Sweep) -> None:
        """All tiles in order."""
        for node in sweep.merged:
            self.accumulators[node] = self._accumulator(node)
        if not (sweep.stored or sweep.merged or sweep.program.steps):
            return
        direct = self._direct(sweep)
        memory = _Memory(direct, self._home(sweep, direct))
        for tile in tiles(self.space, self.kernel.rows, self.kernel.columns):
            self._run_tile(sweep, tile, memory)

    def _accumulator(self, node: Node) -> Accumulator:
        name, gone = node.attr
        count = dim_size(gone, self.kernel.problem.extents)
        type_ = self.graph.types[node]
        return Accumulator(name, self.space.shape(type_.factors), type_.kind, self.kernel.compute, count)

    def _direct(self, sweep: Sweep) -> Values:
        """Values computed where they are stored: the destination has their dtype, whole rows, and no operand in it."""
        computed = {step.node for step in sweep.program.steps if step.buffer and step.arguments}
        aliased = dict(self.kernel.problem.aliases)
        found: Values = {}
        for name, node in sweep.stored:
            destination = self.outputs[name]
            same = destination.dtype == dtype_of(self.graph.types[node].kind, self.kernel.compute)
            if node in computed and same and name not in aliased and destination.stride(-1) == 1:
                found.setdefault(node, destination)
        return found

    @property
    def _held(self) -> torch.dtype:
        """What the accumulator is computed in; a float16 one is rounded, but held in float32."""
        floating = self.kernel.problem.accumulator.is_floating_point
        return self.kernel.compute if floating else torch.int32

    def _home(self, sweep: Sweep, direct: Values) -> torch.Tensor | None:
        """A destination that can hold the accumulator until the epilogue overwrites it, so that torch's GEMM runs on
        larger panels than the epilogue: nobody may read the accumulator after the destination's value is computed."""
        order = [step.node for step in sweep.program.steps]
        reads = [i for i, step in enumerate(sweep.program.steps) for arg in step.arguments if arg.op == "accum"]
        left = [node for _, node in sweep.stored] + [arg for node in sweep.merged for arg in node.args]
        kept = any(node.op == "accum" for node in left)  # stored or reduced after the last step
        for name, node in sweep.stored:
            destination = self.outputs[name]
            plain = node.op == "accum" and name not in dict(self.kernel.problem.aliases)
            overwritten = direct.get(node) is destination and not kept and max(reads, default=0) <= order.index(node)
            whole = tuple(destination.shape) == tuple(self.kernel.problem.extents[axis] for axis in "lmn")
            same = destination.dtype == self._held
            if (plain or overwritten) and whole and same and destination.stride(-1) == 1:
                return destination
        return None

    def _run_tile(self, sweep: Sweep, tile: Tile, memory: _Memory) -> None:
        values: Values = {}
        for node in sweep.program.sources:
            values[node] = self._cut(self.whole[node], tile)
        shape = tuple(stop - start for start, stop in tile)
        held = memory.views.get(shape)
        if held is None:
            held = memory.views[shape] = self._buffers(sweep, tile, memory)
        for step in sweep.program.steps:
            node = step.node
            out = self._cut(memory.direct[node], tile) if node in memory.direct else held.get(node)
            if node.op == "accum":
                values[node] = self._accumulator_tile(tile, out, memory.home)
            elif node.op == "load":
                source = self._cut(self.whole[node], tile)
                values[node] = source if out is None else out.copy_(source)
            elif out is not None:
                values[node] = step.run(*[values[arg] for arg in step.arguments], out=out)
            else:
                values[node] = step.run(*[values[arg] for arg in step.arguments])
        for node in sweep.merged:
            self._merge(node, values, tile)
        for name, node in sweep.stored:
            written = memory.home if node.op == "accum" else memory.direct.get(node)
            if written is not self.outputs[name]:
                destination = self._cut(self.outputs[name], tile)
                store(values[node].expand(destination.shape), destination)

    def _accumulator_tile(self, tile: Tile, buffer: torch.Tensor | None, home: torch.Tensor | None) -> torch.Tensor:
        if home is None:
            assert buffer is not None
            self._product(tile, buffer)
            return buffer
        first = tile.m[0]
        rows = self.kernel.rows * max(product.PANEL_ROWS // self.kernel.rows, 1)
        if first % rows == 0:
            panel = tile._replace(m=(first, min(first + rows, self.kernel.problem.extents["m"])))
            self._product(panel, self._cut(home, panel))
        return self._cut(home, tile)

    def _merge(self, node: Node, values: Values, tile: Tile) -> None:
        accumulator = self.accumulators[node]
        x = values[node] if node in values else values[node.args[0]]
        axes = self.graph.types[node.args[0]].axes
        # A value that does not vary along an axis counts once, in the first tile along it.
        if any(getattr(tile, axis)[0] for axis in "lmn" if axis not in axes):
            return
        index = self.space.index(tile, accumulator.value.shape)
        if node in values:
            accumulator.assign(x, index)
        else:
            _, gone = node.attr
            accumulator.add(x, self.space.dimensions(gone), index)

    def _cut(self, whole: torch.Tensor, tile: Tile) -> torch.Tensor:
        return whole[self.space.index(tile, whole.shape)] if whole.dim() else whole

    def _buffers(self, sweep: Sweep, tile: Tile, memory: _Memory) -> Values:
        """Buffers of this tile's shape: views of flat memory that all tiles share."""
        views: Values = {}
        for step in sweep.program.steps:
            if (
                step.buffer is None
                or step.node in memory.direct
                or (step.node.op == "accum" and memory.home is not None)
            ):
                continue
            dtype, factors, _ = step.buffer
            shape = self.space.shape(factors, tile)
            size = 1
            for extent in shape:
                size *= extent
            flat = memory.flat.get(step.buffer)
            if flat is None or flat.numel() < size:
                flat = memory.flat[step.buffer] = torch.empty(size, dtype=dtype, device="cpu")
            views[step.node] = flat[:size].view(shape)
        return views

    def _product(self, tile: Tile, out: torch.Tensor) -> None:
        problem = self.kernel.problem
        (l0, l1), (m0, m1), (n0, n1) = tile
        integers = product.largest_product(problem.a.dtype, problem.b.dtype)
        panel = out if out.dim() == 3 else out.view(l1 - l0, m1 - m0, n1 - n0)
        rows = self.a[l0:l1, m0:m1]
        if self.b.stride(0) == 0 and product.evenly_spaced(rows) and product.evenly_spaced(panel):
            # One B for all batches: one product of all their rows.
            product.multiply(rows.flatten(0, 1), self.b[0, :, n0:n1], panel.flatten(0, 1), integers)
        else:
            for batch in range(l0, l1):
                product.multiply(rows[batch - l0], self.b[batch, :, n0:n1], panel[batch - l0], integers)
        if problem.accumulator == torch.float16:
            panel.copy_(panel.to(torch.float16))


def _batched(matrix: torch.Tensor, batches: int) -> torch.Tensor:
    return (matrix if matrix.dim() == 3 else matrix.unsqueeze(0)).expand(batches, -1, -1)


def _full_shape(kernel: CpuKernel, name: str) -> tuple[int, ...]:
    dims = kernel.outputs[name].dims or ()
    return tuple(dim_size(dim, kernel.problem.extents) for dim in dims)
