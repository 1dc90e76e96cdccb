"""Judge the choice of kernels for products with epilogues: time all designs that the model puts near its best one.

    python benchmarks/epilogues.py measure --seed COMMIT --save out/epilogues.json
    python benchmarks/epilogues.py foretell out/epilogues.json

`measure` draws products and times these designs interleaved. `foretell` needs no GPU. It tells which of the designs in
a file are chosen now, and compares the times that the file has for them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gemm_cases
import gemm_variants
import shapes
import torch
from gemm_cases import Case, Operands
from gpu_timing import Backlog, interleave
from layers import Product, draw, parsed
from shapes_report import Summary
from timing import command, machine
from torch._subclasses.fake_tensor import FakeTensorMode

import epifuse as ef
from epifuse import providers
from epifuse.base.target import TARGETS
from epifuse.plan import Plan, select
from epifuse.runtime.precompile import compile_ahead

_NEAR, _MOST = 1.25, 11  # designs up to this factor from the model's best one are timed, at most so many
_FEWEST, _OPERATIONS = 256, (4e9, 2.5e11)  # the fewest rows and columns, and the range of operations, of a product
_ROUNDS = 7


def gelu_residual(accum, bias, C):  # type: ignore[no-untyped-def]  # as a user writes it
    """A layer with exact gelu and a residual connection: about 36 instructions a value."""
    D = ef.gelu(accum + bias) + C
    return D


def accumulated(accum, C):  # type: ignore[no-untyped-def]
    """A gradient added to earlier gradients. C and D are float32."""
    D = accum + C
    return D


def _gelu_residual(a: Any, b: Any, bias: Any, c: Any) -> gemm_cases.Outputs:
    return (torch.nn.functional.gelu(torch.addmm(bias, a, b)) + c,)


def _accumulated(a: Any, b: Any, bias: Any, c: Any) -> gemm_cases.Outputs:
    return (torch.addmm(c, a, b),)


HEAVY = Case("gelu_residual", "gelu(A @ B + bias) + C", _gelu_residual, gelu_residual, ("bias", "C"))
ACCUMULATED = Case("accumulated", "A @ B + C, in float32", _accumulated, accumulated, ("C",))
CASES = {case.name: case for case in (shapes.PLAIN, shapes.GELU, HEAVY, ACCUMULATED)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = parser.add_subparsers(dest="run", required=True)
    run = runs.add_parser("measure")
    run.add_argument("--seed", default="epilogues", help="of the draw: the commit that is judged")
    run.add_argument("--count", type=int, default=75)
    run.add_argument("--odd", action="store_true", help="products of odd N, small ones too, in place of layers")
    run.add_argument("--seconds", type=float, default=math.inf, help="after which no product is begun")
    run.add_argument("--save", type=Path, required=True)
    runs.add_parser("foretell").add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(argv)
    if options.run == "measure":
        measure(options)
    for path in [options.save] if options.run == "measure" else options.files:
        for case, ratios in ratios_of(json.loads(path.read_text())).items():
            count, mean, most, worst = Summary.of([*ratios.values()])
            said = f"{count} products, mean {mean:.3f}, 95th percentile {most:.3f}, worst {worst:.3f}"
            print(f"{path.name}, {case}, chosen / best: {said}")
    return 0


def cases_of(product: Product) -> list[Case]:
    """The cases that a product is timed with. A weight's gradient is accumulated; a layer has an activation."""
    names = ("plain", "accumulated") if product.form == "tn" else ("plain", "gelu", "gelu_residual")
    return [CASES[name] for name in names]


def operands(product: Product, case: Case, device: str) -> Operands:
    """Random operands as in shapes.py, with C."""
    x = shapes.operands(product, device)
    dtype = torch.float32 if case is ACCUMULATED else torch.bfloat16
    return x._replace(C=torch.randn(x.D.shape, dtype=dtype, device=device), D=x.D.to(dtype))


