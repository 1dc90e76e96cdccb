"""A call that is described as text on the command line: its epilogue, shapes, dtypes and operands."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from epifuse.base.dtypes import BY_TORCH, short
from epifuse.base.errors import EpifuseError, fail
from epifuse.frontend import parsed
from epifuse.request.problem import Constraints

_DIMS = re.compile(r"(?:[LMN]|\d+)(?:x(?:[LMN]|\d+))*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class Operand(NamedTuple):
    """The description of an operand: a number, or the dims of a tensor, with its dtype if one is given."""

    dims: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    number: float | int | None = None

    def made(self, extents: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> Any:
        """Return the number, or an uninitialised tensor. `dtype` is that of A and B."""
        if self.number is not None:
            return self.number
        sizes = [extents[dim] if dim in extents else int(dim) for dim in self.dims]
        return empty(sizes, self.dtype or operand_dtype(dtype), device)

    def __str__(self) -> str:
        if self.number is not None:
            return str(self.number)
        return "x".join(self.dims) + (f":{str(self.dtype).removeprefix('torch.')}" if self.dtype else "")


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of operands described without one: `dtype`, that of A and B, or float32 if that has 8 bits."""
    return dtype if dtype.itemsize > 1 else torch.float32


def empty(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor. Raises `ArgumentError` if PyTorch refuses the sizes or the device."""
    try:
        return torch.empty(sizes, dtype=dtype, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        want = f"one that PyTorch can make ({why})"
        raise fail("option", None, name=f"a tensor on {device}", want=want, value=tuple(sizes)) from None


# --- epilogues -----------------------------------------------------------------------------------------------------


def epilogue(text: str) -> str | Callable[..., Any]:
    """Return the function that `FILE.py:function` or `module:function` names. Any other text is source, and returned.

    The file or module is imported, so its top-level code runs. Raises `ArgumentError` if that fails.
    """
    where, _, name = text.rpartition(":")
    if where.endswith(".py") and re.fullmatch(r"\w*", name):
        return _function(_imported_file(where), name, where)
    if re.fullmatch(r"[\w.]+:\w+", text):
        try:
            module = import_module(where)
        except EpifuseError:
            raise
        except (Exception, SystemExit) as error:
            why = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            want = f"FILE.py:function, module:function or source text ({why})"
            raise fail("option", None, name="the epilogue", want=want, value=text) from error
        return _function(module, name, where)
    if text.endswith(".py"):
        return _function(_imported_file(text), "", text)
    return text


def _imported_file(text: str) -> ModuleType:
    path = Path(text).expanduser()
    if not path.is_file():
        raise fail("epilogue_file", None, path=path, why="there is no such file")
    name = f"epifuse_file_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses, among others, look it up here
    kept, sys.path = sys.path, [str(path.parent.absolute()), *sys.path]  # a file imports what lies beside it
    try:
        spec.loader.exec_module(module)
    except EpifuseError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"line {lines[-1]}: " if lines else ""
        raise fail("epilogue_file", None, path=path, why=f"{where}{type(error).__name__}: {error}") from error
    finally:
        sys.path = kept
    return module


def _function(module: ModuleType, name: str, where: str) -> Callable[..., Any]:
    """Return the function of this name; without a name, the only public function of the module."""
    found = getattr(module, name, None) if name else None
    own = [one for one, value in vars(module).items() if _is_own(value, module) and not one.startswith("_")]
    if found is None and not name and len(own) == 1:
        found = getattr(module, own[0])
    if found is None:
        hint = f"write {where}:{own[0]}; there are {', '.join(own)}" if own else "it defines no function"
        raise fail("epilogue_name", None, text=f"{where}:{name}" if name else where, hint=hint)
    return found  # type: ignore[no-any-return]  # checked where it is parsed


def _is_own(value: object, module: ModuleType) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == module.__name__


# --- words of an option --------------------------------------------------------------------------------------------


def shape(text: str) -> tuple[int, ...]:
    """Parse M, N and K from text such as `4096x14336x4096`."""
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK")
    return tuple(map(int, text.split("x")))


def count(text: str) -> int:
    """Parse a whole number, 1 or more."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
    return int(text)


_ALLOWED = {
    "allow_recompute": "the product may be computed more than once",
    "batch_invariant": "a row has the same bits whatever M is",
    "fast_accum": "8-bit floats are added up by the tensor cores alone",
    "fast_math": "the hardware's approximations for every output",
}


def add_constraints(parser: argparse.ArgumentParser) -> None:
    """Add options for fields of `Constraints`. An option that is not given has the field's default."""
    parser.add_argument("--precision", choices=("ieee", "tf32"), help="of products of float32")
    parser.add_argument("--split", type=count, metavar="PARTS", help="in how many parts K is multiplied")
    for name, what in _ALLOWED.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, action="store_true", default=getattr(Constraints, name), help=what)


