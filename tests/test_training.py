"""What training does around a compiled model: eager's numbers, in the smallest model that has each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_models import interpreted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import epifuse as ef
from epifuse.pytorch.fuse import Fuse

pytestmark = [pytest.mark.usefixtures("compiled_anew"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Tied(nn.Module):
    """Words in and words out share a weight; the layer between may be computed again in the backward."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(24, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 24, bias=False)
        self.out.weight = self.words.weight
        self.again = again

    def act(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) + x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = checkpoint(self.act, x, use_reentrant=False) if self.again else self.act(x)
        return self.out(x).square().mean()


def tied(**options: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(**options)


IDS = torch.arange(48).view(2, 24) % 24


def trained(model: Tied, step: Callable[[Tensor], Tensor], rounds: Callable[[Any, Any, Any], None]) -> list[Tensor]:
    """The parameters after `rounds` with SGD."""
    rounds(model, step, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return [p.detach().clone() for p in model.parameters()]


def accumulating(model: Tied, step: Callable[[Tensor], Tensor], optimizer: Any) -> None:
    for _ in range(2):
        for ids in (IDS, IDS.flip(1)):
            (step(ids) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(model: Tied, step: Callable[[Tensor], Tensor], optimizer: Any) -> None:
    """The second step overflows: it is skipped, and the scale halved."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(step(IDS) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("rounds", [accumulating, scaled])
def test_training_is_eagers(rounds: Callable[..., None], again: bool) -> None:
    model, other, fuse = tied(again=again), tied(), Fuse(sites="all")
    step = torch.compile(model, backend=interpreted(fuse), fullgraph=True, dynamic=False)
    for got, want in zip(trained(model, step, rounds), trained(other, other, rounds), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert {row.graph for row in fuse.report.fused} == {"forward", "backward"}
    assert model.out.weight is model.words.weight


def test_the_state_has_its_keys_and_a_compiled_optimizer_steps() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.load_state_dict(model.state_dict())
    keys, x = list(model.state_dict()), torch.randn(4, 8)
    step = torch.compile(model, backend=interpreted(Fuse(sites="all")), fullgraph=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    compiled = torch.compile(optimizers[0].step, backend="aot_eager")
    for _ in range(2):
        for each in (step, other):
            each(x).backward(torch.ones(4, 8))
        compiled()
        optimizers[1].step()
        for each in optimizers:
            each.zero_grad()
    assert list(model.state_dict()) == keys
    assert list(ef.compile(model).state_dict()) == list(torch.compile(model).state_dict())
    for got, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_as_many_graphs_as_without_us_over_changing_batches() -> None:
    """The second size makes PyTorch compile for all, and that product is fused too."""
    counts = []
    for sites in ("all", "none"):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        fuse = Fuse(sites=sites)
        step = torch.compile(lambda x, w: torch.relu(x @ w), backend=interpreted(fuse), fullgraph=True)
        w = torch.randn(8, 16)
        for rows in (4, 5, 6, 7, 9):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(step(x, w), torch.relu(x @ w))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert sites == "none" or [row.fused for row in fuse.report.rows] == [True, True]
    assert counts[0] == counts[1] == 2
