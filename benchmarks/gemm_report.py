"""Evaluate saved measurements: figures that must hold, the tables and figures of pages, the charts. Needs no GPU."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gemm_cases import CASES, COMPILED, ROW_SHAPES, SHAPES

EPIFUSE, OWN_PLAIN = "epifuse", "epifuse plain"

Results = Mapping[str, Any]
Row = Mapping[str, Any]


class Verdict(NamedTuple):
    """One figure that must hold. `holds` is None if it was not measured."""

    claim: str
    holds: bool | None
    detail: str

    def __str__(self) -> str:
        mark = {True: "holds", False: "FAILS", None: "not measured"}[self.holds]
        return f"{mark:>12}  {self.claim}: {self.detail}"


def best_peer(row: Row) -> str | None:
    """The fastest peer that was measured, or None."""
    return _fastest(row, row["peers"])


def _fastest(row: Row, names: Iterable[str]) -> str | None:
    measured = [name for name in names if name in row["microseconds"]]
    return min(measured, key=lambda name: float(row["microseconds"][name])) if measured else None


def tiles(row: Row) -> int:
    """The number of tiles of the product in the kernel that epifuse chose."""
    (m, n, _), (tm, tn) = row["shape"], row["kernel"]["tile"]
    return int(-(-m // tm) * -(-n // tn))


# --- the figures that must hold ----------------------------------------------------------------------------------


def verdicts(results: Results) -> list[Verdict]:
    """Each figure that must hold, and whether it does."""
    rows = [row for row in results.get("rows", ()) if EPIFUSE in row["microseconds"]]
    found = [check(rows, results.get("multiprocessors", 132)) for check in _CHECKS]
    missing = [row for row in results.get("rows", ()) if EPIFUSE not in row["microseconds"]]
    refused = [Verdict("epifuse runs", False, f"{_where(row)}: {row['skipped'].get(EPIFUSE)}") for row in missing]
    return [*refused, *found, *_host_verdicts(results.get("host", {})), _cold(results)]


def _where(row: Row) -> str:
    return f"{row['case']} {'x'.join(map(str, row['shape']))}"


def _ratios(rows: list[Row], against: Callable[[Row], str | None]) -> Iterator[tuple[Row, str, float, float]]:
    """Yield each row, the name it is compared with, the median ratio, and the upper end of its interval."""
    for row in rows:
        name = against(row)
        if name is not None and name in row["ratios"]:
            median, _, high = row["ratios"][name]
            yield row, name, median, high


def _worst(claim: str, rows: list[Row], against: Callable[[Row], str | None], limit: float) -> Verdict:
    measured = list(_ratios(rows, against))
    if not measured:
        return Verdict(claim, None, "no row")
    over = [entry for entry in measured if entry[2] > limit]
    shown = over or [max(measured, key=lambda entry: entry[2])]
    text = "; ".join(f"{_where(row)} {median:.3f} (to {high:.3f}) x {name}" for row, name, median, high in shown)
    return Verdict(f"{claim} <= {limit}", not over, text)


def _plain_mean(rows: list[Row], multiprocessors: int) -> Verdict:
    speeds = [1 / median for _, _, median, _ in _ratios(_of("plain", rows, 1024), lambda row: "cuBLAS")]
    claim = "plain, M >= 1024: geometric mean >= 1.03 x cuBLAS, none below 0.96"
    if not speeds:
        return Verdict(claim, None, "no row")
    mean, worst = statistics.geometric_mean(speeds), min(speeds)
    return Verdict(claim, mean >= 1.03 and worst >= 0.96, f"mean {mean:.3f}, lowest {worst:.3f}, {len(speeds)} shapes")


def _plain_small(rows: list[Row], multiprocessors: int) -> Verdict:
    claim = "plain, 64 rows: >= 0.90 x cuBLAS"
    small = [row for row in _of("plain", rows, 0) if row["shape"][0] == 64]
    speeds = [1 / median for _, _, median, _ in _ratios(small, lambda row: "cuBLAS")]
    if not speeds:
        return Verdict(claim, None, "no row")
    return Verdict(claim, min(speeds) >= 0.90, f"{min(speeds):.3f}")


def _fused_peers(rows: list[Row], multiprocessors: int) -> Verdict:
    return _worst("fused, M >= 1024: time of the best peer", _fused(rows), best_peer, 1.01)


def _fused_own(rows: list[Row], multiprocessors: int) -> Verdict:
    busy = [row for row in _fused(rows) if row["shape"][2] >= 4096 and tiles(row) >= 2 * multiprocessors]
    return _worst(
        "fused, K >= 4096, two tiles a multiprocessor: epifuse's plain time", busy, lambda row: OWN_PLAIN, 1.03
    )


def _fused_single_wave(rows: list[Row], multiprocessors: int) -> Verdict:
    single = [row for row in _fused(rows) if tiles(row) <= multiprocessors]
    return _worst("fused, a single wave: time of cuBLASLt's fused gelu", single, lambda row: "cuBLASLt", 1.01)


def _of(case: str, rows: list[Row], least: int) -> list[Row]:
    return [row for row in rows if row["case"] == case and row["shape"][0] >= least]


def _fused(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["case"] in _ELEMENTWISE and row["shape"][0] >= 1024]


def _reduced_peers(rows: list[Row], multiprocessors: int) -> Verdict:
    return _worst("reduced, M >= 1024: time of torch.compile in its faster mode", _reduced(rows), _compiled, 1.0)


def _compiled(row: Row) -> str | None:
    """torch.compile in the fastest mode that was measured, or None."""
    return _fastest(row, COMPILED)


def _reduced_own(rows: list[Row], multiprocessors: int) -> Verdict:
    busy = [row for row in _reduced(rows) if row["shape"][2] >= 4096 and tiles(row) >= 2 * multiprocessors]
    return _worst(
        "reduced, K >= 4096, two tiles a multiprocessor: epifuse's plain time", busy, lambda row: OWN_PLAIN, 1.03
    )


def _reduced(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["case"] in _REDUCED and row["shape"][0] >= 1024]


def _whole_rows(rows: list[Row], multiprocessors: int) -> Verdict:
    whole = [row for row in rows if row["case"] in _ROWS]
    return _worst("whole rows: time of torch.compile in its faster mode", whole, _compiled, 1.01)


_ELEMENTWISE = {case.name for case in CASES if case.epilogue is not None and not case.reduces and case.shapes == SHAPES}
_REDUCED = {case.name for case in CASES if case.reduces}
_ROWS = {case.name for case in CASES if case.shapes == ROW_SHAPES}


_CHECKS = (
    _plain_mean,
    _plain_small,
    _fused_peers,
    _fused_own,
    _fused_single_wave,
    _reduced_peers,
    _reduced_own,
    _whole_rows,
)

HOST_LIMITS = {"kernel.run": 1.3, "ef.gemm": 2.5, "bound": 1.0}
"""The largest accepted ratio of the host time of a launch to that of `torch.mm(out=)`."""


def _host_verdicts(host: Mapping[str, Any]) -> list[Verdict]:
    found = []
    for name, limit in HOST_LIMITS.items():
        claim = f"host time of {name} <= {limit} x torch.mm(out=)"
        if name not in host.get("ratios", {}):
            found.append(Verdict(claim, None, "no row"))
            continue
        median, low, high = host["ratios"][name]
        shown = f"{median:.3f} ({low:.3f} to {high:.3f}), {host['microseconds'][name]:.2f} us"
        found.append(Verdict(claim, median <= limit, shown))
    return found


def _cold(results: Results) -> Verdict:
    claim = "cold compile of one kernel <= 3 s"
    taken = [row["kernel"]["compile_seconds"] for row in results.get("rows", ()) if row.get("kernel")]
    if not taken:
        return Verdict(claim, None, "no row")
    return Verdict(claim, max(taken) <= 3.0, f"longest of {len(taken)}: {max(taken):.2f} s")


# --- the pages ---------------------------------------------------------------------------------------------------

PAGES = ("docs/performance.md", "README.md")
"""Pages that show results, relative to the root of the repository. Each has one of the sections below."""
START, END = "<!-- gemm_epilogue: written by benchmarks/gemm_epilogue.py -->", "<!-- gemm_epilogue ends -->"
FIGURES_START, FIGURES_END = START.replace(":", " figures:"), END.replace(" ends", " figures end")

_FIGURES = (("gelu_sums", (16384, 4096, 1024), "torch.compile"), ("plain", (4096, 4096, 4096), "cuBLAS"))
"""The two results in the README's sentence: a case with more than an activation, and the product alone. Each is a case,
a shape and a peer."""


def table(results: Results) -> str:
    """A Markdown table: a row for each case, a column for each shape, with epifuse's time and the best peer's."""
    about = f"{results['device']}, {results['date']}, bfloat16, microseconds (medians of {results['rounds']} rounds): "
    cells = {(tuple(row["shape"]), row["case"]): _cell(row) for row in results["rows"]}
    parts = [about + "epifuse, and the best peer."]
    for shapes in dict.fromkeys(case.shapes for case in CASES):
        measured = [shape for shape in shapes if any(shape == found for found, _ in cells)]
        cases = [case for case in CASES if any((shape, case.name) in cells for shape in measured)]
        lines = ["| M x N x K | " + " | ".join(" x ".join(map(str, shape)) for shape in measured) + " |"]
        lines.append("|---|" + "---|" * len(measured))
        for case in cases:
            found = " | ".join(cells.get((shape, case.name), "") for shape in measured)
            lines.append(f"| `{case.formula}` | {found} |")
        if cases:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(row: Row) -> str:
    if EPIFUSE not in row["microseconds"]:
        return "refused"
    own, peer = row["microseconds"][EPIFUSE], best_peer(row)
    return f"**{own:.0f}**" + (f", {row['microseconds'][peer]:.0f} {peer}" if peer else "")


def section(results: Results) -> str:
    """The table between its marks, as it stands in docs/performance.md."""
    picture = "![Speed beside the peers](../benchmarks/results/gemm_epilogue.png)"
    return f"{START}\n{table(results)}\n\n{picture}\n{END}"


def figures(results: Results) -> str:
    """The README's two results, with their conditions, between their marks."""
    cells = {(row["case"], tuple(row["shape"])): row["microseconds"] for row in results["rows"]}
    formulas = {case.name: case.formula for case in CASES}
    told = []
    for case, shape, peer in _FIGURES:
        if (times := cells.get((case, shape))) and peer in times:
            where = " x ".join(map(str, shape))
            told.append(f"`{formulas[case]}` of {where} takes {times[EPIFUSE]:.0f} us, {peer} {times[peer]:.0f} us")
    text = f"On one {results['device']}, bfloat16, M x N x K: {'; '.join(told)}."
    picture = "![Times beside PyTorch](benchmarks/results/first_screen.png)"
    return f"{FIGURES_START}\n{textwrap.fill(text, 120, break_on_hyphens=False)}\n\n{picture}\n{FIGURES_END}"


