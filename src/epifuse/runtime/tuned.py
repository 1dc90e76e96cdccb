"""Results of tuning as readable text on disk.

There is a file for each structure, and in it a result for each class of shapes, GPU and version of epifuse. Files may
be copied to other machines, or into the folder of `EPIFUSE_CACHE_READONLY`, and merged. A result of another GPU or
version is never used. If a container image brings a result and the user has another one, the user's is used.
"""

from __future__ import annotations

import json
import os
import platform
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from epifuse.base import store
from epifuse.base.dtypes import short
from epifuse.base.errors import fail
from epifuse.plan import Plan, Selection
from epifuse.request.problem import Problem, TensorInfo
from epifuse.runtime.launch import outputs_of

_KIND = "tuned"
_MOST = 512  # results in a file: the oldest go first
_LONGEST = 1e12  # microseconds
_STRUCTURE = re.compile("[0-9a-f]{64}")
_LINE = 128  # bytes that one access to a GPU's memory moves


@dataclass(frozen=True)
class Result:
    """The fastest kernel for a class of shapes, and the microseconds of each kernel for the `problem` measured."""

    shape: str
    gpu: str
    version: str
    problem: str
    kernel: str
    microseconds: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of the result within the file of its structure."""
        return self.shape, self.gpu, self.version


class Found(NamedTuple):
    """The result that is valid here, or None, and for other results a line that says why they are ignored."""

    result: Result | None
    ignored: tuple[str, ...] = ()


def find(selection: Selection) -> Found:
    """The stored result for the problem of a selection. The selection must have a plan."""
    plan = selection.best
    assert plan is not None
    mine = result_of(plan, {plan.spec.name: 0.0})
    found, ignored = None, []
    others: dict[str, None] = {}
    for path in store.notes(_KIND, plan.digest):
        results = _read(path)
        if isinstance(results, str):
            ignored.append(f"{path} is ignored: {results}")
            continue
        for result in results:
            if result.key == mine.key and selection.named(result.kernel) is not None:
                found = result
            elif result.shape == mine.shape:
                others[f"a result that was measured {_other(result, mine)} is ignored"] = None
    return Found(found, (*ignored, *(() if found else others)))


def _other(result: Result, mine: Result) -> str:
    """Why a result for this class of shapes is not valid here."""
    if result.gpu != mine.gpu:
        return f"on {result.gpu}"
    if result.version != mine.version:
        return "by another version of epifuse"
    return f"for {result.kernel}, which cannot run this,"


def keep(plan: Plan, result: Result) -> None:
    """Store a result in place of an earlier one. Warns if no folder can take it."""
    try:
        store.rewrite(_KIND, plan.digest, partial(_with, (result,)))
    except OSError as error:  # not even a temporary folder
        warnings.warn(f"what was measured is not kept: {error}", stacklevel=2)


def merge(path: Path) -> int:
    """Add the results of a file, of a folder or of its subfolder `tuned` to the user's own. Returns their number.

    Results that the user has already are kept. Raises `ArgumentError` for a file without results or without the name of
    a structure, and for a folder without files.
    """
    found = {}
    for file in _files(path):
        results = _read(file)
        if not isinstance(results, str) and not _STRUCTURE.fullmatch(file.stem):
            results = "its name is not that of a structure: merge it under the name that ef.tune gave it"
        if isinstance(results, str):
            raise fail("tuned_file", None, path=file, why=results)
        found[file.stem] = results
    for structure, results in found.items():
        store.rewrite(_KIND, structure, partial(_with, tuple(results), own_first=True))
    return sum(map(len, found.values()))


def _files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder or of its subfolder `tuned`."""
    try:
        folder = path / _KIND if os.path.isdir(path / _KIND) else path
        if not os.path.isdir(folder):
            return [path]
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError as error:
        raise fail("tuned_file", None, path=path, why=f"it cannot be read ({type(error).__name__}: {error})") from error
    if not names:
        raise fail("tuned_file", None, path=path, why="it has no file *.json")
    return [folder / name for name in names]


def result_of(plan: Plan, microseconds: Mapping[str, float]) -> Result:
    """The result for the problem of a plan on this machine, from the microseconds of each kernel by name."""
    fastest = min(microseconds, key=microseconds.__getitem__)
    problem = plan.problem
    return Result(shape_class(plan), gpu_of(problem), version(), problem.describe(), fastest, dict(microseconds))


