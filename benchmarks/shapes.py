"""Judge the choice of kernels on shapes that were not fitted to: products drawn from public models (layers.py).

    python benchmarks/shapes.py pick --seed COMMIT --save out/shapes.json
    python benchmarks/shapes.py judge --seed COMMIT --save out/shapes.json
    python benchmarks/shapes.py report out/shapes.json --chart out/shapes.png
    python benchmarks/shapes.py foretell out/shapes.json

`pick` times every design of each product by `ef.tune`. `judge` is another run. It times, interleaved, the design that
is chosen without measuring, the fastest one of `pick`, cuBLAS, bias + gelu by epifuse and by cuBLASLt, and QuACK if it
is installed. Products are measured in the order in which they are drawn. Results are saved after each product, and
those in the file are not measured again. So a further call continues one that ended early (`--seconds`), or measures
another slice (`--part 1/3`). `report` merges files. `foretell` needs no GPU: it tells which of the designs that a
`pick` timed is chosen now, and compares their times.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gemm_variants
import shapes_report
import torch
from gemm_cases import CASES, Case, Operands, Outputs
from layers import Product, draw, parsed
from timing import command, machine
from torch._subclasses.fake_tensor import FakeTensorMode

import epifuse as ef
from epifuse import providers
from epifuse.base.processors import DEFAULT, GPUS
from epifuse.base.target import TARGETS
from epifuse.plan import Plan, select
from epifuse.runtime.precompile import compile_ahead
from epifuse.runtime.timing import in_turn

PLAIN, GELU = (next(case for case in CASES if case.name == name) for name in ("plain", "gelu"))
_EXCEEDED, _MOST_SETS = 4, 64  # sets of operands exceed the L2 cache so many times; the largest number of sets
_ROUNDS = 20

Calls = list[Callable[[], Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    options = _options().parse_args(argv)
    if options.run in ("pick", "judge"):
        return measure(options)
    saved = merged([json.loads(path.read_text()) for path in options.files])
    if options.save:
        _write(options.save, saved)
    print(shapes_report.text(saved) if options.run == "report" else shapes_report.foretold(foretell(saved)))
    if options.chart:
        shapes_report.chart(saved, options.chart)
    return 0


def measure(options: argparse.Namespace) -> int:
    """Measure what is missing in the file. Return an exit status, which is 3 if no time was left."""
    torch.manual_seed(0)
    begun, products = time.monotonic(), options.products or draw(options.seed, options.count)
    saved = json.loads(options.save.read_text()) if options.save.exists() else {"products": {}}
    rows = saved["products"]
    saved |= {**machine(options.device), "seed": options.seed, "command": command(sys.argv)}
    mine = part_of(products, options.part)
    if options.run == "judge":
        mine = [product for product in mine if "pick" in rows.get(product.name, {})]
    if not options.anew:
        mine = [product for product in mine if options.run not in rows.get(product.name, {})]
    plans = (_judged_plans if options.run == "judge" else _all_plans)(mine, rows, options.device)
    print(compile_ahead(plans, None, progress=True), flush=True)
    for product in mine:
        if time.monotonic() - begun > options.seconds:
            print("no time is left: call it again", flush=True)
            return 3
        row = rows.setdefault(product.name, {"of": product.of})
        try:
            row[options.run] = (pick if options.run == "pick" else judge)(product, row, options)
        except (ef.errors.EpifuseError, torch.OutOfMemoryError) as error:
            row[options.run] = {"failed": str(error).splitlines()[0]}
        print(f"{product.name}: {told(row[options.run])}", flush=True)
        _write(options.save, saved)
        torch.cuda.empty_cache()
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = parser.add_subparsers(dest="run", required=True)
    for name in ("pick", "judge"):
        run = runs.add_parser(name)
        run.add_argument("--seed", default="constants", help="of the draw: the commit that is judged")
        run.add_argument("--count", type=int, default=150)
        run.add_argument("--products", type=_products, help="as in 4096x4096x4096,tn:1024x1024x65536,nn:16x256x256x64")
        run.add_argument("--part", type=_part, default=(1, 1), help="as in 1/3")
        run.add_argument("--seconds", type=float, default=math.inf, help="after which no product is begun")
        run.add_argument("--device", default="cuda", help="cpu tries the program alone")
        run.add_argument("--anew", action="store_true", help="also what the file has")
        run.add_argument("--tuned-peers", action="store_true", help="QuACK tuned, too, which takes long")
        run.add_argument("--save", type=Path, required=True)
    for name in ("report", "foretell"):
        report = runs.add_parser(name)
        report.add_argument("files", type=Path, nargs="+")
        report.add_argument("--save", type=Path)
        report.add_argument("--chart", type=Path)
    return parser


def _products(text: str) -> list[Product]:
    return [*map(parsed, text.split(","))]


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not as in 1/3")
    return int(index), int(count)


def part_of(products: Sequence[Product], part: tuple[int, int]) -> Sequence[Product]:
    """Slice `part[0]`, counted from 1, of `part[1]` slices of the products."""
    index, count = part
    return products[len(products) * (index - 1) // count : len(products) * index // count]


def merged(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the results of several calls. If two measured a product, the later file counts. Raises `ValueError` if GPUs
    or seeds differ."""
    if len({(file.get("device"), file["seed"]) for file in files}) > 1:
        raise ValueError("results of different devices or seeds are not merged")
    products: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, row in file["products"].items():
            products[name] = {**products.get(name, {}), **row}
    return {**files[-1], "products": products}


