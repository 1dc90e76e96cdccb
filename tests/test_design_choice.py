"""The model that orders the designs, beside what each design took on an H200; and what docs/hopper_notes.md says."""

import json
import math
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse import providers
from epifuse.base.processors import GPUS
from epifuse.base.target import TARGETS
from epifuse.plan import select
from epifuse.providers.cutedsl import DESIGNS
from epifuse.providers.cutedsl.designs import HOPPER_SPECS, PLAIN_SPECS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import shapes  # noqa: E402 - found through the path above
import shapes_report  # noqa: E402

DATA = json.loads((ROOT / "benchmarks/results/design_choice.json").read_text())
PRODUCTS = DATA["products"]
PAGE = " ".join((ROOT / "docs/hopper_notes.md").read_text().split())
DRAWN = ("picked_h100", "picked_h200", "drawn_h100", "drawn_h100_second", "drawn_h200")
LATER = ("128x96_", "128x160_", "128x192_cooperative", "128x224_")
"""Designs that came after the data."""
FLAT = PAGE.replace(" %", "%")
VARIANTS = {
    each["id"]: each
    for each in json.loads((ROOT / "benchmarks/results/kernel_variants.json").read_text())["experiments"]
}


def ranked(product: str, model: str) -> list[str]:
    """The designs for a product of bfloat16, A by rows and B by columns, in the order of the model for a GPU."""
    m, n, k = map(int, product.rpartition(":")[2].split("x"))
    options = {"dtype": torch.bfloat16, "device": "meta"}
    args = ef.GemmArguments(torch.empty(m, k, **options), torch.empty(n, k, **options).t())
    target = replace(TARGETS[90], processor=GPUS[model])
    found = select(args.structure, args.problem._replace(target=target), providers.candidates())
    return [plan.spec.name for plan in found.plans]


def chosen(product: str) -> str:
    """The best of the designs that were measured: those that split K or exchange A and B are younger."""
    return next(name for name in ranked(product, "H200") if name in PRODUCTS[product]["microseconds"])


def theirs(product: str) -> str | None:
    """The first of NVIDIA's list that is a design of ours; it names no schedule."""
    for (m, n), (cm, cn) in PRODUCTS[product].get("theirs", ()):
        name = f"sm90_gemm_{m}x{n}_{'cooperative' if m * n == 32768 else 'pingpong'}_{cm}x{cn}"
        if name in PRODUCTS[product]["microseconds"]:
            return name
    return None


def beside_the_best(product: str, name: str) -> float:
    times = PRODUCTS[product]["microseconds"]
    return float(times[name] / min(time for design, time in times.items() if design != "torch"))