def inserted(page: str, results: Results) -> str:
    """The page with its sections replaced by those of these results."""
    for start, end, make in (START, END, section), (FIGURES_START, FIGURES_END, figures):
        if start in page:
            before, rest = page.split(start, 1)
            page = before + make(results) + rest.split(end, 1)[1]
    return page


# --- the chart ---------------------------------------------------------------------------------------------------


def speeds(row: Row) -> dict[str, float]:
    """TFLOP/s of the product by variant; the epilogue's operations do not count."""
    m, n, k = row["shape"]
    return {name: 2 * m * n * k / time / 1e6 for name, time in row["microseconds"].items()}


def chart(results: Results, path: Path) -> None:
    """Draw a panel for each case, a group of bars for each shape, and a bar for each variant. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in CASES if any(row["case"] == case.name for row in results["rows"])]
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(11, 2.6 * len(cases)), squeeze=False, layout="constrained")
    names = list(dict.fromkeys(name for row in results["rows"] for name in row["microseconds"]))
    names.sort(key=lambda name: name != EPIFUSE)
    palette = dict(zip(names, pyplot.get_cmap("tab10").colors, strict=False))
    for case, axis in zip(cases, axes[:, 0], strict=True):
        rows = [row for row in results["rows"] if row["case"] == case.name]
        present = [name for name in names if any(name in row["microseconds"] for row in rows)]
        width = 0.8 / len(present)
        for index, name in enumerate(present):
            at = [group + (index - len(present) / 2 + 0.5) * width for group in range(len(rows))]
            axis.bar(at, [speeds(row).get(name, 0.0) for row in rows], width, label=name, color=palette[name])
        axis.set_xticks(range(len(rows)), ["x".join(map(str, row["shape"])) for row in rows], fontsize=8)
        axis.set_title(case.formula, fontsize=9)
        axis.set_ylabel("TFLOP/s")
        axis.legend(fontsize=7, ncols=len(present), loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    figure.suptitle(f"{results['device']}, bfloat16, {results['date']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def first_chart(results: Results, path: Path) -> None:
    """Draw the README's picture: times of every epilogue at one shape, beside PyTorch's. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shape = _FIGURES[0][1]
    formulas = {case.name: case.formula for case in CASES}
    rows = [row for row in results["rows"] if tuple(row["shape"]) == shape and "eager" in row["microseconds"]][::-1]
    figure, axis = pyplot.subplots(figsize=(9, 0.5 + 0.55 * len(rows)), layout="constrained")
    for place, (name, colour) in enumerate(
        {EPIFUSE: "tab:blue", "torch.compile": "tab:brown", "eager": "tab:red"}.items()
    ):
        at = [group + 0.27 * (1 - place) for group in range(len(rows))]
        bars = axis.barh(at, [row["microseconds"].get(name, 0.0) for row in rows], 0.27, label=name, color=colour)
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axis.set_yticks(range(len(rows)), [formulas[row["case"]] for row in rows], fontsize=8)
    axis.set_xlabel("microseconds", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    axis.set_title(f"{results['device']}, bfloat16, {' x '.join(map(str, shape))}, {results['date']}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
