"""The command `explain`: print the graph, the plan and the refusals of an epilogue in a file. Only shapes are given."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from epifuse.api import Explanation, explain
from epifuse.base.errors import fail
from epifuse.base.target import TARGETS, target_of
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments
from epifuse.tools import described
from epifuse.tools.lines import rows, wrapped

_META = torch.device("meta")
_AXES = ("M", "N", "K")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to `parser`."""
    parser.add_argument(
        "epilogue", metavar="FILE.py:FUNCTION", help="or module:function, or source text; the file is imported"
    )
    for axis in _AXES:
        parser.add_argument(f"--{axis.lower()}", type=int, metavar=axis)
    parser.add_argument("--mnk", type=int, nargs=3, metavar=_AXES, help="the three at once; 4096 each unless given")
    parser.add_argument("--batch", type=int, metavar="L", help="as many products at once; one unless given")
    parser.add_argument("--cc", type=int, help="of a GPU, as 80 or 90; 0 plans for the CPU; else for this machine")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        type=described.dtype,
        help="of A, B and operands, which are float32 beside 8 bits; bfloat16 unless given",
    )
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        type=described.operand,
        metavar="NAME=WHAT",
        help="an operand, as in bias=N, C=MxN, labels=Mx1:int64 or alpha=0.5",
    )
    described.add_constraints(parser)


def run(options: argparse.Namespace) -> int:
    """Print the explanation. Return 1 if no kernel can run it, else 0. Raises `ArgumentError` and parsing errors."""
    extents = _extents(options)
    function = described.epilogue(options.epilogue)
    operands = described.Operands.of(function, options.arg)
    made = operands.made(extents, options.dtype, _META)
    lead = (extents["L"],) if options.batch is not None else ()
    args = GemmArguments(
        described.empty((*lead, extents["M"], extents["K"]), options.dtype, _META),
        described.empty((*lead, extents["N"], extents["K"]), options.dtype, _META).mT,
        epilogue=EpilogueArguments.partial(function, made),
        constraints=described.constraints(options),
    )
    explanation = explain(args, cc=_here() if options.cc is None else options.cc)
    print(*rows(_heading(args, operands)), sep="\n")
    print()
    print(_text(explanation))
    return 0 if explanation.plan is not None else 1


def _extents(options: argparse.Namespace) -> dict[str, int]:
    given = dict(zip(_AXES, options.mnk or (4096, 4096, 4096), strict=True))
    given.update({axis: value for axis in _AXES if (value := getattr(options, axis.lower())) is not None})
    given["L"] = 1 if options.batch is None else options.batch
    for axis, value in given.items():
        if value < 0:
            raise fail("option", None, name=axis, want="a whole number, 0 or more", value=value)
    return given


def _here() -> int | None:
    """The compute capability of this machine's GPU times ten, if plans can be made for it, else None."""
    cc = target_of("cuda").cc if torch.cuda.is_available() else -1
    return cc if cc in TARGETS else None


def _heading(args: GemmArguments, operands: described.Operands) -> Iterator[tuple[str, str]]:
    dtype = str(args.A.dtype).removeprefix("torch.")
    yield "product", f"{tuple(args.A.shape)} @ {tuple(args.B.shape)}, {dtype}; B is the transpose of a weight (N, K)"
    yield from operands.lines


def _text(explanation: Explanation) -> str:
    """The explanation, wrapped except for lines of the user's source: the caret below these marks a column."""
    text, loc = str(explanation), explanation.selection.loc
    source = str(loc) if loc else ""
    body = text.removesuffix(source).rstrip("\n")
    return "\n".join(filter(None, (wrapped(body), source)))
