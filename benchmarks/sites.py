"""Measure random sites fused and unfused, and compare the times with the predictions of the compiler's pass.

    python benchmarks/sites.py --save out/ [--count 200] [--seed 1] [--workers 14] [--limit 260]
    python benchmarks/sites.py --again out/sites.json
    python benchmarks/sites.py --save out/ --count 40 --largest 2048 --device cpu --workers 1

A site is a product with the operations around it, see `site_cases.py`. Each is compiled by Inductor alone, and with
each kernel that carries a part of it. --workers processes compile at once, and one at a time measures. After --limit
seconds all are ended, and the measurements so far are saved. --again predicts the sites of a file anew, with the
present sources. It needs no GPU, because the sites are drawn again.

The summary tells how often prediction and measurement decide alike, with and without counting choices that cost less
than 1 % as alike; how much longer all sites take with the predicted choices than with the best ones; and the median,
with a 95 % interval, of the error of predictions. The predicted time of a fused site is the time measured by Inductor
less the predicted gain; its error is relative to the measured time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from site_cases import Case, drawn, graph_of
from timing import machine
from torch.fx import Node

from epifuse import providers
from epifuse.base.processors import GPUS
from epifuse.base.target import TARGETS, target_of
from epifuse.frontend.fx import value_of
from epifuse.plan import settle
from epifuse.pytorch import measure, prediction, sites
from epifuse.pytorch.region import region_of
from epifuse.runtime.timing import interleaved, random_like

_ALIKE = 0.01


# --- a worker ---------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Measure this worker's share of the sites. Write one line of JSON for each."""
    number, of = options.worker
    torch.set_num_threads(max(1, torch.get_num_threads() // of))
    with options.file.open("a", encoding="utf-8") as file:
        for index in range(number, options.count, of):
            case = drawn(index, options.seed, options.largest)
            try:
                found = measured(case, options.device, options.lock)
            except Exception:  # one site may not compile or fit: `say` counts it and prints the error
                found = {"failed": traceback.format_exc()[-3000:]}
            file.write(json.dumps({"index": index, "name": case.name, **found}) + "\n")
            file.flush()


def measured(case: Case, device: str, lock: Path) -> dict[str, Any]:
    """Seconds of a site in each round: by Inductor, with each kernel, and of the product alone."""
    begun = time.perf_counter()
    _, product = graph_of(case, device)
    found = sites.every(product, sites.Known.nothing(), "float32")
    if isinstance(found, sites.Unfused):
        return {"left": found.reason}
    region = region_of(product, [each.cone for each in found])
    if region is None:
        return {"left": "symbols"}
    for each in found:  # compile in this process, not in further ones
        providers.load(each.plan.spec.provider).build(each.plan)
    with alone(lock, device) as held:
        apart, *fused = measure.timed(region, found, held)
        waited = held.seconds
        with held, torch.no_grad():
            bare = interleaved([product_alone(product)], torch.device(device))[0]
    return {
        "plans": [each.plan.spec.name for each in found],
        "took": [len(each.cone.inside) for each in found],
        "product": _rounded(bare),
        "apart": _rounded(apart),
        "fused": [_rounded(each) for each in fused],
        "seconds": round(time.perf_counter() - begun - waited, 2),
        "waited": round(waited, 2),
    }


def product_alone(product: Node) -> Callable[[], Any]:
    """A call of the product by PyTorch, into memory that exists already."""
    inputs = [random_like(value_of(node)) for node in product.all_input_nodes]
    out = random_like(value_of(product))
    function = getattr(torch, str(product.target).split(".")[1])
    return lambda: function(*inputs, out=out)


class Held(contextlib.AbstractContextManager["Held"]):
    """A context in which only this process uses the device. `seconds` is the time that it waited to enter."""

    def __init__(self, file: Any, device: str) -> None:
        self.file, self.device, self.seconds = file, device, 0.0

    def __enter__(self) -> Held:
        begun = time.perf_counter()
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.seconds = time.perf_counter() - begun
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        fcntl.flock(self.file, fcntl.LOCK_UN)


@contextlib.contextmanager
def alone(lock: Path, device: str) -> Iterator[Held]:
    """Yield the context that locks the device by a lock on the file `lock`."""
    with lock.open("w") as file:
        yield Held(file, device)


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [float(f"{each:.5g}") for each in seconds]


# --- all workers ------------------------------------------------------------------------------------------------------


def collect(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the workers. Return what they measured until all were done, or until the limit."""
    children = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Each worker compiles with one thread, and does not use kernels that were compiled before.
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "EPIFUSE_CACHE_DIR": f"{folder}/epifuse",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.workers)),
            **os.environ,
        }
        for number in range(options.workers):
            own = ["--worker", str(number), str(options.workers), "--file", f"{folder}/{number}.jsonl"]
            command = [sys.executable, __file__, *sys.argv[1:], *own, "--lock", f"{folder}/lock"]
            children.append(subprocess.Popen(command, env=environment, start_new_session=True))
        end = time.monotonic() + options.limit
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # its process group includes its children
                child.wait()
        lines = [line for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text().splitlines()]
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # an incomplete line of a worker that was killed
            found.append(json.loads(line))
    return sorted(found, key=lambda each: each["index"])


# --- predictions ------------------------------------------------------------------------------------------------------


def predicted(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each measured site: the times, the choice by prediction (`chosen`), and the choice by measurement (`best`).

    A choice is the number of a kernel, or None for Inductor.
    """
    rows = []
    for one in results["sites"]:
        if "fused" not in one:
            continue
        case = drawn(one["index"], results["seed"], results.get("largest"))
        _, product = graph_of(case, results["where"])
        found = sites.every(product, sites.Known.nothing(), "float32")
        chosen = sites.find(product, sites.Known.nothing(), "float32", predicted=True)
        then = dict(zip(zip(one["took"], one["plans"], strict=True), one["fused"], strict=True))
        now = [(len(each.cone.inside), each.plan.spec.name) for each in found] if isinstance(found, list) else []
        if set(now) != set(then) or "superseded" in one:  # the kernels are not those that were measured
            rows.append({"index": one["index"], "name": case.name, "changed": True})
            continue
        apart, fused = statistics.median(one["apart"]), [statistics.median(then[each]) for each in now]
        which = None
        if not isinstance(chosen, sites.Unfused):
            which = now.index((len(chosen.cone.inside), chosen.plan.spec.name))
        best = min(range(len(fused)), key=fused.__getitem__)
        rows.append(
            {
                "index": one["index"],
                "name": case.name,
                "apart": apart,
                "fused": fused,
                "gains": [prediction.predicted(each.site).gain for each in found],
                "chosen": which,
                "best": best if fused[best] < apart else None,
                "sites": [each.site._asdict() for each in found],
            }
        )
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of the rows. Times are in seconds."""
    rows = [row for row in rows if "changed" not in row]
    taken, best, same, close, errors, gains = [], [], 0, 0, [], []
    for row in rows:
        ways = {None: row["apart"], **dict(enumerate(row["fused"]))}
        taken.append(ways[row["chosen"]])
        best.append(ways[row["best"]])
        is_same = (row["chosen"] is None) == (row["best"] is None)
        same += is_same
        close += is_same or taken[-1] <= (1 + _ALIKE) * best[-1]
        for gain, fused in zip(row["gains"], row["fused"], strict=True):
            errors.append(abs(row["apart"] - gain - fused) / fused)
            gains.append(abs(row["apart"] - gain - fused) / max(abs(row["apart"] - fused), 1e-9))
    return {
        "sites": len(rows),
        "measured_fused": sum(row["best"] is not None for row in rows),
        "predicted_fused": sum(row["chosen"] is not None for row in rows),
        "same_decision": same / len(rows),
        "same_or_within_1_percent": close / len(rows),
        "lost": sum(taken) / sum(best) - 1,
        "gained_by_measuring": 1 - sum(best) / sum(row["apart"] for row in rows),
        "gained_by_predicting": 1 - sum(taken) / sum(row["apart"] for row in rows),
        "error_of_time": _median(errors),
        "error_of_gain": _median(gains),
    }


def _median(values: Sequence[float]) -> dict[str, float]:
    """The median with a 95 % interval, by 2000 bootstrap samples of the values."""
    drawn_ = random.Random(0)
    medians = sorted(statistics.median(drawn_.choices(values, k=len(values))) for _ in range(2000))
    return {"median": statistics.median(values), "low": medians[50], "high": medians[1949]}


def say(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], worst: int) -> None:
    """Print the summary, and the `worst` sites, at which the predicted choice loses most."""
    lost = sorted(
        (row for row in rows if "changed" not in row),
        key=lambda row: (
            min(row["apart"], *row["fused"]) - {None: row["apart"], **dict(enumerate(row["fused"]))}[row["chosen"]]
        ),
    )
    for row in lost[:worst]:
        fused = ", ".join(f"{1e6 * f:.1f} ({1e6 * g:+.1f})" for f, g in zip(row["fused"], row["gains"], strict=True))
        times = f"apart {1e6 * row['apart']:.1f}, fused (gain) {fused}: {row['chosen']}, {row['best']}"
        print(f"{row['index']:4} {row['name']:60} {times}")
    failed = [one for one in results["sites"] if "failed" in one]
    for one in failed[:5]:
        print(f"{one['index']:4} {one['name']}: {one['failed'].strip().splitlines()[-1][:300]}")
    left, changed = sum("left" in one for one in results["sites"]), sum("changed" in row for row in rows)
    print(f"{len(failed)} failed, {left} left, {changed} changed since")
    if any("changed" not in row for row in rows):
        print(json.dumps(summary(rows), indent=1))


def main() -> int:
    """Measure, save and print; with --again, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="a folder")
    parser.add_argument("--again", type=Path, help="a file")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--limit", type=float, default=260, help="seconds")
    parser.add_argument("--worst", type=int, default=20, help="sites to show")
    parser.add_argument("--largest", type=int, help="the largest extent of a site")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    if options.again:
        results = json.loads(options.again.read_text())
    else:
        options.save.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        found = collect(options)
        results = {
            **machine(options.device),
            "where": options.device,
            "seed": options.seed,
            "largest": options.largest,
            "count": options.count,
            "seconds": round(time.monotonic() - begun, 1),
            "rates": target_of(options.device).processor._asdict(),
            "sites": found,
        }
        _write(options.save / "sites.json", results)
    if options.again and results["where"] == "cuda":  # predict for the device that the file was measured on
        device = replace(TARGETS[90], processor=GPUS["H200"]._replace(**results["rates"]))
        settle.target_of = lambda _: device
    rows = predicted(results)
    if options.save:
        _write(options.save / "predicted.json", {"summary": summary(rows), "rows": rows})
    say(results, rows, options.worst)
    return 0


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, default=str) + "\n", encoding="utf-8")  # str is for a target


if __name__ == "__main__":
    sys.exit(main())
