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


def saved(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def test_what_other_shared_tiles_would_gain_is_said():
    gains = {"gelu": [], "gelu_residual": []}
    for name in ("epilogues_h100", "epilogues_h200"):
        data, ratios = saved(name), {}
        for case, product, times in epilogues.timed(data):
            ratios.setdefault(case, []).append(min(times.values()) / min(data["products"][product][case].values()))
        for case, found in gains.items():
            found.append(100 * (Summary.of(ratios[case]).mean - 1))
    low, high = sorted(gains["gelu_residual"])
    assert f"gain another {low:.1f} to {high:.1f} % on average with that epilogue" in PAGE
    assert f"and {max(gains['gelu']):.1f} % with a lighter one" in PAGE


@pytest.mark.parametrize(
    ("name", "product", "said"),
    [
        ("epilogues_h100", "2048x1152x4608", "takes 38.6 us in it on an H100, and 44.4 in the ping-pong design"),
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
    assert f"it takes {now:.2f} (" in PAGE


def test_what_counting_instructions_changed_is_said():
    rows = {(row["case"], *row["shape"]): row for row in saved("trees_epilogue_model_h100")["rows"]}
    ratios = {case: row["ratios"]["after"][0] for case, row in rows.items()}
    low, high = min(ratios.values()), max(ratios.values())
    assert f"the present one takes {low:.2f} to {high:.2f} of the time in {len(rows)} cases" in PAGE
    assert sum(row["kernels"]["before"] != row["kernels"]["after"] for row in rows.values()) == 5
    assert max(ratios, key=ratios.__getitem__) == ("gelu", 2048, 3072, 1024)


def test_what_fetching_into_l2_gained_is_said():
    rows = saved("prefetch_h100")["rows"]
    beside, instead = (
        [row["ratios"][row_name][0] for row in rows]
        for row_name in ("where there are no spare stages", "instead of spare stages")
    )
    said = f"between {1 - min(beside):.0%} less and {max(beside) - 1:.0%} more, of {len(rows)} products"
    assert said.replace("%", " %") in TUNING
    assert f"up to {max(instead) - 1:.0%} more".replace("%", " %") in TUNING


def test_what_waiting_for_code_takes_is_said():
    found = {(row["epilogue"], row["tile"]): row["us"] for row in saved("cold_code_h200")["rows"]}
    epilogues_ = ("cross_entropy", "gelu_backward", "gelu_tanh_backward")
    wide, small = (
        [(found[name, tile]["nothing"], found[name, tile]["other kernels"]) for name in epilogues_]
        for tile in ("128x256_cooperative", "64x128_pingpong")
    )
    (one, then), (second, third), (fourth, fifth) = wide
    assert f"takes {one} us right behind its own launch and {then} behind other kernels" in PAGE
    assert f"an exact gelu {second} and {third}, that of gelu_tanh {fourth} and {fifth}." in PAGE
    assert "they take " + ", ".join(f"{like} and {other}" for like, other in small) in PAGE


def test_instructions_of_functions_are_said():
    counts = saved("epilogue_instructions")["a value"]
    exp, log1p, sums, plain = (counts[name] for name in ("exp", "log1p", "sum_log1p_exp", "sum"))
    assert f"{exp['narrow']:.0f} for an exponential whose result is stored in 16 bits" in PAGE
    assert f"{exp['full']:.0f} for one in float32, {log1p['full']:.0f} for log1p" in PAGE
    opened = exp["full"] + log1p["full"] + plain["full"]
    assert f"takes {sums['full']:.0f} instructions a value, where a sum of log1p(exp(x)) takes {opened:.0f}" in PAGE