def summary(ratios: list[float]) -> tuple[float, float]:
    """Geometric mean and largest."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)


def test_our_choice_is_near_the_best_of_our_designs() -> None:
    """But with the fewest rows, for which there are designs that were not measured then."""
    more = [product for product in PRODUCTS if int(product.partition("x")[0]) > 16]
    mean, worst = summary([beside_the_best(product, chosen(product)) for product in more])
    assert mean <= 1.02
    assert worst <= 1.1
    said = f"takes {100 * (mean - 1):.1f} % more than the best of our designs on average and {100 * (worst - 1):.1f} %"
    assert f"{said} at most where M is above 16" in PAGE


@pytest.mark.parametrize("name", [*DRAWN, "split_h100", "shapes_large_h100"])
def test_so_it_is_of_drawn_products(name: str) -> None:
    saved = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    found = shapes.foretell(saved)
    mean, worst = summary([ratio for _, _, ratio in found.values()])
    assert mean <= 1.035
    assert worst <= 1.35
    if "seed" in saved and saved["seed"] != "constants":
        figures = re.findall(r"mean (\S+), 95th percentile (\S+), worst (\S+)\n", shapes_report.foretold(found) + "\n")
        said = [f"{mean}, {float(most):.2f}, {float(last):.2f} |" for mean, most, last in figures]
        assert all(one in PAGE for one in said), said


def judged(card: str) -> dict[str, dict[str, float]]:
    """Ratios of times by product, by what is compared."""
    saved = json.loads((ROOT / f"benchmarks/results/judged_{card}.json").read_text())
    return {words: ratios for words, (ratios, _) in shapes_report.figures(saved).items()}


@pytest.mark.parametrize("words", [words for words in judged("h100") if not words.startswith("tuned")])
def test_the_page_says_what_was_judged(words: str) -> None:
    found = (shapes_report.Summary.of([*judged(card)[words].values()]) for card in ("h100", "h200", "h100_second"))
    row = [words, *(f"{mean:.3f}, {most:.3f}, {worst:.3f}" for _, mean, most, worst in found)]
    assert f"| {' | '.join(row)} |" in PAGE


def test_where_cublas_is_ahead_is_said() -> None:
    ratios = judged("h100_second")["chosen / cuBLAS"]
    behind = [shapes.parsed(product) for product, ratio in ratios.items() if ratio > 1 / 0.9]
    gradients = [x for x in behind if x.form == "tn"]
    assert (len(behind), len(gradients)) == (13, 9)
    assert "Of the 13 products of the last column where cuBLAS takes less than 0.9 of our time, nine are weight" in FLAT


H100S = [name for name in DRAWN if "h100" in name]


def sent(design: str) -> dict[str, tuple[Any, float]]:
    """By product of the H100s' files: its extents, and TB/s that L2 sends to tiles of a design without clusters."""
    bm, bn = map(int, design.partition("_")[0].split("x"))
    found = {}
    for name in H100S:
        for product, row in json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["products"].items():
            times, x = row.get("pick", {}).get("microseconds", {}), shapes.parsed(product)
            if (time := times.get(f"sm90_gemm_{design}")) and x.batch == 1:
                rows = -(-x.m // bm) * -(-x.n // bn) * (bm + bn)
                found[f"{name} {product}"] = x, 2e-6 * rows * x.k / time
    return found


def test_rows_beyond_are_as_slow_as_is_said() -> None:
    found = sent("128x128_pingpong_1x1")
    full = [
        rate
        for x, rate in found.values()
        if x.form == "nt" and x.m % 128 == x.n % 128 == 0 and 2000 <= x.k <= 5200 and x.m * x.n > 3 * 132 * 128**2
    ]
    slow = [rate for product, (_, rate) in found.items() if product.split()[1] in ("412x19456x2560", "278x34816x5120")]
    assert len(full) > 30
    assert f"together come from L2 at a median of {statistics.median(full):.1f} TB/s on the H100s where none" in PAGE
    assert all(f"at {rate:.1f} where" in PAGE for rate in slow)


@pytest.mark.parametrize("nk", ["8192x3584", "1536x8960", "5120x17920"])
def test_what_full_rows_gain_is_said(nk: str) -> None:
    rows = json.loads((ROOT / "benchmarks/results/last_rows_h100.json").read_text())["products"]
    part, most, full = (min(rows[f"{m}x{nk}"]["pick"]["microseconds"].values()) for m in (256, 290, 384))
    said = f"{part:.1f}, {most:.1f} and {full:.1f} us for (N x K of )?{nk.replace('x', ' x ')}"
    assert re.search(said, PAGE)


@pytest.mark.parametrize(
    ("tile", "said"),
    [
        ((64, 256), "Tiles of 64 x 256 without clusters take a median of {} TB/s from it on the H100s then, and {}"),
        ((64, 128), "tiles of 64 x 128 take {} and {} (products"),
    ],
    ids=["64x256", "64x128"],
)
def test_few_tiles_along_n_get_what_is_said(tile: tuple[int, int], said: str) -> None:
    rates: dict[bool, list[float]] = {True: [], False: []}
    for x, rate in sent(f"{tile[0]}x{tile[1]}_pingpong_1x1").values():
        beyond = -x.m % 64 / x.m
        if x.m * x.n * x.k >= 5e9 and 1500 <= x.k <= 9000 and x.k % 64 == x.n % tile[1] == 0 and beyond <= 0.01:
            rates[x.n // tile[1] <= 6].append(rate)
    assert said.format(*(f"{statistics.median(rates[few]):.1f}" for few in (True, False))) in PAGE


def test_what_the_latest_designs_gained_is_said() -> None:
    def latest(name: str) -> bool:
        return "128x160" in name or name == "sm90_gemm_128x192_pingpong_2x1_split2"

    gains = []
    for _, plans in shapes.picked(json.loads((ROOT / "benchmarks/results/drawn_h100_second.json").read_text())):
        older = min(time for plan, time in plans.items() if not latest(plan.spec.name))
        gains.append(min(plans.values()) / older)
    mean, _ = summary(gains)
    assert f"For {sum(gain < 0.97 for gain in gains)} of its {len(gains)} products these were faster" in PAGE
    assert f"by {1 - min(gains):.0%} at most, and on average by {1 - mean:.1%}".replace("%", " %") in PAGE


@pytest.mark.parametrize(("drawn", "gained", "left"), [(True, 0.006, 0.006), (False, 0.02, 0.017)])
def test_what_further_tiles_gain(drawn: bool, gained: float, left: float) -> None:
    """What `designs.py` says of them."""
    rows = json.loads((ROOT / "benchmarks/results/widths_h100.json").read_text())["products"].values()
    there = {spec.name.removeprefix("sm90_gemm_") for spec in HOPPER_SPECS}
    later = ("80x128_", "96x256_", "192x128_swapped", "128x224_")
    without, now, all_ = [], [], []
    for row in rows:
        times = {name: time for name, time in row["microseconds"].items() if name != "cuBLAS"}
        ours = {name: time for name, time in times.items() if name in there}
        older = [time for name, time in ours.items() if not name.startswith(later)]
        if row["drawn"] == drawn and older:
            without.append(min(older))
            now.append(min(ours.values()))
            all_.append(min(times.values()))
    assert 1 - summary([a / b for a, b in zip(now, without, strict=True)])[0] == pytest.approx(gained, abs=6e-4)
    assert 1 - summary([a / b for a, b in zip(all_, now, strict=True)])[0] == pytest.approx(left, abs=6e-4)


def test_what_further_splits_would_gain() -> None:
    rows = json.loads((ROOT / "benchmarks/results/splits_h100.json").read_text())["products"].values()
    there = {spec.name.removeprefix("sm90_gemm_") for spec in HOPPER_SPECS}
    further = {f"128x192_cooperative_1x2_split{parts}" for parts in (4, 6, 8)}
    further |= {"128x160_cooperative_2x1_split3", "176x128_swapped_1x2_split2"}
    gains = []
    for row in rows:
        times = row["microseconds"]
        if ours := [time for name, time in times.items() if name in there]:
            gains.append(min([*ours, *(times[name] for name in further if name in times)]) / min(ours))
    assert len(gains) == 27
    assert sum(0.8 <= gain <= 0.91 for gain in gains) == sum(gain < 1 for gain in gains) == 4
    assert 1 - summary(gains)[0] == pytest.approx(0.02, abs=5e-3)


def test_the_data_has_every_design() -> None:
    measured = set.intersection(*({*row["microseconds"]} for row in PRODUCTS.values()))
    names = [spec.name for spec in PLAIN_SPECS if spec.design in DESIGNS]
    older = [name for name in names if not any(later in name for later in LATER)]
    assert measured >= {"torch", *older}, "every design that took any M then, and torch.mm"


def test_theirs_is_further_from_it() -> None:
    named = {product: name for product in PRODUCTS if (name := theirs(product)) is not None}
    mean, worst = summary([beside_the_best(product, name) for product, name in named.items()])
    assert (len(named), round(mean, 2), round(worst, 2)) == (27, 1.12, 1.72)
    assert "For 27 of the 51 products one of ours is in the list: the first such design takes 12 % more" in PAGE
    assert "on average, and 72 % more at most" in PAGE


@pytest.mark.parametrize("product", [p for p in PRODUCTS if f"| {p.replace('x', ' x ')} |" in PAGE])
def test_the_page_shows_our_choice_and_its_time(product: str) -> None:
    name = chosen(product).removeprefix("sm90_gemm_")
    tile, schedule, cluster = name.split("_")
    time = PRODUCTS[product]["microseconds"][chosen(product)]
    row = f"| {product.replace('x', ' x ')} | {tile.replace('x', ' x ')} {schedule}, {cluster.replace('x', ' x ')} |"
    shown = PAGE.split(row)[1].split("|")[0]
    assert float(shown) == pytest.approx(time, abs=0.051)


def test_what_few_rows_take_is_said() -> None:
    rows = json.loads((ROOT / "benchmarks/results/decoding_h100.json").read_text())["rows"]

    def ratios(first: str, second: str, *, few: bool = True) -> list[float]:
        times = [row["microseconds"] for row in rows if bool(row["of"]) == few]
        return [one[first] / one[second] for one in times]

    def mean(found: list[float]) -> str:
        return f"{math.exp(sum(map(math.log, found)) / len(found)):.3f}"

    for found in (ratios("plain", "cuBLAS"), ratios("plain", "floor")):
        assert f"{mean(found)} " in PAGE
        assert f"{max(found):.3f} at most" in PAGE
    assert f"nothing: {mean(ratios('batch_invariant', 'plain', few=False))}." in PAGE


def test_the_cycles_of_an_epilogue_are_those_measured() -> None:
    data = json.loads((ROOT / "benchmarks/results/epilogue_cycles.json").read_text())
    kernels = data["kernels"]
    epilogues = [name.removeprefix("epifuse, ") for name in kernels if name.startswith("epifuse, ")]
    assert len(epilogues) == 4
    for name in epilogues:
        ours, quack = (round(kernels[f"{library}, {name}"]["cycles"] / 1000) for library in ("epifuse", "QuACK"))
        assert f"| {name} | {ours} | {quack} |" in PAGE.replace("`", "")
    gelu = "epifuse, gelu_tanh(A @ B + bias)"
    busy = [round(kernels[name]["tensor_pipe_percent_of_active"]) for name in ("epifuse, A @ B", gelu)]
    assert f"busy {busy[0]} % of the plain product and {busy[1]} % of gelu" in PAGE
    assert f"reads, gelu took {data['before'][gelu]['cycles'] / 1000:.0f}." in PAGE


def test_the_cycles_of_a_hidden_epilogue_are_those_measured() -> None:
    kernels = json.loads((ROOT / "benchmarks/results/epilogue_cycles.json").read_text())["hidden"]["kernels"]
    formulas = ("A @ B", "gelu_tanh(A @ B + bias)", "sum(softplus(x) - x * C)")
    plain, gelu, loss = (kernels[f"{formula}, 128x128"]["cycles"] for formula in formulas)
    said = f"gelu {gelu / plain - 1:.0%} of the cycles and a binary cross-entropy {loss / plain - 1:.1%}"
    assert said in FLAT


def test_what_a_burst_spends_on_row_squares_is_as_measured() -> None:
    groups = json.loads((ROOT / "benchmarks/results/epilogue_cycles.json").read_text())["bursts"]["groups"]
    brought, merged = (group["kilocycles"] for group in groups[:2])
    whole = [cycles["row squares"] / cycles["A @ B"] - 1 for cycles in (merged, brought)]
    merge = 1 - merged["row squares, not merged"] / merged["row squares"]
    tile = 1 - brought["row squares, none"] / brought["row squares"]
    last = brought["row squares, last"] - brought["row squares, none"]
    said = (
        f"takes {100 * whole[0]:.1f} to {whole[1]:.1%} more cycles than the plain product: {merge:.1%} for the merging"
    )
    assert f"{said} kernel, {tile:.1%} for bringing C, most of it for the last tile" in FLAT
    assert last > 0.5 * (brought["row squares"] - brought["row squares, none"])


def test_what_a_burst_spends_on_row_squares_now_is_as_measured() -> None:
    groups = json.loads((ROOT / "benchmarks/results/epilogue_cycles.json").read_text())["bursts"]["groups"]
    before, now = (
        next(group["kilocycles"] for group in groups if name in group["kilocycles"])
        for name in ("row squares, read early", "bce, spare (not kept)")
    )
    assert f": {before['row squares, read early'] / before['A @ B'] - 1:.1%} in the same bursts" in FLAT
    assert f"and bursts take {now['row squares'] / now['A @ B'] - 1:.1%} more than the plain product" in FLAT


def test_the_gain_of_spare_stages_is_as_measured() -> None:
    found = VARIANTS["spare-cooperative"]
    times = [row["microseconds"] for row in found["rows"] if row["case"] in ("row_squares", "relu_residual", "resid")]
    gains = [1 - each["spare"] / each["without"] for each in times]
    said = f"adding C takes {100 * min(gains):.1f} to {max(gains):.1%} less"
    assert f"{said} at 1024 x 4096 x 4096 and 4096 x 1024 x 4096" in FLAT


def test_what_power_costs_is_as_measured() -> None:
    whole = json.loads((ROOT / "benchmarks/results/epilogue_cycles.json").read_text())
    plain, squares, losses = (whole["clock"]["calls"][name]["fourth"] for name in ("A @ B", "row squares", "bce"))
    clocks, end = plain["GHz"], plain["GHz of the second band"]
    first, low, high = clocks[0], min(clocks[:5]), max(clocks[4:8])
    until = plain["kilocycles"] * sum(1 / clock for clock in clocks[: clocks.index(low) + 1])
    said = (
        f"goes from {first:.2f} GHz to {low:.2f} within {until:.0f} us and back to {high:.2f}, and settles at {end:.2f}"
    )
    assert said in FLAT

    def more(other: dict[str, float]) -> tuple[str, str]:
        cycles, clock = (other[name] / plain[name] for name in ("kilocycles", "GHz of the second band"))
        return f"{cycles - 1:.1%} more cycles", f"{1 - clock:.1%} lower"

    cycles, clock = more(squares)
    assert f"take {cycles} than the plain product's there, and the clock of their second half is {clock}" in FLAT
    assert "{} and {}".format(*more(losses)) in FLAT
    counts = whole["instructions"]["a value"]["bce"]
    assert f"from {counts['before']:.0f} instructions for each value to {counts['now']:.0f}" in FLAT
    found = VARIANTS["fewer-instructions"]
    of_bce = [row for row in found["rows"] if row["case"] == "bce" and row["shape"] == "4096x4096x4096"]
    gains = [1 - row["beside_the_first"]["exp by two"] for row in of_bce]
    assert f"exponentials alone saved {100 * min(gains):.1f} to {max(gains):.1%} of the time" in FLAT


def test_how_three_runs_differ_is_as_measured() -> None:
    found = []
    for name in ("", "_second", "_third"):
        rows = json.loads((ROOT / f"benchmarks/results/gemm_epilogue{name}.json").read_text())["rows"]
        found.append({(row["case"], *row["shape"]): row for row in rows})

    def each(case: str, *shape: int) -> str:
        first, second, third = (rows[(case, *shape)]["ratios"][OWN][0] for rows in found)
        return f"{first:.3f} | {second:.3f} | {third:.3f}"

    plain, other = (rows[("plain", *CUBE)]["ratios"]["cuBLAS"][0] for rows in found[:2])
    assert f"takes {plain:.2f} of cuBLAS's time" in FLAT
    assert f"and {other:.2f} in [another]" in FLAT
    times = [rows[("row_squares", *CUBE)]["microseconds"][OWN] for rows in found]
    assert "`A @ B` takes {:.0f}, {:.0f} and {:.0f} us in these three runs".format(*times) in FLAT
    assert f"| row sums of squares, 4096 x 4096 x 4096 | {each('row_squares', *CUBE)} |" in FLAT
    assert f"| row sums of squares, 4096 x 14336 x 4096 | {each('row_squares', *LONG)} |" in FLAT
    low, high = found[2][("bce", *LONG)]["ratios"][OWN][1:]
    said = f"| binary cross-entropy, 4096 x 14336 x 4096 | {each('bce', *LONG)}"
    assert f"{said} ({low:.3f} to {high:.3f}: times spread most here) |" in FLAT


CUBE, LONG, OWN = (4096, 4096, 4096), (4096, 14336, 4096), "epifuse plain"


def test_what_few_tiles_are_said_to_take() -> None:
    data = json.loads((ROOT / "benchmarks/results/few_tiles_h100.json").read_text())
    cublas, ours = (row for row in data["requests"][8:10])
    assert (cublas["product"], ours["kernel"]) == ("1435x1152x6912", "112x128_swapped_1x2")
    sectors = [32 * row["l2_sectors"] / row["bytes_to_multiprocessors"] for row in (ours, cublas)]
    assert sectors == [pytest.approx(0.70, abs=0.006), pytest.approx(0.48, abs=0.006)]
    numbered, grouped = data["orders"]["as numbered"], data["orders"]["by group of multiprocessors"]
    taken = [time for name, time in numbered["tn:1408x1408x65536"].items() if name.startswith("128x128_pingpong_1x1")]
    assert (min(taken), max(taken)) == (pytest.approx(363, abs=0.6), pytest.approx(508, abs=0.6))
    of_276 = [
        [time for name, time in order["276x5120x17920"].items() if name.startswith("96x128")]
        for order in (numbered, grouped)
    ]
    assert (min(of_276[0]), max(of_276[0]), min(of_276[1])) == (104.1, 113.8, 84.4)
    drawn = {product.name for product in shapes.draw("8959ceb", 150)} & {*numbered}
    assert len(drawn) == 26

    def beside(order: dict[str, dict[str, float]], heights: tuple[int, ...]) -> float:
        """The fastest kernel of each product beside cuBLAS of the same run, to that as numbered in bands of eight."""
        ratios = []
        for name in drawn:
            mine, before = order[name], numbered[name]
            best = min(time for kernel, time in mine.items() if kernel.endswith(tuple(f" {h}" for h in heights)))
            first = min(time for kernel, time in before.items() if kernel.endswith(" 8"))
            ratios.append(best / mine["cuBLAS"] / (first / before["cuBLAS"]))
        return summary(ratios)[0]

    assert beside(grouped, (8,)) == pytest.approx(1.07, abs=5e-3)
    assert min(beside(numbered, (height,)) for height in (1, 2, 4)) >= 0.9945
    assert beside(numbered, (1, 2, 4, 8)) == pytest.approx(0.98, abs=5e-3)