def told(found: Mapping[str, Any]) -> str:
    """A line of progress: the fastest variants, and the chosen one."""
    if "failed" in found:
        return str(found["failed"])
    times = found["microseconds"]
    shown = sorted(times.items(), key=lambda each: each[1])[:7]
    return ", ".join(f"{name} {time:.1f}" for name, time in shown) + f"; chosen {found['chosen']}"


# --- without a GPU ----------------------------------------------------------------------------------------------------


def foretell(saved: Mapping[str, Any]) -> dict[str, tuple[str, str, float]]:
    """By product: the design that is chosen now among those that a `pick` timed, the fastest one, and the ratio of
    their times."""
    found = {}
    for name, plans in picked(saved):
        (chosen, time), *_ = plans.items()
        best = min(plans, key=plans.__getitem__)
        found[name] = chosen.spec.name, best.spec.name, time / plans[best]
    return found


def picked(saved: Mapping[str, Any]) -> Iterator[tuple[str, dict[Plan, float]]]:
    """Yield each product of a file with its present plans that a `pick` timed, and their microseconds.

    Plans are made for the file's GPU. The one that is chosen now comes first.
    """
    target = replace(TARGETS[90], processor=GPUS[model(saved)])
    for name, row in saved["products"].items():
        times = row.get("pick", {}).get("microseconds", {})
        args = PLAIN.arguments(operands(parsed(name), "meta"))
        plans = select(args.structure, args.problem._replace(target=target), providers.candidates()).plans
        if timed := {plan: float(times[plan.spec.name]) for plan in plans if plan.spec.name in times}:
            yield name, timed


def model(saved: Mapping[str, Any]) -> str:
    """The GPU model that a file was measured on, a key of `GPUS`."""
    return next((word for word in GPUS if word in str(saved.get("device"))), DEFAULT)


def _all_plans(products: Sequence[Product], rows: Mapping[str, Any], device: str) -> list[Plan]:
    """The plans of all kernels that `pick` times, so that those of several products are compiled in parallel."""
    with FakeTensorMode():
        made = [PLAIN.arguments(operands(product, device)) for product in products]
        return [kernel.plan for args in made for kernel in ef.get_kernels(args)]


def _judged_plans(products: Sequence[Product], rows: Mapping[str, Any], device: str) -> list[Plan]:
    """The plans of epifuse's kernels that `judge` times, so that they are compiled in parallel."""
    plans = []
    with FakeTensorMode():
        for product in products:
            x = operands(product, device)
            times = rows[product.name]["pick"].get("microseconds", {})
            kernels = ef.get_kernels(PLAIN.arguments(x))
            best = min(times, key=times.__getitem__) if times else None
            plans += [kernel.plan for kernel in kernels if kernel is kernels[0] or kernel.spec.name == best]
            if product.batch == 1:
                plans += [kernel.plan for kernel in ef.get_kernels(GELU.arguments(x), limit=1)]
    return plans


# --- measuring --------------------------------------------------------------------------------------------------------


