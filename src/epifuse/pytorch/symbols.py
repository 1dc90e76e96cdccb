"""Tracing a derivative with symbols for extents, so that one trace serves all extents of a structure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, map_arg
from torch.fx import Node as FxNode

from epifuse.frontend.fx.rows import ROWS
from epifuse.ir import Factor
from epifuse.passes.structure import other_rows
from epifuse.plan.settle import Settled

aten = torch.ops.aten

Size = Mapping[tuple[int, int, int], int]
"""A number of bytes or elements as a polynomial in the extents of l, m and n: the coefficient of each three powers."""

SIZE = "epifuse size"
"""The key, in the meta of a node, of the bytes of its value, a `Size`."""
OTHER = "epifuse other"
"""The key, in the meta of a node, of a meta tensor that looks like its value for other numbers of rows and batches."""


def at_extents(size: Size, extents: Mapping[str, int]) -> int:
    """The value of the polynomial `size` in a problem with these axis extents."""
    axes = extents["l"], extents["m"], extents["n"]
    return sum(count * prod(map(pow, axes, powers)) for powers, count in size.items())


def total(sizes: Iterable[Size]) -> Size:
    """The sum of polynomials."""
    found: dict[tuple[int, int, int], int] = {}
    for size in sizes:
        for powers, count in size.items():
            found[powers] = found.get(powers, 0) + count
    return found


def is_tensor(node: FxNode) -> bool:
    """Whether the value of `node` is a tensor, and not a size."""
    return isinstance(node.meta.get("val"), torch.Tensor)


@dataclass(eq=False)
class Symbols:
    """A mode of fake tensors, and the extents of the axes in it.

    Axes of equal extents share a symbol. Extents 0 and 1 stay numbers. So do the extents of axes that are *cut* into
    factors, since each factor has a size of its own.
    """

    settled: Settled
    mode: Any
    extents: Mapping[str, Any]
    cut: Mapping[str, int]
    """The extents of axes that are cut."""
    holds_constant_extent: bool = False
    """Whether a traced graph holds a constant that came from an extent, so that it serves this extent only."""

    @staticmethod
    def of(settled: Settled) -> Symbols:
        """The symbols for a problem. They distinguish the same extents as `structure.layout_class`."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        problem, graph = settled.problem, settled.structure.graph
        factors = {factor for type_ in graph.types.values() for factor in type_.factors}
        mode = FakeTensorMode(shape_env=ShapeEnv())
        counts = {axis: problem.extents[axis] for axis in "lmn"}
        probe = mode.from_tensor(torch.empty(tuple(counts.values()), device="meta"), static_shapes=False)
        plain = {Factor(axis) for axis in counts}
        cut = {factor.axis if factor.axis in counts else "n" for factor in factors - plain}  # a region is one of N
        whole = {axis: extent for axis, extent in zip("lmn", probe.shape, strict=True) if axis not in cut}
        return Symbols(settled, mode, {**counts, **whole}, {axis: counts[axis] for axis in cut})

    @property
    def device(self) -> str:
        """The device of the problem."""
        return self.settled.problem.a.device

    def cuts(self, factors: Iterable[Factor]) -> bool:
        """Whether all `factors` are of axes that are cut, so that their sizes are numbers."""
        return all(factor.along in self.cut for factor in factors)

    @property
    def exact(self) -> Mapping[str, int]:
        """The extents of those axes for which the trace holds at these extents only.

        They are the axes that are cut, and those whose symbols PyTorch guarded on or replaced.
        """
        env, extents = self.mode.shape_env, self.settled.problem.extents
        symbols = {axis: extent.node.expr for axis, extent in self.extents.items() if isinstance(extent, torch.SymInt)}
        if self.holds_constant_extent or not symbols:
            return extents
        decided = {symbol for guard in env.guards for symbol in guard.expr.free_symbols} | set(env.replacements)
        decided |= {symbol for expression in env.replacements.values() for symbol in expression.free_symbols}
        return {axis: extents[axis] for axis in "lmn" if axis in self.cut or symbols.get(axis) in decided}

    def recorded(
        self, function: Callable[..., Any], shapes: Sequence[Any], table: Mapping[Any, Callable[..., Any]] | None = None
    ) -> GraphModule:
        """Trace `function`, called with tensors of the shapes and dtypes of `shapes`, to a graph of ATen operations.

        `table` has decompositions by operation. The meta of each node has its bytes and the shape in this problem.
        """
        from torch.fx.experimental.proxy_tensor import make_fx

        with _without_callers_modes(self.mode, self.device):
            values = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in shapes]
            module = make_fx(function, decomposition_table=table)(*values)
        others = self._others()
        for node in module.graph.nodes:
            if is_tensor(node):
                value = node.meta["val"]
                shape = [_hint(extent) for extent in value.shape]
                other = [x if isinstance(x, int) else int(x.node.expr.xreplace(others)) for x in value.shape]
                size = self._size(value.numel() * value.element_size())
                self.holds_constant_extent = self.holds_constant_extent or size is None
                node.meta[SIZE] = {(0, 0, 0): prod(shape) * value.element_size()} if size is None else size
                node.meta["val"] = torch.empty(shape, dtype=value.dtype, device="meta")
                node.meta[OTHER] = torch.empty(other, dtype=value.dtype, device="meta")
        return module

    def _others(self) -> Mapping[Any, Any]:
        """The extents in a problem with other numbers of rows and batches, by symbol. Every symbol has one."""
        from sympy import Integer  # type: ignore[import-untyped]  # untyped

        own = self.settled.problem.extents
        others = other_rows(own)
        symbols = {axis: x.node.expr for axis, x in self.extents.items() if isinstance(x, torch.SymInt)}
        return {symbol: Integer(others.get(own[axis], own[axis])) for axis, symbol in symbols.items()}

    def axes(self, module: GraphModule) -> tuple[str, ...]:
        """Make the extents of axes that the graph reads from tensors further arguments of it. Returns these axes."""
        graph, found = module.graph, dict[str, FxNode]()
        symbols = {x.node.expr: axis for axis in "nml" if isinstance(x := self.extents[axis], torch.SymInt)}
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for node in [node for node in graph.nodes if node.target is aten.sym_size.int]:
            axis = symbols.get(node.meta["val"].node.expr)
            if axis is None:  # not an axis, for example a factor of one
                self.holds_constant_extent = True
                _fix(node)
                continue
            if axis not in found:
                with graph.inserting_after(last):
                    last = found[axis] = graph.placeholder(f"extent_of_{axis}")
                last.meta["val"] = self.extents[axis]
            node.replace_all_uses_with(found[axis])
            graph.erase_node(node)
        return tuple(found)

    def numbers(self, module: GraphModule) -> dict[str, Size]:
        """Make the numbers of elements that the graph computes with further arguments of it. Returns them by name."""
        found: dict[str, Size] = {}
        made: dict[FxNode, FxNode] = {}
        graph = module.graph
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for node in [node for node in graph.nodes if node.op == "call_function" and is_tensor(node)]:
            for count in [arg for arg in node.args if isinstance(arg, FxNode) and not is_tensor(arg)]:
                size = self._size(count.meta["val"])
                if size is None or node.target not in _ARITHMETIC:
                    self.holds_constant_extent = True
                    node.args = tuple(_hint(count.meta["val"]) if arg is count else arg for arg in node.args)
                    continue
                if count not in made:
                    name = f"number of elements {len(found)}"
                    with graph.inserting_after(last):
                        last = made[count] = graph.placeholder(f"count_{len(found)}")
                    dtype, found[name] = self.settled.problem.float_dtype, size
                    last.meta["val"] = torch.empty((), dtype=dtype, device="meta")
                node.replace_input_with(count, made[count])
            self.holds_constant_extent = self.holds_constant_extent or node.target in _COUNTING
        return found

    def _size(self, value: Any) -> Size | None:
        """A number of elements or bytes as a polynomial with whole coefficients; None if it is no such polynomial."""
        import sympy
        from torch.utils._sympy.functions import FloorDiv

        if isinstance(value, int):
            return {(0, 0, 0): value}
        axes: dict[Any, int] = {}
        for axis, extent in enumerate(self.extents.values()):
            if isinstance(extent, torch.SymInt):
                axes.setdefault(extent.node.expr, axis)
        try:
            # FloorDiv comes from views of existing tensors, and these divide without a remainder.
            polynomial = sympy.Poly(value.node.expr.replace(FloorDiv, lambda x, y: x / y), *axes)
        except sympy.PolynomialError:
            return None
        if not all(count.is_integer for count in polynomial.coeffs()):
            return None
        found: dict[tuple[int, int, int], int] = {}
        for powers, count in polynomial.terms():
            by_axis = dict(zip(axes.values(), powers, strict=True))
            found[by_axis.get(0, 0), by_axis.get(1, 0), by_axis.get(2, 0)] = int(count)
        return found


