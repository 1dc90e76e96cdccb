"""How long K is, as far as kernels differ by it. Imports no cutlass."""

from __future__ import annotations

from epifuse.providers.cutedsl import tuned
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.inputs import itemsize
from epifuse.request.problem import Problem


def band(problem: Problem, design: Design) -> int:
    """Clusters in a raster band, at least: along M, or along N where it is turned."""
    return (tuned.SHORT_BAND if design.turned and _has_longer_lines(problem) else tuned.BAND).value


def is_short(problem: Problem) -> bool:
    """Whether K is so short that an epilogue that reduces takes longer than the main loop of a tile."""
    return _k_bytes(problem) < tuned.SHORT_K.value


def is_long(problem: Problem) -> bool:
    """Whether K is so long that stages of A and B are worth more than room for what the epilogue reads and writes."""
    return _k_bytes(problem) >= tuned.LONG_K.value


def length_class(problem: Problem) -> tuple[bool, bool, bool]:
    """How long K is, as far as kernels differ by it."""
    return _has_longer_lines(problem), is_short(problem), is_long(problem)


def wide_k(problem: Problem) -> float:
    """Elements of 16 bits along K."""
    return _k_bytes(problem) / 2


def _has_longer_lines(problem: Problem) -> bool:
    return _k_bytes(problem) <= tuned.SHORT_K.value


def _k_bytes(problem: Problem) -> int:
    return problem.extents["k"] * itemsize(problem)
