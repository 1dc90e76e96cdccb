"""What the pages say of the choice of designs with epilogues is what was measured."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import epilogues  # noqa: E402 - found through the path above
from shapes_report import Summary  # noqa: E402

PAGE = " ".join((ROOT / "docs/hopper_notes.md").read_text().split())
TUNING = " ".join((ROOT / "docs/tuning.md").read_text().split())
COLUMNS = {"plain": 0, "gelu": 1, "gelu_residual": 3, "accumulated": 5}


def saved(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


@pytest.mark.parametrize("name", ["epilogues_h100", "epilogues_h200", "epilogues_h100_second", "epilogues_h200_second"])
def test_the_choice_with_epilogues_is_as_said(name):
    row = PAGE.partition(f"/{name}.json) | ")[2].split(" | ")[:6]
    row[-1] = row[-1].split()[0]
    found = {case: Summary.of([*ratios.values()]).mean for case, ratios in epilogues.ratios_of(saved(name)).items()}
    assert {case: f"{mean:.3f}" for case, mean in found.items()} == {case: row[i] for case, i in COLUMNS.items()}
    assert found["gelu_residual"] < float(row[2]) - 0.02, "the epilogue counts"


@pytest.mark.parametrize(
    ("name", "product", "said"),
    [
        ("epilogues_h100", "2048x1152x4608", "takes 38.6 us so on an H100, and 44.4 in the same tiles"),
        ("epilogues_h200", "512x6144x4096", "takes 38.4 and 43.7 on an H200"),
    ],
)
def test_what_a_shared_tile_gains_is_said(name, product, said):
    times = saved(name)["products"][product]["gelu_residual"]
    shared, alone = (times[f"sm90_gemm_128x192_{schedule}_2x1"] for schedule in ("cooperative", "pingpong"))
    assert said in PAGE
    assert f"{shared + 1e-9:.1f}" in said
    assert f"{alone:.1f}" in said


def test_what_the_benchmark_takes_since_is_said():
    rows = [row for card in ("h100", "h200") for row in saved(f"trees_epilogues_{card}")["rows"]]
    other = [row for row in rows if not 0.98 <= row["ratios"]["after"][0] <= 1.02]
    assert f"0.98 to 1.02 of the time in {len(rows) - 1} of {len(rows)} cases" in PAGE
    assert [(row["case"], row["shape"]) for row in other] == [("row_squares", [64, 14336, 4096])]
    (now,) = (
        row["ratios"]["after"][0]
        for row in saved("few_rows_h100")["rows"]
        if row["case"] == "row_squares" and row["shape"] == [64, 14336, 4096]
    )
    assert f"32 warps merge them since, not 8: {now:.2f}" in PAGE


def test_what_fetching_into_l2_gained_is_said():
    rows = saved("prefetch_h100")["rows"]
    beside, instead = (
        [row["ratios"][row_name][0] for row in rows]
        for row_name in ("where there are no spare stages", "instead of spare stages")
    )
    said = f"between {1 - min(beside):.0%} less and {max(beside) - 1:.0%} more, of {len(rows)} products"
    assert said.replace("%", " %") in TUNING
    assert f"up to {max(instead) - 1:.0%} more".replace("%", " %") in TUNING