def _fix(size: FxNode) -> None:
    """Replace the node `size` by the number that it is in this problem."""

    def fixed(node: FxNode) -> Any:
        return _hint(size.meta["val"]) if node is size else node

    for user in [*size.users]:
        user.args, user.kwargs = map_arg(user.args, fixed), map_arg(user.kwargs, fixed)
    size.graph.erase_node(size)


_ARITHMETIC = (
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")),
    *(getattr(aten, name).Scalar for name in ("add", "sub", "mul", "div", "rsub")),
)
"""Operations that take a number of elements as an ordinary number."""

_COUNTING = (aten.var.correction, aten.var.dim, aten.var_mean.correction, aten.var_mean.dim)
"""Operations whose form in an epilogue holds a number of elements as a constant."""


def _hint(value: Any) -> Any:
    """The number that a symbol stands for in this problem. `int(value)` would add a guard on it."""
    return value if isinstance(value, (int, float)) else value.node.hint


@contextmanager
def _without_callers_modes(mode: Any, device: str) -> Iterator[None]:
    """Trace with fake tensors, apart from what the caller has switched on: modes, autocast, checkpoints, inference
    mode, anomaly mode and compiled autograd. One thread at a time does so, and none while Dynamo traces, because
    torch.fx patches functions of the whole process."""
    from torch._dynamo.compiled_autograd import _disable
    from torch._dynamo.convert_frame import compile_lock
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        compile_lock,
        _disable_current_modes(),
        mode,
        torch.inference_mode(False),
        torch.autocast(device.partition(":")[0], enabled=False),
        _saved_as_they_are(),
        torch.autograd.set_detect_anomaly(False),
        _disable(),
    ):
        yield


def _saved_as_they_are() -> AbstractContextManager[Any]:
    """A context in which no saved-tensor hook of the caller runs. If hooks are disabled there is none to replace."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # not in its stubs
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_itself_again, _itself_again)


def _itself_again(x: Any) -> Any:
    return x


# --- decompositions --------------------------------------------------------------------------------------------------


@cache
def table() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions of operations that the language has no row for. The first call takes a quarter of a second."""
    from torch._decomp import core_aten_decompositions

    rules: Any = core_aten_decompositions()
    kept = {op: rule for op, rule in rules.items() if op._schema.name not in ROWS}
    return {**kept, aten.linalg_vector_norm.default: _norm, aten.copy.default: _copied}


def _copied(old: torch.Tensor, new: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The value of `old` after `new` was copied into it."""
    return new.to(old.dtype).expand_as(old)


def _norm(x: torch.Tensor, order: float = 2, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    """The Euclidean norm. A norm of another order does not occur here."""
    return torch.sqrt(torch.sum(x * x, dim, keepdim))
