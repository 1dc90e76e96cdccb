"""docs/accuracy.md from docs/accuracy.json; `python -m accuracy.table OUT` on a Hopper GPU measures the latter anew."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accuracy.cases import CASES, Case

DOCS = Path(__file__).resolve().parents[2] / "docs"
_SHORT = ("bfloat16", "float16")


def measured(case: Case, stride: int) -> Mapping[str, Any]:
    """One row of the data."""
    import torch

    from accuracy import measure

    built = measure.kernels(case)
    exhaustive = not case.composite and case.arity == 1
    stride = stride if exhaustive else measure.STRIDE
    row: dict[str, Any] = {"name": case.name, "composite": case.composite, "stride": stride}
    row["float32"] = measure.measure_full(case, built["full"], stride)._asdict()
    for name in _SHORT:
        dtype = getattr(torch, name)
        row[name] = measure.measure_short(case, built["narrow"], dtype, measure.short_patterns(dtype))._asdict()
    sample = measure.float_patterns(-(1 << 31), 1 << 31, measure.STRIDE)
    worst = [measure.measure_short(case, built["narrow"], getattr(torch, name), sample, True) for name in _SHORT]
    row["any float32, in 16 bits"] = {"ulp": max(w.ulp for w in worst), "kept": all(w.kept for w in worst)}
    if "fast" in built:
        row["fast_math"] = measure.measure_fast(case, built["fast"])
    return row


def measure_all(stride: int, names: Iterable[str] = ()) -> Mapping[str, Any]:
    """The data: every case, or those named."""
    import cutlass
    import torch

    from accuracy import measure

    chosen = [case for case in CASES if not names or case.name in names]
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cutlass_dsl": cutlass.__version__,
        "command": "python -m accuracy.table ../docs 1, in tests/",
        "sample": measure.STRIDE,
        "rows": [measured(case, stride) for case in chosen],
    }


def render(data: Mapping[str, Any]) -> str:
    """The page."""
    head = _HEAD.format(**data)
    lines = [head, "| function | float32 | PyTorch's | bfloat16 | float16 |", "|---|---:|---:|---:|---:|"]
    for row in data["rows"]:
        cells = [_ulp(row["float32"]["ulp"]), _ulp(row["float32"]["torch"]), *(_ulp(row[n]["ulp"]) for n in _SHORT)]
        lines.append(f"| `{row['name']}` | {' | '.join(cells)} |")
    lines += [_FAST, "| function | absolute | relative |", "|---|---:|---:|"]
    for row in data["rows"]:
        if "fast_math" in row:
            fast = row["fast_math"]
            lines.append(f"| `{row['name']}` | {fast['absolute']:.1e} | {fast['relative']:.1e} |")
    return "\n".join(lines) + "\n"


def _ulp(value: float) -> str:
    return "0" if value == 0 else f"{value:.2f}" if value < 100 else f"{value:.1e}"


_HEAD = """# Accuracy on the GPU

The table has the largest error of each function. A result is compared with the same function in float64, of the float32
argument that the kernel itself has. The unit is one unit in the last place (ulp) of the dtype in which the result is
stored. The page is generated from
[accuracy.json](accuracy.json) ({device}, {date}, PyTorch {torch},
CuTe DSL {cutlass_dsl}). `tests/gpu/test_accuracy.py` checks the promises below on a sample of each function's operands.

- **float32**: a primitive of one operand is measured on all float32 values, every other function on one value in
  {sample}; subnormals, infinities and NaN are included. A primitive has an error of at most 4 ulp. An activation has,
  in each binade, at most twice PyTorch's own float32 error plus 4 ulp. Where epifuse and PyTorch both have large
  figures, the result is near a zero, or below the smallest normal number.
- **bfloat16, float16**: measured on all 65,536 operands. Three results are allowed: the correctly rounded value (an
  error of 0.50 at most), its neighbour (1.50 at most), or a value that is as close as PyTorch's float32 function
  rounded to the dtype. The figure is the largest error among results of the first two kinds.
- A value that is stored only in 16 bits, or only in fp8, is computed with cheaper instructions where that keeps this
  promise: `src/epifuse/providers/cutedsl/precision.py` says which operations may lie between such a value and its
  output. The arguments of a sum, a comparison, a rounding, a cast, an exponential or a reduction are computed as for
  float32. One exception is `sigmoid` in a sum with a number of 1 or more, as in `1 - sigmoid(x)`: its error there is
  2^-21 at most. The derivatives of gelu got their own implementations for 16 bits after the measurement. A test
  executes this code for every operand, with instructions that have the largest errors that PTX allows, and checks the
  same promise. [docs/reductions.md](reductions.md) has the error of a sum of logarithms.
- Comparisons, logic, `where` and integer functions are exact. A quotient or root whose exact value is a float is
  exact.
"""
_FAST = """
## With `fast_math=True`

All outputs are computed with the hardware's approximations, and subnormal numbers may become zero. The table has the
largest errors for arguments of a magnitude up to 16 whose result is a normal number:
"""


def write(data: Mapping[str, Any], folder: Path) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accuracy.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "accuracy.md").write_text(render(data))


if __name__ == "__main__":
    write(measure_all(int(sys.argv[2]), sys.argv[3:]), Path(sys.argv[1]))
