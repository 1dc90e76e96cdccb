"""Classes of the length of K, as far as kernels differ by it. Imports no cutlass."""

from __future__ import annotations

from epifuse.providers.cutedsl import tuned
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.inputs import itemsize
from epifuse.request.problem import Problem

_AT_ONCE = 64
"""Clusters of two CTAs that a GPU runs at once, rounded to a power of two."""


def band(problem: Problem, design: Design) -> int:
    """The least number of clusters in a raster band: along M, or along N if the design has `bands_along_n`.

    If K is short, the outputs count most, and are faster in longer lines. The number for bands
    along N lets the clusters that run at once cover the same shape as in bands along M.
    """
    along_m = (tuned.SHORT_BAND if _has_longer_lines(problem) else tuned.BAND).value
    return _AT_ONCE // along_m if design.bands_along_n else along_m


def is_short(problem: Problem) -> bool:
    """Whether K is so short that an epilogue that reduces takes longer than the main loop of a tile."""
    return _k_bytes(problem) < tuned.SHORT_K.value


def is_long(problem: Problem) -> bool:
    """Whether K is so long that stages of A and B are worth more than room for what the epilogue reads and writes."""
    return _k_bytes(problem) >= tuned.LONG_K.value


def length_class(problem: Problem) -> tuple[bool, bool, bool]:
    """The class of K's length. Kernels are the same for all lengths of a class."""
    return _has_longer_lines(problem), is_short(problem), is_long(problem)


def k_in_halfwords(problem: Problem) -> float:
    """The length of K in units of 16 bits."""
    return _k_bytes(problem) / 2


def _has_longer_lines(problem: Problem) -> bool:
    return _k_bytes(problem) <= tuned.SHORT_K.value


def _k_bytes(problem: Problem) -> int:
    return problem.extents["k"] * itemsize(problem)