def drawn(seed: str, count: int) -> list[Product]:
    """Draw `count` products without batches that TMA can address and that take from about 6 to 400 us."""
    low, high = _OPERATIONS
    found = [
        product
        for product in draw(seed, 30 * count)
        if min(product.m, product.n) >= _FEWEST and product.batch == 1 and product.is_aligned
        if product.form in ("nt", "tn") and low < product.flops < high
    ]
    return found[:count]


def odd(seed: str, count: int) -> list[Product]:
    """Draw products of odd N, whose D cannot be written by TMA. In every third, A and B have to be copied first."""
    drawn = random.Random(seed)

    def extent(most: int) -> int:
        return round(2 ** drawn.uniform(6, most))

    def product(i: int) -> Product:
        m, n, k = extent(13), extent(13) | 1, extent(12)
        return Product(m, n, k | 1 if i % 3 == 0 else -(-k // 8) * 8)

    return [product(i) for i in range(count)]


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    """Compile all kernels, time them, and save after each product."""
    torch.manual_seed(0)
    begun, products = time.monotonic(), (odd if options.odd else drawn)(options.seed, options.count)
    near = {(product, case.name): _near(product, case) for product in products for case in cases_of(product)}
    print(compile_ahead([plan for plans in near.values() for plan in plans], None, progress=True), flush=True)
    found: dict[str, Any] = {}
    saved = {**machine("cuda"), "seed": options.seed, "command": command(sys.argv), "products": found}
    backlog = Backlog()
    for product in products:
        if time.monotonic() - begun > options.seconds:
            break
        found[product.name] = {
            case.name: _times(product, case, near[product, case.name], backlog) for case in cases_of(product)
        }
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(saved) + "\n")
        torch.cuda.empty_cache()


def _near(product: Product, case: Case) -> list[Plan]:
    """The plans to time for a product. They are made with fake tensors, which take no memory."""
    with FakeTensorMode():
        kernels = ef.get_kernels(case.arguments(operands(product, case, "cuda")))
    plans = [kernel.plan for kernel in kernels]
    return [plan for plan in plans if plan.allocation.cost <= _NEAR * plans[0].allocation.cost][:_MOST]


def _times(product: Product, case: Case, plans: Sequence[Plan], backlog: Backlog) -> dict[str, float]:
    """Microseconds of each design. Raises `WrongResultError` if a result is wrong."""
    sets = [operands(product, case, "cuda") for _ in range(2)]
    arguments, want = [case.arguments(x) for x in sets], gemm_variants.reference(case, sets[0])
    names, calls = {plan.spec.name for plan in plans}, {}
    for kernel in ef.get_kernels(arguments[0], lambda metadata: metadata.kernel_name in names):
        artifact = kernel.compile(arguments[0])
        calls[kernel.metadata.kernel_name] = [
            partial(kernel.run, args, compiled_artifact=artifact) for args in arguments
        ]
        gemm_variants.compare((kernel.run(arguments[0], compiled_artifact=artifact)["D"],), want)
    taken = interleave(calls, _ROUNDS, backlog)
    return {name: round(1e6 * statistics.median(seconds), 2) for name, seconds in taken.items()}


# --- without a GPU ----------------------------------------------------------------------------------------------------


def ratios_of(saved: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By case and product, the ratio of two times in a file: of the design that is chosen now, and of the fastest."""
    found: dict[str, dict[str, float]] = {}
    for case, product, times in timed(saved):
        chosen = next(iter(times))
        found.setdefault(case, {})[product] = times[chosen] / min(times.values())
    return found


def timed(saved: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield each case and product of a file, with the microseconds of its designs that still exist.

    The design that is chosen now comes first.
    """
    target = replace(TARGETS[90], processor=shapes.GPUS[shapes.model(saved)])
    for name, cases in saved["products"].items():
        for case, times in cases.items():
            args = CASES[case].arguments(operands(parsed(name), CASES[case], "meta"))
            plans = select(args.structure, args.problem._replace(target=target), providers.candidates()).plans
            if found := {plan.spec.name: times[plan.spec.name] for plan in plans if plan.spec.name in times}:
                yield case, name, found


if __name__ == "__main__":
    sys.exit(main())
