"""The program that fits the choice's constants: on times that the model itself made, with one constant changed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import fit_choice  # noqa: E402 - found through the path above
import shapes  # noqa: E402
from layers import parsed  # noqa: E402

from epifuse.base.target import TARGETS  # noqa: E402
from epifuse.plan import select  # noqa: E402
from epifuse.providers import candidates  # noqa: E402
from epifuse.providers.cutedsl import tuned  # noqa: E402

PRODUCTS = ("428x3072x1024", "412x2048x8192", "4096x4096x4096", "nn:640x1024x2048", "tn:1024x640x8192")


def saved() -> dict[str, object]:
    """A file whose times are what the model says."""
    products = {}
    for name in PRODUCTS:
        args = shapes.PLAIN.arguments(shapes.operands(parsed(name), "meta"))
        plans = select(args.structure, args.problem._replace(target=TARGETS[90]), candidates()).plans
        times = {plan.spec.name: plan.allocation.cost for plan in plans}
        products[name] = {"pick": {"microseconds": times}}
    return {"device": "NVIDIA H100 80GB HBM3", "seed": "none", "products": products}


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constant is what it was after the test, whatever was fitted."""
    for name in fit_choice.RATES:
        monkeypatch.setattr(tuned, name, getattr(tuned, name))
    for name in fit_choice.FITTED:
        monkeypatch.setattr(tuned, name, getattr(tuned, name))
    monkeypatch.setattr(fit_choice.processors, "GPUS", dict(fit_choice.processors.GPUS))


@pytest.mark.usefixtures("as_before")
def test_what_the_model_made_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = fit_choice.cases_of(saved())
    assert fit_choice.loss(cases) == 0.0
    monkeypatch.setattr(tuned, "L2_EXPOSED", replace(tuned.L2_EXPOSED, value=2.0))
    lost = fit_choice.loss(cases)
    assert lost > 0.0, "how much L2 bounds changes the choice of some product here"
    assert fit_choice.fit(cases)
    assert fit_choice.loss(cases) < lost


@pytest.mark.usefixtures("as_before")
def test_the_command_tells_of_files_that_are_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fitted", "held"):
        (tmp_path / f"{name}.json").write_text(json.dumps(saved()))
    fitted, held = tmp_path / "fitted.json", tmp_path / "held.json"
    assert fit_choice.main([str(fitted), "--hold", str(held)]) == 0
    told = capsys.readouterr().out
    assert "fitted.json: 1.0000, 1.000, 1.000 -> 1.0000, 1.000, 1.000" in told
    assert "held.json (held out): 1.0000, 1.000, 1.000" in told
