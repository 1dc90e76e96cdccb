"""Report on a run of shapes.py: ratios of the chosen design's time to that of the best design and of peers, and whether
they are within their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from layers import parsed

Ratios = dict[str, float]
"""A ratio for each product."""

LEAST_ROWS = 512  # the choice is judged for products of at least so many rows
LEAST_MICROSECONDS = 10.0  # products for which cuBLAS takes less are not compared with it


class Summary(NamedTuple):
    """A summary of ratios of times: their number, geometric mean, 95th percentile and the worst."""

    count: int
    mean: float
    most: float
    worst: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Summary:
        """Summarise at least one ratio."""
        ranked = sorted(ratios)
        mean = math.exp(sum(map(math.log, ranked)) / len(ranked))
        return Summary(len(ranked), mean, ranked[math.ceil(0.95 * len(ranked)) - 1], ranked[-1])


class Bound(NamedTuple):
    """A condition on ratios: its text, and a function that tells whether ratios satisfy it."""

    word: str
    holds: Callable[[Sequence[float]], bool]


def mean(most: float) -> Bound:
    """The geometric mean is at most this."""
    return Bound(f"geometric mean <= {most}", lambda ratios: Summary.of(ratios).mean <= most)


def share(above: float, most: float) -> Bound:
    """At most the share `most` of the ratios is greater than `above`."""
    word = f"at most {most:.0%} above {above}" if most else f"none above {above}"
    return Bound(word, lambda ratios: sum(ratio > above for ratio in ratios) <= most * len(ratios))


def figures(saved: Mapping[str, Any]) -> dict[str, tuple[Ratios, tuple[Bound, ...]]]:
    """By comparison, the ratios of times and their bounds. A comparison without measurements is left out."""
    h200 = "H200" in str(saved.get("device", ""))
    times = {
        name: row["judge"]["microseconds"]
        for name, row in saved["products"].items()
        if "microseconds" in row.get("judge", {})
    }

    def ratios(ours: str, *theirs: str, least: float = LEAST_MICROSECONDS, rows: int = 0) -> Ratios:
        found = {}
        for name, each in times.items():
            beside = [each[other] for other in theirs if other in each]
            long = each.get("cuBLAS", math.inf) >= least
            if ours in each and beside and long and parsed(name).m >= rows:
                found[name] = each[ours] / min(beside)
        return found

    choice = ratios("ours", "best", least=0.0, rows=LEAST_ROWS)
    tuned = ratios("best", "cuBLAS", "QuACK", "QuACK tuned", "ours", least=0.0)
    found = {
        f"chosen / best of our designs, M >= {LEAST_ROWS}": (choice, (mean(1.02), share(1.06, 0.05), share(1.12, 0))),
        "chosen / best of our designs, fewer rows": (
            {name: ratio for name, ratio in ratios("ours", "best", least=0.0).items() if name not in choice},
            (),
        ),
        "chosen / cuBLAS": (
            ratios("ours", "cuBLAS"),
            (mean(0.95 if h200 else 0.97), share(1.03, 0.02), share(1.06, 0)),
        ),
        "bias + gelu / cuBLASLt": (ratios("gelu ours", "gelu cuBLASLt"), (mean(0.85), share(1.02, 0))),
        "chosen / QuACK untuned": (ratios("ours", "QuACK"), (share(1.03, 0.05),)),
        "tuned / the best of cuBLAS, QuACK and our choice": (tuned, (share(1.01, 0.05), share(1.03, 0))),
    }
    return {name: each for name, each in found.items() if each[0]}


def text(saved: Mapping[str, Any], worst: int = 8) -> str:
    """The figures as text, each with its bounds and the products with the `worst` largest ratios."""
    lines = [f"{saved.get('device', 'no GPU')}, {saved.get('date', '')}, seed {saved['seed']}"]
    for name, (ratios, bounds) in figures(saved).items():
        count, middle, most, last = Summary.of([*ratios.values()])
        lines.append(f"{name}: {count} products, mean {middle:.3f}, 95th percentile {most:.3f}, worst {last:.3f}")
        lines += [f"  {'holds' if bound.holds([*ratios.values()]) else 'FAILS'}: {bound.word}" for bound in bounds]
        ranked = sorted(ratios.items(), key=lambda each: -each[1])[:worst]
        lines += [f"    {ratio:.3f}  {_described(product, saved)}" for product, ratio in ranked if ratio > 1.0]
    rows = saved["products"].items()
    failed = [f"{name}: {row[run]['failed']}" for name, row in rows for run in ("pick", "judge") if _fails(row, run)]
    waiting = sum("judge" not in row for _, row in rows)
    lines += [f"{waiting} products are not judged yet"] * bool(waiting) + [f"failed: {line}" for line in failed]
    skipped = {f"{peer}: {why}" for _, row in rows for peer, why in row.get("judge", {}).get("skipped", {}).items()}
    return "\n".join([*lines, *(f"skipped: {line}" for line in sorted(skipped))])


def foretold(found: Mapping[str, tuple[str, str, float]], worst: int = 20) -> str:
    """The report of `foretell` as text. The ratios are a little too large, because the fastest of many measured times
    is partly luck."""
    lines = []
    for words, rows in ((f"M >= {LEAST_ROWS}", True), ("fewer rows", False)):
        ratios = {name: each for name, each in found.items() if (parsed(name).m >= LEAST_ROWS) is rows}
        if not ratios:
            continue
        count, middle, most, last = Summary.of([ratio for _, _, ratio in ratios.values()])
        lines.append(f"{words}: {count} products, mean {middle:.3f}, 95th percentile {most:.3f}, worst {last:.3f}")
        ranked = sorted(ratios.items(), key=lambda each: -each[1][2])[:worst]
        lines += [f"    {ratio:.3f}  {name}: {own} -> {best}" for name, (own, best, ratio) in ranked if ratio > 1.0]
    return "\n".join(lines).replace("sm90_gemm_", "")


def _fails(row: Mapping[str, Any], run: str) -> bool:
    return "failed" in row.get(run, {})


def _described(product: str, saved: Mapping[str, Any]) -> str:
    row = saved["products"][product]
    judged = row["judge"]
    times = ", ".join(f"{name} {time:.1f}" for name, time in judged["microseconds"].items())
    kernels = " -> ".join(dict.fromkeys((judged["chosen"], judged["best"])))
    return f"{product} ({row['of']}): {kernels.replace('sm90_gemm_', '')}; {times}"


def chart(saved: Mapping[str, Any], path: Path) -> None:
    """Draw a curve for each comparison, with products ranked by their ratio. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name, (ratios, _) in figures(saved).items():
        ranked = sorted(ratios.values())
        axis.plot([(place + 0.5) / len(ranked) for place in range(len(ranked))], ranked, label=name)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set(xlabel="share of the products", ylabel="ratio of times", ylim=(0.5, 1.4))
    axis.legend(fontsize=8)
    axis.set_title(f"{saved.get('device', '')}, {saved.get('date', '')}, seed {saved['seed']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
