"""The drawn set of shapes, and what its report concludes from measurements."""

import json
import math
from pathlib import Path
from typing import Any

import layers
import pytest
import shapes
import shapes_report
from layers import Product, draw, parsed

import epifuse as ef

DRAWN = draw("some commit", 150)


def test_a_seed_draws_the_same_products_each_time() -> None:
    assert draw("some commit", 150) == DRAWN
    assert draw("some commit", 20) == DRAWN[:20]
    assert {each.name for each in draw("another", 150)} != {each.name for each in DRAWN}


def test_a_draw_has_every_use_and_no_product_twice() -> None:
    assert len({each.name for each in DRAWN}) == len(DRAWN)
    assert {each.of.partition(":")[0] for each in DRAWN} == set(layers.USES)
    assert {each.form for each in DRAWN} == {"nt", "nn", "tn"}
    assert any(each.batch > 1 for each in DRAWN)
    assert any(each.n * 2 % 128 for each in DRAWN), "rows that are no multiple of a line"


def test_every_product_can_run() -> None:
    for each in DRAWN:
        assert each.is_aligned
        assert each.flops <= layers.MOST_FLOPS


@pytest.mark.parametrize("product", [Product(1, 2, 3), Product(8, 16, 24, 5, "nn"), Product(8, 8, 9, form="tn")])
def test_a_name_is_read_back(product: Product) -> None:
    assert parsed(product.name) == product


@pytest.mark.parametrize("form", ["nt", "nn", "tn"])
def test_operands_lie_as_their_form_says(form: str) -> None:
    x = shapes.operands(Product(8, 16, 24, 3, form), "cpu")
    assert (tuple(x.a.shape), tuple(x.b.shape), tuple(x.D.shape)) == ((3, 8, 24), (3, 24, 16), (3, 8, 16))
    assert (x.a.stride(-1) == 1, x.b.stride(-1) == 1) == (form != "tn", form != "nt")


def test_slices_are_the_whole_in_order() -> None:
    assert [each for index in (1, 2, 3, 4) for each in shapes.part_of(DRAWN, (index, 4))] == DRAWN


def test_what_a_call_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def pick(product: Product, row: Any, options: Any) -> dict[str, Any]:
        measured.append(product.name)
        return {"chosen": "x", "microseconds": {"x": 1.0}}

    monkeypatch.setattr(shapes, "pick", pick)
    words = ["pick", "--device", "cpu", "--products", "1x2x8,3x4x8", "--save", str(tmp_path / "saved.json")]
    assert shapes.main([*words, "--seconds", "-1"]) == 3
    assert shapes.main([*words, "--part", "1/2"]) == 0
    assert shapes.main(words) == 0
    assert measured == ["1x2x8", "3x4x8"]


def row(ours: float, best: float, **peers: float) -> dict[str, Any]:
    times = {"ours": ours, "best": best} | {name.replace("_", " "): time for name, time in peers.items()}
    picked = {"chosen": "a", "microseconds": {"a": ours, "b": best}}
    return {"of": "a model", "pick": picked, "judge": {"chosen": "a", "best": "b", "microseconds": times}}


SAVED = {
    "device": "NVIDIA H100",
    "seed": "s",
    "products": {
        "512x1024x1024": row(21.0, 20.0, cuBLAS=20.0, QuACK=19.0),
        "1024x1024x1024": row(40.0, 40.0, cuBLAS=50.0, gelu_ours=60.0, gelu_cuBLASLt=50.0),
        "16x1024x1024": row(6.0, 4.0, cuBLAS=4.0),
    },
}


def test_each_figure_is_of_the_products_it_is_about() -> None:
    found = {name: dict(ratios) for name, (ratios, _) in shapes_report.figures(SAVED).items()}
    assert found == {
        "chosen / best of our designs, M >= 512": {"512x1024x1024": 1.05, "1024x1024x1024": 1.0},
        "chosen / best of our designs, fewer rows": {"16x1024x1024": 1.5},
        "chosen / cuBLAS": {"512x1024x1024": 1.05, "1024x1024x1024": 0.8},
        "bias + gelu / cuBLASLt": {"1024x1024x1024": 1.2},
        "chosen / QuACK untuned": {"512x1024x1024": 21 / 19},
        "tuned / the best of cuBLAS, QuACK and our choice": {
            "512x1024x1024": 20 / 19,
            "1024x1024x1024": 1.0,
            "16x1024x1024": 1.0,
        },
    }


def test_bounds_are_told_with_what_breaks_them() -> None:
    text = shapes_report.text(SAVED)
    assert "chosen / cuBLAS: 2 products, mean 0.917, 95th percentile 1.050, worst 1.050" in text
    assert "  holds: geometric mean <= 0.97\n  FAILS: at most 2% above 1.03\n  holds: none above 1.06" in text
    assert "    1.050  512x1024x1024 (a model): a -> b; ours 21.0" in text


def test_a_summary_is_that_of_ratios() -> None:
    count, mean, most, worst = shapes_report.Summary.of([1.0] * 18 + [2.0, 4.0])
    assert (count, most, worst) == (20, 2.0, 4.0)
    assert mean == pytest.approx(math.exp(math.log(8) / 20))


def test_results_of_several_calls_are_merged(tmp_path: Path) -> None:
    first, second = ({**SAVED, "products": {name: SAVED["products"][name]}} for name in list(SAVED["products"])[:2])
    assert set(shapes.merged([first, second])["products"]) == {*first["products"], *second["products"]}
    with pytest.raises(ValueError, match="different devices or seeds"):
        shapes.merged([first, {**second, "device": "NVIDIA H200"}])


def test_what_is_chosen_now_is_foretold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = shapes.PLAIN.arguments(shapes.operands(parsed("4096x4096x4096"), "meta"))
    best, second = (kernel.spec.name for kernel in ef.get_kernels(args, cc=90, limit=2))
    rows = {"4096x4096x4096": {"of": "", "pick": {"microseconds": {best: 3.0, second: 2.0, "no longer there": 1.0}}}}
    (tmp_path / "picked.json").write_text(json.dumps({**SAVED, "products": rows}))
    assert shapes.main(["foretell", str(tmp_path / "picked.json")]) == 0
    chosen, fastest = (name.removeprefix("sm90_gemm_") for name in (best, second))
    assert f"1.500  4096x4096x4096: {chosen} -> {fastest}" in capsys.readouterr().out
