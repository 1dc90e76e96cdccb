"""The command `tune`: measure which kernel is the fastest for given shapes on this machine, and keep that on disk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from epifuse.api import tune
from epifuse.base import store
from epifuse.base.errors import fail
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments
from epifuse.runtime.tuned import merge
from epifuse.tools import described


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to `parser`."""
    parser.add_argument("shapes", nargs="*", type=described.shape, metavar="MxNxK", help="as in 4096x14336x4096")
    parser.add_argument(
        "--epilogue", help="FILE.py:function, module:function or source text; none is the product alone"
    )
    parser.add_argument(
        "--arg",
        "--operand",
        dest="operand",
        action="append",
        default=[],
        type=described.operand,
        metavar="NAME=WHAT",
        help="an operand, as in bias=N, C=MxN, labels=Mx1:int64 or alpha=0.5",
    )
    what = "of A, B and operands, which are float32 beside 8 bits; bfloat16 unless given"
    parser.add_argument("--dtype", default="bfloat16", type=described.dtype, help=what)
    parser.add_argument("--device", type=described.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=described.count, metavar="L", help="as many products at once; one unless given")
    described.add_constraints(parser)
    parser.add_argument("--anew", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--merge", action="append", default=[], type=Path, help="results of another machine's folder")


def run(options: argparse.Namespace) -> int:
    """Merge results, measure shapes and print; return the exit status. B is the transpose of a weight (N, K).

    Raises `ArgumentError` if there is neither a shape nor a folder to merge, and the errors of `tune`.
    """
    if not (options.shapes or options.merge):
        raise fail("option", None, name="tune", want="given shapes as in 4096x14336x4096, or --merge", value=None)
    if options.operand and not options.epilogue:
        raise fail("option", None, name="--arg", want="an operand of an --epilogue", value=options.operand[0][0])
    for path in options.merge:
        print(f"{merge(path)} results from {path}")
    done = tune([_arguments(shape, options) for shape in options.shapes], anew=options.anew)
    if options.shapes:
        print(done)
    if store.is_lost():
        print("nothing was kept: set EPIFUSE_CACHE_DIR to a folder that you own, and may write", file=sys.stderr)
        return 1
    return 0 if done else 1


def _arguments(shape: Sequence[int], options: argparse.Namespace) -> GemmArguments:
    lead = () if options.batch is None else (options.batch,)
    extents = {**dict(zip("MNK", shape, strict=True)), "L": options.batch or 1}

    def empty(dims: Sequence[str]) -> torch.Tensor:
        return described.empty((*lead, *(extents[dim] for dim in dims)), options.dtype, options.device)

    epilogue = None
    if options.epilogue:
        function = described.epilogue(options.epilogue)
        operands = described.Operands.of(function, options.operand)
        epilogue = EpilogueArguments.partial(function, operands.made(extents, options.dtype, options.device))
    constraints = described.constraints(options)
    return GemmArguments(empty("MK"), empty("NK").mT, epilogue=epilogue, constraints=constraints)
