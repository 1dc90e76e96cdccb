"""Paired, interleaved timing: every round runs each variant once, and ratios are of times of the same round."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import epifuse


def interleave(variants: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each variant in each round. Results are freed outside the timed span."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(warmup + rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            result = run()
            elapsed = time.perf_counter() - start
            del result
            if round_ >= warmup:
                seconds[name].append(elapsed)
    return seconds


def paired_ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """The median of the ratios name / base of all rounds, and its 95 % interval, from the order statistics."""
    ratios = sorted(x / y for x, y in zip(seconds[name], seconds[base], strict=True))
    count = len(ratios)
    # Binomial bounds of the median, normal approximation: ranks n/2 -+ 0.98 sqrt(n).
    low = max(int(count / 2 - 0.98 * count**0.5), 0)
    high = min(int(count / 2 + 0.98 * count**0.5), count - 1)
    return statistics.median(ratios), ratios[low], ratios[high]


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine, the versions and the date of a measurement."""
    gpu = {}
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        gpu = {"device": found.name, "uuid": f"GPU-{found.uuid}"}
    return {
        "date": time.strftime("%Y-%m-%d"),
        **gpu,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "epifuse": epifuse.__version__,
    }


def command(words: Sequence[str]) -> str:
    """`words`, which is `sys.argv`, as a command line. Options for output paths are left out, as they name private
    folders."""
    kept, destination = [], False
    for word in words[1:]:
        option, _, value = word.partition("=")
        if not destination and option not in _DESTINATIONS:
            kept.append(word)
        destination = option in _DESTINATIONS and not value
    return " ".join(["python", f"benchmarks/{Path(words[0]).name}", *kept])


_DESTINATIONS = ("--save", "--chart")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write results as JSON, as committed files have it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
