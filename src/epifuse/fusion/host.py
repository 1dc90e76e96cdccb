"""Host numbers: expressions over numbers alone, evaluated in Python's own arithmetic when arguments are bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Node
from epifuse.ir.graph import topological

LOGIC: dict[str, Callable[..., Any]] = {
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "not": lambda x: not x,
    "chained comparison": lambda x, y: x and y,
    "bounds": lambda low, high: _ordered(low, high),
    "probability": lambda p: probability(p),
}


LEAVES = ("load", "axis")
"""Operations without arguments, whose values the caller provides: operands that are numbers, and extents of axes."""


def _ordered(low: Any, high: Any) -> Any:
    """Return the lower bound. Like torch's hardtanh, raise `ValueError` if it is above the upper bound."""
    if low > high:
        raise ValueError(f"the lower bound {low} is greater than the upper bound {high}")
    return low


def probability(p: Any) -> Any:
    """Return `p`, a dropout probability; raise `ValueError` unless 0 <= p < 1."""
    if not 0 <= p < 1:
        raise ValueError(f"the probability of a dropout is in [0, 1), and p is {p}")
    return p


class HostError(Exception):
    """Python refused the arithmetic at `node` (division by zero, a negative root ...)."""

    def __init__(self, node: Node, error: Exception) -> None:
        super().__init__(str(error))
        self.node = node
        self.error = error


def is_host_operation(node: Node) -> bool:
    """True where `node` can be computed from numbers alone."""
    return node.op in ("const", "number", "host", "select") or node.op in PRIMITIVES


def may_fail(candidates: Iterable[Node], computed: Iterable[Node]) -> Iterator[Node]:
    """Yield the candidates whose arithmetic may raise in Python, unless `computed` depends on them, so that they are
    evaluated anyway."""
    covered = set(topological(computed))
    risky: set[Node] = set()
    candidates = tuple(candidates)
    for node in topological(candidates):
        if _raises(node) or not risky.isdisjoint(node.args):
            risky.add(node)
    for node in reversed(candidates):
        if node in risky and node not in covered:
            covered.update(topological((node,), covered))
            yield node


def _raises(node: Node) -> bool:
    return node.op == "host" or (node.op in PRIMITIVES and PRIMITIVES[node.op].may_fail)


def evaluate(root: Node, leaf: Callable[[Node], Any], known: Mapping[Node, Any] = MappingProxyType({})) -> Any:
    """Evaluate `root`. `leaf` returns the value of a load or an axis. Raises `HostError`."""
    return evaluate_all({"": root}, leaf, known)[""]


def evaluate_all(
    roots: Mapping[str, Node], leaf: Callable[[Node], Any], known: Mapping[Node, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Evaluate the roots. `known` has the values of some nodes, and `leaf` returns those of other loads and axes.

    Raises `HostError`. As in Python, an error in the branch of a conditional that is not taken is ignored.
    """
    values: dict[Node, Any] = dict(known)
    for node in topological(roots.values(), values):
        try:
            values[node] = _step(node, [values[arg] for arg in node.args], leaf)
        except _PoisonedError as poison:
            values[node] = poison.with_traceback(None)  # a traceback has this frame, and so the values
        except (ArithmeticError, ValueError, TypeError) as error:
            values[node] = _PoisonedError(node, error.with_traceback(None))
    for root in roots.values():
        result = values[root]
        if isinstance(result, _PoisonedError):
            raise HostError(result.node, result.error)
    return {name: values[root] for name, root in roots.items()}


class _PoisonedError(Exception):
    """A value whose computation failed. It is an error only if another value uses it."""

    def __init__(self, node: Node, error: Exception) -> None:
        super().__init__(str(error))
        self.node = node
        self.error = error


def _step(node: Node, args: list[Any], leaf: Callable[[Node], Any]) -> Any:
    if node.op in LEAVES:
        return leaf(node)
    if node.op == "const":
        return node.attr
    if node.op == "select":
        condition, body, orelse = args
        return _sound(body if _sound(condition) else orelse)
    if node.op == "host" and node.attr in ("and", "or", "chained comparison"):
        first, second = args
        decided = bool(_sound(first)) == (node.attr == "or")
        return first if decided else _sound(second)
    sound = [_sound(arg) for arg in args]
    _refuse_huge(node, sound)
    if node.op == "number":
        return +sound[0]
    if node.op == "host":
        return LOGIC[node.attr](*sound) if node.attr in LOGIC else getattr(math, str(node.attr))(*sound)
    result = PRIMITIVES[node.op].on_host(*sound)
    if isinstance(result, complex):
        raise ValueError("a complex number")
    return result


_MOST_BITS = 1 << 16  # far above the range of a float; Python still computes such integers quickly
_MOST_FACTORS = 1024
_GROWING = ("factorial", "comb", "perm")


def _refuse_huge(node: Node, args: list[Any]) -> None:
    """Raise `OverflowError` for integers that no kernel takes and that Python would compute for minutes, such as
    2 ** 10 ** 10 or factorial(10 ** 8)."""
    if not args or not all(isinstance(arg, int) for arg in args):
        return
    if node.op == "bitwise_left_shift" and args[1] > _MOST_BITS:
        raise OverflowError(f"the integer is too large: more than {_MOST_BITS} bits")
    power = node.op == "pow" or node.attr == "pow"
    if power and args[0].bit_length() * max(args[1], 0) > _MOST_BITS and abs(args[0]) > 1:
        raise OverflowError(f"the integer is too large: more than {_MOST_BITS} bits")
    if node.op == "host" and node.attr in _GROWING and args[0] > _MOST_FACTORS:
        raise OverflowError(f"{node.attr} of a number above {_MOST_FACTORS} is too large")


def _sound(value: Any) -> Any:
    if isinstance(value, _PoisonedError):
        raise value
    return value
