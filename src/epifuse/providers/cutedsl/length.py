"""How long K is, as far as kernels differ by it. Imports no cutlass."""

from __future__ import annotations

from epifuse.providers.cutedsl import tuned
from epifuse.providers.cutedsl.inputs import itemsize
from epifuse.request.problem import Problem


def band(problem: Problem) -> int:
    """Clusters along M in a raster band: where K is small it is outputs that count, which want longer lines."""
    return (tuned.SHORT_BAND if _k_bytes(problem) <= tuned.SHORT_K.value else tuned.BAND).value


def is_short(problem: Problem) -> bool:
    """Whether K is so short that an epilogue that reduces takes longer than the main loop of a tile."""
    return _k_bytes(problem) < tuned.SHORT_K.value


def is_long(problem: Problem) -> bool:
    """Whether K is so long that stages of A and B are worth more than room for what the epilogue reads and writes."""
    return _k_bytes(problem) >= tuned.LONG_K.value


def length_class(problem: Problem) -> tuple[int, bool, bool]:
    """How long K is, as far as kernels differ by it."""
    return band(problem), is_short(problem), is_long(problem)


def wide_k(problem: Problem) -> float:
    """Elements of 16 bits along K."""
    return _k_bytes(problem) / 2


def _k_bytes(problem: Problem) -> int:
    return problem.extents["k"] * itemsize(problem)
