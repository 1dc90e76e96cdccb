"""Count the machine instructions for one value that each function of an epilogue takes in the Hopper kernel.

python benchmarks/epilogue_instructions.py --save benchmarks/results/

Needs no GPU, but the wheel nvidia-cuda-nvdisasm. Each function of the accumulator is compiled in 128 x 128 ping-pong
tiles, where a thread has 128 values. It is stored as bfloat16, for which the kernel may compute in a narrower form, and
as float32. The instructions of the plain product are subtracted. `costs.py` contains these numbers, rounded.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.providers.cutedsl import load

_SPEC = "sm90_gemm_128x128_pingpong_2x1"
_VALUES = 128

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda accum: accum + 2.5,
    "mul": lambda accum: accum * 2.5,
    "abs": lambda accum: torch.abs(accum),
    "div": lambda accum: 1.5 / accum,
    "sign": lambda accum: torch.sign(accum),
    "sqrt": lambda accum: torch.sqrt(accum),
    "rsqrt": lambda accum: torch.rsqrt(accum),
    "reciprocal": lambda accum: torch.reciprocal(accum),
    "pow": lambda accum: accum**2.3,
    "exp": lambda accum: torch.exp(accum),
    "exp2": lambda accum: torch.exp2(accum),
    "log": lambda accum: torch.log(accum),
    "log2": lambda accum: torch.log2(accum),
    "log1p": lambda accum: torch.log1p(accum),
    "sin": lambda accum: torch.sin(accum),
    "cos": lambda accum: torch.cos(accum),
    "tan": lambda accum: torch.tan(accum),
    "tanh": lambda accum: torch.tanh(accum),
    "erf": lambda accum: torch.erf(accum),
    "atan2": lambda accum: torch.atan2(accum, accum + 1.0),
    "clip": lambda accum: torch.clamp(accum, -1.0, 2.0),
    "where": lambda accum: torch.where(accum > 0.5, accum, 1.0),
    "floor": lambda accum: torch.floor(accum),
    "floor_divide": lambda accum: accum.to(torch.int32) // 7,
    "remainder": lambda accum: accum.to(torch.int32) % 7,
    "bitwise_and": lambda accum: accum.to(torch.int32) & 255,
    "sigmoid": lambda accum: torch.sigmoid(accum),
    "silu": lambda accum: F.silu(accum),
    "gelu_tanh": lambda accum: F.gelu(accum, approximate="tanh"),
    "gelu_erf": lambda accum: F.gelu(accum),
    "dgelu_tanh": lambda accum: ef.dgelu_tanh(accum, accum),
    "dgelu_erf": lambda accum: ef.dgelu_erf(accum, accum),
    "expm1": lambda accum: torch.expm1(accum),
    "softplus": lambda accum: F.softplus(accum),
    "logsigmoid": lambda accum: F.logsigmoid(accum),
    "mish": lambda accum: F.mish(accum),
    "philox_rand": lambda accum: ef.dropout(accum, 0.1, 7),
}
"""Functions by the names of rows of the device table. The count includes other operations in the text: a cast to int32
and back takes two instructions."""


REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": lambda x: ef.sum(x, dim=-1, keepdim=True),
    "amax": lambda x: ef.amax(x, dim=-1, keepdim=True),
    "sum_of_squares": lambda x: ef.sum(x * x, dim=-1, keepdim=True),
    "logsumexp": lambda x: ef.logsumexp(x, dim=-1, keepdim=True),
    "sum_log1p_exp": lambda x: ef.sum(ef.softplus(x), dim=-1, keepdim=True),
}


def epilogue_of(name: str, *, full: bool) -> Callable[..., Any]:
    """The epilogue that computes the function `name`, or returns the accumulator if there is none of that name.

    It stores float32 if `full`, else A's dtype, which is bfloat16.
    """
    if name in REDUCTIONS:
        reduction = REDUCTIONS[name]

        def reduced(accum: Any) -> Any:
            D, R = accum, reduction(accum)
            return D, R

        return reduced
    function = FUNCTIONS.get(name, lambda accum: accum)
    return (lambda accum: function(accum).to(torch.float32)) if full else function


def count(name: str, full: bool) -> int:
    """The number of machine instructions of the main kernel, without NOP."""
    from epifuse.providers.cutedsl.compile import compile_text

    a, b = (torch.empty(4096, 1024, dtype=torch.bfloat16) for _ in range(2))
    args = ef.GemmArguments(a, b.T, epilogue=ef.EpilogueArguments.partial(epilogue_of(name, full=full), {}))
    kernels = {each.plan.spec.name: each.plan for each in ef.get_kernels(args, cc=90)}
    with tempfile.TemporaryDirectory() as folder:
        compile_text(kernels[_SPEC].allocation.program.text, f"{load.OPTIONS} --keep-cubin --dump-dir={folder}")
        found = [counted(path) for path in Path(folder).glob("*.cubin")]
    return max(found)  # a reduction has a second, smaller kernel


def counted(cubin: Path) -> int:
    """The number of instructions of the largest kernel in a cubin file, without NOP."""
    text = disassembled(cubin)
    line = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+\s+)?(?!NOP)[A-Z]", re.MULTILINE)
    return max(len(line.findall(kernel)) for kernel in text.split(".section\t.text.")[1:])


def disassembled(cubin: Path) -> str:
    """The disassembled text of a cubin file."""
    (nvdisasm,) = (file.locate() for file in files("nvidia-cuda-nvdisasm") or () if file.name == "nvdisasm")
    return subprocess.run([nvdisasm, cubin], check=True, capture_output=True, text=True).stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="a folder")
    options = parser.parse_args(arguments)
    names = ["", *FUNCTIONS, *REDUCTIONS]
    found: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(2) as pool:
        for kind in ("narrow", "full"):
            plain, *counts = pool.map(count, names, [kind == "full"] * len(names))
            for name, number in zip(names[1:], counts, strict=True):
                found.setdefault(name, {})[kind] = round((number - plain) / _VALUES, 1)
                print(f"{name:16} {kind:8} {found[name][kind]:6.1f}", flush=True)
    if options.save:
        versions = {name: version(name) for name in ("torch", "nvidia-cutlass-dsl")}
        data = {"date": date.today().isoformat(), **versions, "kernel": _SPEC, "plain": plain, "a value": found}
        (options.save / "epilogue_instructions.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