def constraints(options: argparse.Namespace) -> Constraints:
    """The `Constraints` that the options of `add_constraints` describe."""
    return Constraints(**{name: getattr(options, name) for name in ("precision", "split", *_ALLOWED)})


def operand(text: str) -> tuple[str, Operand]:
    """Parse a name with dims or a number, such as `bias=N`, `labels=Mx1:int64` or `alpha=0.5`."""
    name, _, rest = text.partition("=")
    if name.isidentifier() and _NUMBER.fullmatch(rest):
        return name, Operand(number=int(rest) if rest.lstrip("+-").isdecimal() else float(rest))
    dims, colon, kind = rest.partition(":")
    if not (name.isidentifier() and _DIMS.fullmatch(dims)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name and dims or a number, as in bias=N, C=MxN, labels=Mx1:int64 or alpha=0.5"
        )
    return name, Operand(tuple(dims.split("x")), dtype(kind) if colon else None)


def dtype(text: str) -> torch.dtype:
    """Parse a dtype of PyTorch that tensors may have here, by its name or by the short name in plans, such as e4m3."""
    found = {short(one): one for one in BY_TORCH}.get(text) or getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype of PyTorch")
    if found not in BY_TORCH:
        known = ", ".join(str(one).removeprefix("torch.") for one in BY_TORCH)
        raise argparse.ArgumentTypeError(f"{text} is none of {known}")
    return found


def device(text: str) -> torch.device:
    """Parse a device of PyTorch."""
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device of PyTorch") from None


# --- what is not said ------------------------------------------------------------------------------------------------

_ROW, _TILE, _COLUMN = (Operand(tuple(dims)) for dims in ("N", "MN", "M1"))
_USUAL: dict[str, Operand] = {
    **dict.fromkeys(("bias", "b", "shift", "gamma", "row"), _ROW),
    **dict.fromkeys(("C", "c", "residual", "skip", "aux", "x", "y", "target", "targets", "other"), _TILE),
    **dict.fromkeys(("column", "col", "rstd"), _COLUMN),
    "mask": Operand(("M", "N"), torch.bool),
    "labels": Operand(("M", "1"), torch.int64),
    "seed": Operand(number=0),
    **dict.fromkeys(("alpha", "beta", "scale"), Operand(number=1.0)),
    "eps": Operand(number=1e-6),
}
"""The usual description of a parameter with this name."""


class Operands(NamedTuple):
    """The operands of an epilogue by name: those that were described, `said`, and those `guessed` from their names."""

    said: dict[str, Operand]
    guessed: dict[str, Operand]

    @staticmethod
    def of(function: Any, described: Sequence[tuple[str, Operand]]) -> Operands:
        """The operands of an epilogue, some of them `described`.

        Raises `ArgumentError` for a name that has two descriptions, or none and no guess, and the errors of parsing.
        """
        said = dict(described)
        for name, count in Counter(name for name, _ in described).items():
            if count > 1:
                raise fail("option", None, name="--arg", want="each operand once", value=name)
        known = parsed(function, said)
        names = [name for name in known.parameters if name not in known.defaults and name not in said]
        for name in names:
            if name not in _USUAL:
                raise fail("not_described", None, name=name)
        return Operands(said, {name: _USUAL[name] for name in names})

    @property
    def all(self) -> dict[str, Operand]:
        """All operands by name."""
        return {**self.guessed, **self.said}

    def made(self, extents: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Return the operands by name, as numbers and uninitialised tensors. `dtype` is that of A and B."""
        return {name: one.made(extents, dtype, device) for name, one in self.all.items()}

    @property
    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield lines for the user, each as a heading and a text."""
        if self.all:
            yield "operands", ", ".join(f"{name}={one}" for name, one in self.all.items())
        if self.guessed:
            names, first = ", ".join(self.guessed), next(iter(self.guessed))
            yield "", f"{names}: guessed from the name; --arg {first}=... says otherwise"
