"""How long K is, as far as kernels differ by it. Imports no cutlass."""

from __future__ import annotations

from epifuse.providers.cutedsl import tuned
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.inputs import itemsize
from epifuse.request.problem import Problem

_AT_ONCE = 64
"""Clusters of two CTAs that a GPU runs at once, rounded."""


def band(problem: Problem, design: Design) -> int:
    """Clusters in a raster band, at least: along M, or along N where it is turned.

    Where K is small it is outputs that count, which want longer lines. What is worked on at once has the same shape in
    bands along N.
    """
    along_m = (tuned.SHORT_BAND if _has_longer_lines(problem) else tuned.BAND).value
    return _AT_ONCE // along_m if design.turned else along_m


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