def gpu_of(problem: Problem) -> str:
    """The model of the GPU, or that of the CPU with PyTorch's number of threads."""
    target = problem.target
    if target.device == "cuda":
        return target.processor.name
    return f"{_cpu()}, {torch.get_num_threads()} threads"


@cache
def _cpu() -> str:
    """The model of the CPU, or its architecture if the system does not tell the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def version() -> str:
    """A digest of epifuse's source. Raises `UnsupportedError` if the source cannot be read."""
    return store.key_of()[:16]


# --- classes of shapes ------------------------------------------------------------------------------------------------


def shape_class(plan: Plan) -> str:
    """A text that is equal for problems of one structure that one result serves.

    It has the extents, with M rounded up, the layout of each tensor, and the constraints.
    """
    problem, extents = plan.problem, plan.problem.extents
    # An output that is allocated lies as a destination of these strides would.
    made = {one.name: TensorInfo(one.shape, one.strides, one.dtype, "") for one in outputs_of(plan.graph, problem)}
    given = {name: info for name, info in problem.outputs if info is not None}
    tensors: dict[str, Any] = {**dict(problem.operands), **made, **given}
    # In the order of the binding, because a structure does not depend on the names.
    lies = [_lies(tensors.get(name)) for name in plan.binding]
    asked = [
        f"{field.name}={value}"
        for field in fields(problem.constraints)
        if (value := getattr(problem.constraints, field.name)) not in (None, False) and field.name != "tune"
    ]
    sizes = f"L={extents['l']} M<={_rows(extents['m'])} N={extents['n']} K={extents['k']}"
    product = [f"{name} {_lies(info)}" for name, info in (("A", problem.a), ("B", problem.b), *problem.scales)]
    return "; ".join([sizes, *product, *lies, f"accumulator {short(problem.accumulator)}", *asked])


def _rows(m: int) -> int:
    """The largest M of the class of `m`: tiles for few rows have at least 16 rows, and all others at least 64."""
    step = 16 if m <= 128 else 64
    return -(-m // step) * step


def _lies(value: Any) -> str:
    """A text for the layout of a tensor, as far as kernels and their speed may depend on it."""
    if not isinstance(value, TensorInfo):
        return "number"
    shape, strides = value.shape, value.strides
    steps = [stride for extent, stride in zip(shape, strides, strict=True) if extent > 1]
    contiguous = [index - len(shape) for index, stride in enumerate(strides) if stride == 1 and shape[index] > 1]
    words = [short(value.dtype), f"dim {contiguous[-1]} contiguous" if contiguous else "strided"]
    if any(step != 1 and step * value.dtype.itemsize % _LINE for step in steps):
        words.append("partial lines")
    return " ".join([*words, *(() if value.aligned else ("unaligned",))])


# --- files ------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> list[Result] | str:
    """The results of a file, or a text that says why there are none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["results"]
        results = [Result(**row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return results if all(map(_is_sound, results)) else "its results are not of the right types"


def _is_sound(result: Result) -> bool:
    times = result.microseconds
    words = (result.shape, result.gpu, result.version, result.problem, result.kernel)
    if not all(isinstance(word, str) for word in words) or not isinstance(times, dict):
        return False
    are_times = (type(time) in (int, float) and 0 <= time < _LONGEST for time in times.values())
    return result.kernel in times and all(are_times)


def _with(results: Iterable[Result], path: Path, *, own_first: bool = False) -> str:
    """The text of the file `path` with further results. These replace results of the file with the same key unless
    `own_first`. A file that cannot be read is replaced."""
    read = _read(path) if path.is_file() else []
    before: Iterable[Result] = () if isinstance(read, str) else read
    ordered = _newest(results, [*before]) if own_first else _newest(before, results)
    by_key = {result.key: result for result in ordered}
    kept = [asdict(result) for result in by_key.values()][-_MOST:]
    return json.dumps({"results": kept}, indent=1) + "\n"


def _newest(before: Iterable[Result], results: Iterable[Result]) -> Iterator[Result]:
    keys = {result.key for result in results}
    yield from (result for result in before if result.key not in keys)
    yield from results