def pick(product: Product, row: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Time every design of a product. Return microseconds, and the design that is chosen without measuring."""
    args = PLAIN.arguments(operands(product, options.device))
    done = ef.tune(args, anew=True, progress=False)
    if not done.results:
        return {"failed": str(done)}
    further = {"left out": dict(done.failed)} if done.failed else {}
    return {"chosen": _chosen(args), "microseconds": dict(done.results[0].microseconds), **further}


def judge(product: Product, row: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Time epifuse's choice, the fastest design of `pick`, and peers. Return microseconds and errors of results."""
    picked = row["pick"]
    if "failed" in picked:
        return {"failed": "nothing was picked"}
    sets = sets_of(product, options.device)
    best = min(picked["microseconds"], key=picked["microseconds"].__getitem__)
    chosen = _chosen(PLAIN.arguments(sets[0]))
    made: dict[str, Calls] = {}
    errors, skipped = {}, {}
    for name, case, prepare in _variants(product, chosen, best, options):
        try:
            calls = prepare(sets)
            errors[name] = _errors(case, calls[0], sets[0])
            made[name] = calls
        except Exception as error:  # a peer may be missing, or may raise anything
            skipped[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    taken = in_turn([*made.values()], torch.device(options.device), _ROUNDS, close=math.inf)
    times = {name: round(1e6 * statistics.median(each), 3) for name, each in zip(made, taken, strict=True)}
    if chosen == best and "ours" in times:
        times["best"] = times["ours"]
    return {"chosen": chosen, "best": best, "microseconds": times, "errors": errors, "skipped": skipped}


Variant = tuple[str, Case, Callable[[Sequence[Operands]], Calls]]


def _variants(product: Product, chosen: str, best: str, options: argparse.Namespace) -> list[Variant]:
    found: list[Variant] = [("ours", PLAIN, partial(_design, PLAIN, None)), ("cuBLAS", PLAIN, cublas)]
    if best != chosen:
        found.append(("best", PLAIN, partial(_design, PLAIN, best)))
    if product.batch == 1:
        peers = {"gelu cuBLASLt": (GELU, "cuBLASLt"), "QuACK": (PLAIN, "QuACK")}
        found += [(name, case, partial(_peer, case, peer)) for name, (case, peer) in peers.items()]
        found.append(("gelu ours", GELU, partial(_design, GELU, None)))
        if options.tuned_peers:
            found.append(("QuACK tuned", PLAIN, _tuned_quack))
    return found


def operands(product: Product, device: str) -> Operands:
    """Random operands, the weight scaled as in a layer. Only A, B, bias and D are used; C and preact are D."""
    m, n, k, batch, form, _ = product
    before = (batch,) if batch > 1 else ()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*before, *shape, dtype=torch.bfloat16, device=device)

    a = normal(k, m).mT if form == "tn" else normal(m, k)
    b = normal(n, k).mul_(k**-0.5).mT if form == "nt" else normal(k, n).mul_(k**-0.5)
    out = torch.empty(*before, m, n, dtype=torch.bfloat16, device=device)
    return Operands(a, b, torch.randn(n, dtype=torch.bfloat16, device=device), out, out, out)


def sets_of(product: Product, device: str) -> list[Operands]:
    """Make so many sets of operands that a call finds none of its own in the L2 cache."""
    l2: int = torch.cuda.get_device_properties(device).L2_cache_size if device != "cpu" else 0
    count = min(max(1, math.ceil(_EXCEEDED * l2 / product.bytes)), _MOST_SETS)
    return [operands(product, device) for _ in range(count)]


def _chosen(args: ef.GemmArguments) -> str:
    return ef.get_kernels(args, limit=1)[0].metadata.kernel_name


def _design(case: Case, name: str | None, sets: Sequence[Operands]) -> Calls:
    """Calls of epifuse's kernel of this name; None for the one that is chosen."""
    arguments = [case.arguments(x) for x in sets]
    wanted = None if name is None else lambda metadata: metadata.kernel_name == name
    kernel = ef.get_kernels(arguments[0], wanted, limit=1)[0]
    artifact = kernel.compile(arguments[0])
    return [partial(kernel.run, args, compiled_artifact=artifact) for args in arguments]


def cublas(sets: Sequence[Operands]) -> Calls:
    """Calls of PyTorch's product, for each set."""
    function = torch.bmm if sets[0].a.dim() == 3 else torch.mm
    return [partial(function, x.a, x.b, out=x.D) for x in sets]


def _peer(case: Case, name: str, sets: Sequence[Operands]) -> Calls:
    return [partial(case.peers[name].run, x) for x in sets]


def _tuned_quack(sets: Sequence[Operands]) -> Calls:
    from quack.gemm_interface import gemm

    return [partial(gemm, x.a, x.b, out=x.D, tuned=True) for x in sets]


def _errors(case: Case, call: Callable[[], Any], x: Operands) -> list[float]:
    """The relative error of the D that a call writes. Raises `WrongResultError` if it is too large."""
    x.D.fill_(float("nan"))
    call()
    want: Outputs = case.eager(x.a.float(), x.b.float(), x.bias.float(), x.bias.float())
    return [round(error, 6) for error in gemm_variants.compare((x.D,), want)]


def _write(path: Path, saved: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved) + "\n")


if __name__ == "__main__":
    sys.exit(main())
