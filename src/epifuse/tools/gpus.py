"""Which GPUs have kernels for which products, as a Markdown table: `EPIFUSE_UNTESTED=1 python -m epifuse gpus`.

Each cell is the answer of planning for a product, so the table is true of this version. If `EPIFUSE_UNTESTED` is not
set, GPUs on which no kernel ever ran have no kernels in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from epifuse import api, providers
from epifuse.base.errors import EpifuseError
from epifuse.base.target import TARGETS
from epifuse.request.problem import Constraints
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments

_MODELS: Mapping[int, str] = {
    0: "CPU",
    80: "A100",
    86: "RTX 30, A10",
    89: "RTX 40, L4",
    90: "H100, H200",
    100: "B200",
    103: "B300",
    120: "RTX 50",
}
"""Examples of processors, by compute capability times ten; 0 is the CPU."""


class Input(NamedTuple):
    """Dtypes of A and B, and the precision of their product, under a `name` in the table."""

    name: str
    a: torch.dtype
    b: torch.dtype
    precision: str | None = None


_BF16, _INT8, _E4M3 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
INPUTS = (
    Input("16 bits", _BF16, _BF16),
    Input("tf32", torch.float32, torch.float32, "tf32"),
    Input("float32", torch.float32, torch.float32),
    Input("fp8", _E4M3, _E4M3),
    Input("int8", _INT8, _INT8),
    Input("weight of 8 bits", _BF16, _INT8),
)
_LENGTHS = ((255, "any"), (254, "even"), (256, "16 bytes"))
"""Values of K, and what the table says if the first product with a kernel has this K. K is the distance between lines
of A and of B in elements, so the words say which distances the kernels take."""
_PLAIN = "def epilogue(accum): D = accum; return D"
_EPILOGUES = {
    "sums, maxima": "def epilogue(accum): s, t = sum(accum, dim=0), amax(accum, dim=-1); return s, t",
    "halves of rows": "def epilogue(accum): gate, up = accum.chunk(2, dim=-1); D = silu(gate) * up; return D",
    "heads of rows": "def epilogue(accum): D = accum.unflatten(-1, (-1, 64)).softmax(-1).flatten(-2); return D",
}
_WHOLE_ROWS, _WIDTHS = "def epilogue(accum): D = softmax(accum, dim=-1); return D", (4096, 2048, 1024, 512, 256, 128)
_M, _N = 512, 1024
_OWN = ("cpu", "cutedsl")


def table() -> str:
    """Return the table, with a row for each processor: how far apart lines of A and B may be for each kind of input,
    what epilogues may hold, and whether its kernels ever ran."""
    heads = ["", *(one.name for one in INPUTS), *_EPILOGUES, "whole rows", "its kernels were"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    return "\n".join([*lines, *(_line(_row(cc)) for cc in _MODELS)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(cc: int) -> list[str]:
    target = TARGETS[cc]
    name = f"{_MODELS[cc]} ({target.name})" if cc else _MODELS[cc]
    inputs = [next((said for k, said in _LENGTHS if _has_kernel(cc, one, k=k)), "no") for one in INPUTS]
    epilogues = ["yes" if _has_kernel(cc, INPUTS[0], source) else "no" for source in _EPILOGUES.values()]
    return [name, *inputs, *epilogues, _widest(cc), "tested" if _has_run(cc) else "compiled, never run"]


def _has_run(cc: int) -> bool:
    specs = [spec for name in _OWN for spec in providers.load(name).specs()]
    return any(cc in spec.ccs and cc not in spec.never_on for spec in specs)


def _widest(cc: int) -> str:
    """The largest N, of powers of two, that an epilogue may have that needs whole rows, in words."""
    found = next((n for n in _WIDTHS if _has_kernel(cc, INPUTS[0], _WHOLE_ROWS, n=n)), None)
    if found == _WIDTHS[0]:
        return "any N"
    return "no" if found is None else f"N up to {found}"


def _has_kernel(cc: int, given: Input, source: str = _PLAIN, *, n: int = _N, k: int = 256) -> bool:
    a = torch.empty(_M, k, dtype=given.a, device="meta")
    b = torch.empty(n, k, dtype=given.b, device="meta").t()
    epilogue = EpilogueArguments.partial(source, {})
    args = GemmArguments(a, b, epilogue=epilogue, constraints=Constraints(precision=given.precision))
    try:
        return bool(api.get_kernels(args, cc=cc, limit=1, providers=_OWN))
    except EpifuseError:
        return False
