"""Twenty steps of the training that benchmarks/training.py runs for longer: the losses are eager's."""

import torch
from compile_models import interpreted
from training import Sizes, distance, train

from epifuse.pytorch.fuse import Fuse

SIZES = Sizes(width=32, layers=1, heads=2, length=32, batch=8)
STEPS = 20


def curve(way: str, **options: object) -> list[float]:
    return train(way, steps=STEPS, sizes=SIZES, **options).losses  # type: ignore[arg-type]  # by name


def test_losses_are_those_of_eager() -> None:
    eager, fuse = curve("eager"), Fuse(sites="all")
    noise = max(distance(curve("eager", moved=seed), eager) for seed in (1, 2, 3))
    ours = {
        "ef.compile": curve(
            "ef.compile", compile=lambda model: torch.compile(model, backend=interpreted(fuse), dynamic=False)
        ),
        "ef.linear": curve("ef.linear"),
    }
    assert {row.graph for row in fuse.report.fused} == {"forward", "backward"}
    assert eager[-1] < eager[0] - 0.1
    for way, losses in ours.items():
        assert distance(losses, eager) <= 4 * noise, way
    # What is compared is not blind: other batches are far away.
    assert distance(curve("eager", order=1), eager) > 100 * noise
