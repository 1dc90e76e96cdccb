"""The model that orders the designs, beside what each design took on an H200; and what docs/hopper_notes.md says."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from epifuse.providers.cutedsl.designs import HOPPER_SPECS, NARROW_DESIGNS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import shapes  # noqa: E402 - found through the path above
import shapes_report  # noqa: E402
from layers import parsed  # noqa: E402

DATA = json.loads((ROOT / "benchmarks/results/design_choice.json").read_text())
PRODUCTS = DATA["products"]
TEXT = (ROOT / "docs/hopper_notes.md").read_text()
PAGE = " ".join(TEXT.split())
FLAT = PAGE.replace(" %", "%")
VARIANTS = {
    each["id"]: each
    for each in json.loads((ROOT / "benchmarks/results/kernel_variants.json").read_text())["experiments"]
}


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


@pytest.fixture(scope="module")
def foretold() -> dict[str, Any]:
    """Chosen / best of each product that was drawn, by the times of all designs."""
    return shapes.foretell(json.loads((ROOT / "benchmarks/results/judged_h200_second.json").read_text()))


def test_our_choice_is_near_the_best_of_drawn_products(foretold: dict[str, Any]) -> None:
    mean, worst = summary([ratio for _, _, ratio in foretold.values()])
    assert mean <= 1.02
    assert worst <= 1.25
    figures = re.findall(r"mean (\S+), 95th percentile (\S+), worst (\S+)\n", shapes_report.foretold(foretold) + "\n")
    (mean, most, last), (few, later, at_worst) = figures
    assert f"takes {mean} of the fastest design's time by the times of the last column's products, {most} in" in PAGE
    assert f"percentile and {last} at worst, where M is 512 and more; {few}, {later} and {at_worst} with fewer" in PAGE


def judged(card: str) -> dict[str, dict[str, float]]:
    """Ratios of times by product, by what is compared."""
    saved = json.loads((ROOT / f"benchmarks/results/{card}.json").read_text())
    return {words: ratios for words, (ratios, _) in shapes_report.figures(saved).items()}


LATEST = (
    *(spec.name.removeprefix("sm90_gemm_") for spec in HOPPER_SPECS if spec.design in NARROW_DESIGNS),
    "96x128_swapped_1x2",
    "112x128_swapped_1x2",
)
"""Designs that came with widths_h200.json."""
CARDS = ("judged_h100", "judged_h200", "judged_h100_second", "placed_h200", "judged_h200_second")


@pytest.mark.parametrize("words", [words for words in judged("judged_h100") if not words.startswith("tuned")])
def test_the_page_says_what_was_judged(words: str) -> None:
    found = (shapes_report.Summary.of([*judged(card)[words].values()]) for card in CARDS)
    row = [words, *(f"{mean:.3f}, {most:.3f}, {worst:.3f}" for _, mean, most, worst in found)]
    assert f"| {' | '.join(row)} |" in PAGE


def test_the_page_says_how_many_are_slower_than_cublas() -> None:
    named = judged(CARDS[-1])["chosen / cuBLAS"]
    odd = {name for name in named if parsed(name).n in (30522, 50257)}
    assert len(odd) == 3
    assert f"without them the mean is {summary([named[name] for name in named if name not in odd])[0]:.3f}." in PAGE
    ratios = named.values()
    few, more = (sum(ratio > limit for ratio in ratios) for limit in (1.06, 1.03))
    assert f"Of the {len(ratios)} products beside cuBLAS in the last column {more} take more than 1.03" in PAGE
    assert f"of its time, and {few} more than 1.06." in PAGE


@pytest.mark.parametrize(("drawn", "gained", "left"), [(True, 0.006, 0.006), (False, 0.02, 0.017)])
def test_what_further_tiles_gain(drawn: bool, gained: float, left: float) -> None:
    """What `designs.py` says of them."""
    rows = json.loads((ROOT / "benchmarks/results/widths_h100.json").read_text())["products"].values()
    there = {spec.name.removeprefix("sm90_gemm_") for spec in HOPPER_SPECS} - {*LATEST}
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


def test_what_tiles_of_other_widths_gain() -> None:
    """What `designs.py` and the page say of them."""
    data = json.loads((ROOT / "benchmarks/results/widths_h200.json").read_text())
    there, newer = {spec.name.removeprefix("sm90_gemm_") for spec in HOPPER_SPECS}, {*LATEST}
    further, before, now, all_, cublas = set(), [], [], [], []
    for row in data["widths"]["products"].values():
        times = {**row["microseconds"]}
        cublas.append(times.pop("cuBLAS"))
        further |= {*times} - (there - newer)
        before.append(min(time for name, time in times.items() if name in there - newer))
        now.append(min(time for name, time in times.items() if name in there))
        all_.append(min(times.values()))
    slow = [sum(a > 1.06 * b for a, b in zip(ours, cublas, strict=True)) for ours in (before, now)]
    gains = [summary([a / b for a, b in zip(later, before, strict=True)])[0] for later in (now, all_)]
    tiles = {tuple(name.split("_")[:2]) for name in further} - {("96x256", "swapped")}
    assert f"Of {len(further)} further designs, in {len(tiles)} further tiles, five give most" in PAGE
    assert f"over {len(now)} products with few tiles the fastest design takes {gains[0]:.3f} of the time" in PAGE
    assert f"before, and with all {len(further)} {gains[1]:.3f}." in PAGE
    assert f"more than 1.06 of cuBLAS's time {slow[1]} are left of {slow[0]}." in PAGE


def test_what_more_parts_of_k_gain() -> None:
    data = json.loads((ROOT / "benchmarks/results/widths_h200.json").read_text())["splits"]["products"]
    there = {spec.name.removeprefix("sm90_gemm_") for spec in HOPPER_SPECS}
    gains = {}
    for name, row in data.items():
        times = row["microseconds"]
        old = min(time for design, time in times.items() if design in there)
        gains[name] = {design: time / old for design, time in times.items()}
    thirds = [each["128x160_pingpong_2x1_split3"] for each in gains.values() if "128x160_pingpong_2x1_split3" in each]
    assert [f"{gain:.2f}" for gain in sorted(thirds)[:2]] == ["0.87", "0.87"]
    of_one = gains["tn:512x3456x65536"]["128x160_pingpong_2x1_split3"]
    beside_cublas = of_one / gains["tn:512x3456x65536"]["cuBLAS"]
    assert f"take {of_one:.2f} of the time that 128 x 128 took, and {beside_cublas:.2f} of cuBLAS's; they" in PAGE
    large = ("128x256_cooperative_2x1_split5", "256x128_cooperative_1x2_split5")
    assert sum(min(each.get(name, 2.0) for name in large) < 0.9 for each in gains.values()) == 1
    assert f"for one of {len(data)} such products" in PAGE


def test_theirs_is_further_from_it() -> None:
    named = {product: name for product in PRODUCTS if (name := theirs(product)) is not None}
    mean, worst = summary([beside_the_best(product, name) for product, name in named.items()])
    assert (len(named), round(mean, 2), round(worst, 2)) == (27, 1.12, 1.72)
    assert "For 27 of the 51 products one of ours is in the list: the first such design takes 12 % more" in PAGE
    assert "on average, and 72 % more at most" in PAGE


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_what_few_rows_take_is_said(card: str) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/decoding_{card}.json").read_text())["rows"]

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
    numbered, grouped = data["orders"]["as numbered"], data["orders"]["by group of multiprocessors"]
    taken = [time for name, time in numbered["tn:1408x1408x65536"].items() if name.startswith("128x128_pingpong_1x1")]
    assert f"took between {min(taken):.0f} and {max(taken):.0f} us" in PAGE
    as_numbered, by_group = (
        [time for name, time in order["276x5120x17920"].items() if name.startswith("96x128")]
        for order in (numbered, grouped)
    )
    assert f"sorted by group took {min(by_group):.0f} us for 276 x 5120 x 17920 in tiles of 96 x 128, and" in PAGE
    assert f"and {min(as_numbered):.0f} to {max(as_numbered):.0f} us as they were numbered" in PAGE


PLACEMENT = json.loads((ROOT / "benchmarks/results/placement_h200.json").read_text())


ORDERED = re.findall(r"\n\| (\d+ x \d+ x \d+)[^|]* \| ([^|]+) \| (\d\.\d\d) \| (\d\.\d\d) \|", TEXT)


@pytest.mark.parametrize("said", ORDERED, ids=lambda said: said[0])
def test_what_the_order_gains_is_as_measured(said: tuple[str, ...]) -> None:
    product, design, *figures = said
    found = []
    for row in PLACEMENT["beside the order before"]["rows"]:
        tile, *_, cluster = row["new"]["kernel"].split("_")
        named = design.startswith(tile.replace("x", " x ")) and design.endswith(cluster.replace("x", " x "))
        if row["product"].endswith(product.replace(" ", "")) and named and row["old"]["kernel"] == row["new"]["kernel"]:
            found.append([f"{row['new']['ratio']:.2f}", f"{row['newmix']['ratio'] / row['oldmix']['ratio']:.2f}"])
    assert figures in found


def test_the_page_shows_what_the_order_gains_and_costs() -> None:
    assert len(ORDERED) >= 8
    assert {float(beside) > 1 for _, _, beside, _ in ORDERED} == {True, False}


def test_what_ranks_in_memory_cost_is_said() -> None:
    sections = ("ranks in global memory, beside the order before", "beside the order before")
    memory, arguments = (
        next(row["new"]["ratio"] for row in PLACEMENT[section]["rows"] if row["product"] == "512x4096x4096")
        for section in sections
    )
    assert f"took {memory:.2f} of the time before; with arguments it takes {arguments:.2f}." in PAGE
    assert max(PLACEMENT["placed"]["milliseconds"]) < 10


def test_what_l2_sends_is_said() -> None:
    rows = {(row["product"], row["kernel"].partition("_")[0]): row for row in PLACEMENT["requests"]}
    sectors = {name: 32 * row["l2_sectors"] / row["bytes_to_multiprocessors"] for name, row in rows.items()}
    theirs, other = (value for (_, kernel), value in sectors.items() if kernel == "nvjet")
    ours = sectors["1435x1152x6912", "112x128"]
    assert f"L2 sends {theirs:.2f} sectors for each one that arrives. Without merging it would send" in PAGE
    assert f"would send {168 / 232:.2f}." in PAGE
    assert f"needed {ours:.2f}, in an order" in PAGE
    assert f"need {other:.3f}, which is what" in PAGE
    assert other == pytest.approx((128 / 2 + 88 / 4) / (128 + 88), abs=0.006)
