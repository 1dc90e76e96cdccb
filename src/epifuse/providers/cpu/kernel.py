"""The panel kernel: torch's own GEMM computes a panel of the product, and the epilogue runs on it while it is in cache.

There is no full-size intermediate: a value that needs a finished reduction is computed in a second sweep over the
panels. A launch is a sequence of PyTorch calls with their tensors. Making these calls runs no arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any

import torch

from epifuse.base.dtypes import largest_product
from epifuse.ir import Node
from epifuse.ir.types import dim_size
from epifuse.providers.base import Step
from epifuse.providers.cpu import code, product
from epifuse.providers.cpu.code import Instruction, Name, TileCode
from epifuse.providers.cpu.lowered import Panels
from epifuse.providers.cpu.program import BufferKey
from epifuse.providers.cpu.space import Tile, is_one_tile, tiles, viewed
from epifuse.request.problem import Problem
from epifuse.request.scaled import given_scales

Call = Callable[[], Any]
_CPU = torch.device("cpu")
Tensors = dict[Name, Any]
"""Tensors by name, and the numbers in `Code.counts`."""

_KEPT_ELEMENTS = 1 << 16
"""The most elements of the result, and of B, for which a bound step keeps its calls and their buffers. For more, making
them costs little beside the product, and the kept buffers would take memory between launches."""


class CpuKernel:
    """One plan, ready to launch. It holds no tensor of a launch, so threads may share it."""

    def __init__(self, panels: Panels, problem: Problem, tile: tuple[int, int]) -> None:
        self.extents = extents = problem.extents
        self.space = space = panels.space.of_extents(extents)
        self.sinks = code.sinks(panels, problem, space)
        self.code = made = code.code_of(panels, problem, code.case_of(problem, self.sinks, space.axes, tile[1]))
        placings, shape = panels.placings, space.masked
        self.sources = [(name, node.attr, dtype, placings[node].within(space)) for name, node, dtype in made.loads]
        self.known: Tensors = dict(panels.constants)  # type: ignore[arg-type]  # nodes are names
        self.known.update([(name, dim_size(dim, extents)) for name, dim in made.counts])
        self.coordinates = panels.coordinates
        self.memory = [(name, shape(mask), dtype) for name, mask, dtype in made.memory]
        self.buffers = [[(key[0], shape(mask), nodes) for key, mask, nodes in sweep.buffers] for sweep in made.sweeps]
        self.rows, self.columns = tile
        self.accumulator = problem.accumulator
        self.is_scaled = bool(problem.scales)
        self.b_dtype = product.operand_dtype(problem.a.dtype, problem.b.dtype, problem.accumulator)
        self.integers = largest_product(problem.a.dtype, problem.b.dtype)
        l, m, n, k = extents["l"], extents["m"], extents["n"], extents["k"]
        self.everything = Tile((0, l), (0, m), (0, n))
        self.is_one_tile = is_one_tile(space, *tile)
        self.is_batched = "l" in space.axes
        self.is_kept = self.is_one_tile and max(l * m * n, l * k * n) <= _KEPT_ELEMENTS

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Step:
        """Bind the tensors. `operands` holds tensors and numbers, `outputs` the destinations."""
        tensors = self.known.copy()
        for name, load, dtype, placement in self.sources:
            value = operands[load.name]
            if isinstance(value, torch.Tensor):
                value = placement.of(viewed(value, load))
            else:
                value = torch.scalar_tensor(value, dtype=dtype, device=_CPU)
            tensors[name] = value
        tensors.update(given_scales(operands))
        for name, shape, placement in self.sinks:
            to = outputs[name]
            # The destination may keep dims that are reduced, or have the shape (1,) for a number.
            tensors[name] = placement.of(to if to.shape == shape else to.view(shape))
        return _Bound(self, a, b, tensors)


class _Bound:
    """A step: a kernel, and the tensors it was bound to."""

    def __init__(self, kernel: CpuKernel, a: torch.Tensor, b: torch.Tensor, tensors: Tensors) -> None:
        self.kernel, self.a, self.b, self.tensors = kernel, a, b, tensors
        self.kept: Iterable[Call] | None = None
        self.lock = Lock()

    def __call__(self) -> None:
        """Launch. Threads launch the same step one after the other, because the product may be computed in the memory
        of an output, and the calls that are kept always use the same buffers."""
        with_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad() does, but that takes two microseconds
        try:
            with self.lock:
                self._launch()
        finally:
            torch._C._set_grad_enabled(with_grad)

    def _launch(self) -> None:
        # Buffers that are allocated in inference mode may not be written outside it.
        keeps = self.kernel.is_kept and not torch.is_inference_mode_enabled()
        calls = self.kept if keeps and self.kept is not None else _Launch(self).calls()
        for call in calls:
            call()
        self.kept = calls if keeps else self.kept


class _Launch:
    """The tensors of one launch, and the calls that compute them."""

    def __init__(self, bound: _Bound) -> None:
        self.kernel = bound.kernel
        self.space = bound.kernel.space
        self.a, self.b = bound.a, bound.b
        self.tensors = bound.tensors.copy()

    def calls(self) -> Iterable[Call]:
        """All calls in order. For several tiles they are an iterator, which makes each call when it is needed."""
        before = self._before()
        return [*before, *self._one_tile()] if self.kernel.is_one_tile else chain(before, self._all_tiles())

    def _before(self) -> list[Call]:
        kernel, program = self.kernel, self.kernel.code
        for name, shape, dtype in kernel.memory:
            self.tensors[name] = torch.empty(shape, dtype=dtype, device=_CPU)
        for node in kernel.coordinates:
            self.tensors[node] = self._index(node)
        calls = _calls(program.before, self.tensors)
        if kernel.is_scaled:
            a, b = self.a, self.b
            self.a, self.b = (torch.empty_like(matrix, dtype=torch.float32) for matrix in (a, b))
            calls.append(partial(product.dequantise, a, b, self.tensors, (self.a, self.b)))
        if self.b.dtype != kernel.b_dtype:
            wide = torch.empty_like(self.b, dtype=kernel.b_dtype)
            calls.append(partial(wide.copy_, self.b))
            self.b = wide
        if kernel.is_batched:
            self.a, self.b = (_batched(matrix, kernel.extents["l"]) for matrix in (self.a, self.b))
        return calls

    def _one_tile(self) -> list[Call]:
        """The calls of all sweeps if the result is one tile. No tensor has to be cut."""
        calls: list[Call] = []
        program = self.kernel.code
        for sweep, buffers, instructions in zip(program.sweeps, self.kernel.buffers, program.whole, strict=True):
            for dtype, shape, nodes in buffers:
                buffer = torch.empty(shape, dtype=dtype, device=_CPU)
                for node in nodes:
                    self.tensors[node] = buffer
            if sweep.product is not None:
                calls += self._panel(self.kernel.everything, self.tensors[sweep.product])
            calls += _calls(instructions, self.tensors)
        return calls

    def _all_tiles(self) -> Iterator[Call]:
        for sweep in self.kernel.code.sweeps:
            memory: dict[Any, torch.Tensor] = {}
            for tile in tiles(self.space, self.kernel.rows, self.kernel.columns):
                yield from self._tile(sweep, tile, memory)
            yield from _calls(sweep.after, self.tensors)

    def _index(self, node: Node) -> torch.Tensor:
        count = dim_size(node.attr, self.kernel.extents)
        return self.space.view(torch.arange(count, dtype=torch.int32, device="cpu"), (node.attr,))

    # --- one of several tiles ----------------------------------------------------------------------------------

    def _tile(self, sweep: TileCode, tile: Tile, memory: dict[Any, torch.Tensor]) -> Iterator[Call]:
        tensors = {name: self._cut(self.tensors[name], tile) for name in sweep.cut}
        for (dtype, factors, number), _, nodes in sweep.buffers:
            shape = self.space.shape(factors, tile)
            tensors.update(dict.fromkeys(nodes, _reused(memory, (dtype, factors, number), shape)))
        if sweep.product is not None and not tile.is_empty:
            yield from self._product(tile, tensors[sweep.product], sweep.home)
        yield from _calls(sweep.instructions, tensors)
        for instruction, once in sweep.merges:
            if not any(getattr(tile, axis)[0] for axis in once) and ("l" in once or not tile.is_empty):
                yield from _calls((instruction,), tensors)
        yield from _calls(sweep.stores, tensors)

    def _cut(self, whole: torch.Tensor, tile: Tile) -> torch.Tensor:
        """The tile's part of a whole value."""
        return whole[self.space.index(tile, whole.shape)] if whole.dim() else whole

    def _product(self, tile: Tile, out: torch.Tensor, home: str | None) -> Iterable[Call]:
        """The calls that compute the accumulator of a tile. If it has a `home`, the first of several tiles computes it
        for all of them, and the others have no calls."""
        if home is None:
            return self._panel(tile, out)
        first = tile.m[0]
        rows = self.kernel.rows * max(product.PANEL_ROWS // self.kernel.rows, 1)
        if first % rows:
            return ()
        tile = tile._replace(m=(first, min(first + rows, self.kernel.extents["m"])))
        return self._panel(tile, self._cut(self.tensors[home], tile))

    # --- the product -------------------------------------------------------------------------------------------

    def _panel(self, tile: Tile, out: torch.Tensor) -> list[Call]:
        calls = self._batches(tile, out) if self.kernel.is_batched else [self._matrix(tile, out)]
        if self.kernel.accumulator == torch.float16:
            calls.append(lambda: out.copy_(out.to(torch.float16)))
        return calls

    def _matrix(self, tile: Tile, out: torch.Tensor) -> Call:
        a, b = self.a, self.b
        _, (m0, m1), (n0, n1) = tile
        if not self.kernel.is_one_tile:
            a, b = a[m0:m1], b[:, n0:n1]
        return product.call(a, b, out if out.dim() == 2 else out.view(m1 - m0, n1 - n0), self.kernel.integers)

    def _batches(self, tile: Tile, out: torch.Tensor) -> list[Call]:
        a, b, integers = self.a, self.b, self.kernel.integers
        (l0, l1), (m0, m1), (n0, n1) = tile
        panel = out if out.dim() == 3 else out.view(l1 - l0, m1 - m0, n1 - n0)
        rows = a[l0:l1, m0:m1]
        if b.stride(0) == 0 and product.evenly_spaced(rows) and product.evenly_spaced(panel):
            # All batches have the same B, so that one product can have all their rows.
            return [product.call(rows.flatten(0, 1), b[0, :, n0:n1], panel.flatten(0, 1), integers)]
        return [
            product.call(rows[batch - l0], b[batch, :, n0:n1], panel[batch - l0], integers) for batch in range(l0, l1)
        ]


def _calls(instructions: Iterable[Instruction], tensors: Tensors) -> list[Call]:
    return [
        partial(run, *[tensors[name] for name in arguments])
        if out is None
        else partial(run, *[tensors[name] for name in arguments], out=tensors[out])
        for run, arguments, out in instructions
    ]


def _reused(memory: dict[Any, torch.Tensor], key: BufferKey, shape: tuple[int, ...]) -> torch.Tensor:
    """A buffer of this shape: a view of memory that all tiles share."""
    held = memory.get(key)
    if held is None or held.numel() < math.prod(shape):
        held = memory[key] = torch.empty(shape, dtype=key[0], device=_CPU)
    return held if held.shape == shape else held.view(-1)[: math.prod(shape)].view(shape)


def _batched(matrix: torch.Tensor, batches: int) -> torch.Tensor:
    return (matrix if matrix.dim() == 3 else matrix.unsqueeze(0)).expand(batches, -1, -1)
