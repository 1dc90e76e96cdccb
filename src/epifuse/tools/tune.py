"""The command `tune`: which kernel is the fastest for given shapes, measured on this machine and kept on disk."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from epifuse.api import tune
from epifuse.base.errors import fail
from epifuse.request.problem import Constraints
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments
from epifuse.runtime.tuned import merge

_AXES = "MNK"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("shapes", nargs="*", type=_shape, metavar="MxNxK", help="as in 4096x14336x4096")
    parser.add_argument("--epilogue", help="its source text, or module:function; none is the product alone")
    parser.add_argument(
        "--operand", action="append", default=[], type=_operand, metavar="NAME=DIMS", help="as in bias=N or C=MxN"
    )
    parser.add_argument("--dtype", default="bfloat16", type=_dtype, help="of A, B and operands")
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("ieee", "tf32"), help="of products of float32")
    parser.add_argument("--anew", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--merge", action="append", default=[], type=Path, help="results of another machine's folder")


def run(options: argparse.Namespace) -> int:
    """Merge, measure and print; the exit status. B is the transpose of a weight (N, K), as in a linear layer.

    Raises `ArgumentError` for neither, and what `tune` raises.
    """
    if not (options.shapes or options.merge):
        raise fail("option", None, name="tune", want="shapes as in 4096x14336x4096, or --merge", value=None)
    for path in options.merge:
        print(f"{merge(path)} results from {path}")
    done = tune([_arguments(shape, options) for shape in options.shapes], anew=options.anew)
    if options.shapes:
        print(done)
    return 0 if done else 1


def _arguments(shape: Sequence[int], options: argparse.Namespace) -> GemmArguments:
    extents = dict(zip(_AXES, shape, strict=True))

    def empty(dims: Sequence[str]) -> torch.Tensor:
        sizes = [extents.get(dim, 1) for dim in dims]
        return torch.empty(sizes, dtype=options.dtype, device=options.device)

    operands = {name: empty(dims) for name, dims in options.operand}
    epilogue = options.epilogue and EpilogueArguments.partial(_epilogue(options.epilogue), operands)
    constraints = Constraints(precision=options.precision)
    return GemmArguments(empty("MK"), empty("NK").t(), epilogue=epilogue or None, constraints=constraints)


def _epilogue(text: str) -> str | Callable[..., Any]:
    if not re.fullmatch(r"[\w.]+:\w+", text):
        return text
    module, _, name = text.partition(":")
    try:
        return getattr(import_module(module), name)  # type: ignore[no-any-return]  # checked where it is parsed
    except (ImportError, AttributeError) as error:
        raise fail("option", None, name="--epilogue", want=f"module:function ({error})", value=text) from None


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK")
    return tuple(map(int, text.split("x")))


def _operand(text: str) -> tuple[str, list[str]]:
    name, _, dims = text.partition("=")
    if not re.fullmatch(r"[MN1](x[MN1])*", dims):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name and dims, as in bias=N or C=MxN")
    return name, dims.split("x")


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype of PyTorch")
    return found


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device of PyTorch") from None
