"""Compiled models on a GPU: fused there, with eager's gradients, also as CUDA graphs; and nothing goes stale."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epifuse as ef

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # one that PyTorch makes before any model's
]
ROWS, WIDTH, HEADS = 256, 256, 4


class Layer(nn.Module):
    """Attention and a feed-forward block, with residuals and layer norms, as BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.first(x + self.out(heads))
        return self.second(x + self.down(F.gelu(self.up(x))))


def gradients(model: nn.Module, step: Any, x: Tensor, *, amp: bool = True) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
        y = step(x)
    y.double().sin().mean().backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def median_error(found: list[Tensor], exact: list[Tensor]) -> float:
    ratios = [((got - want).norm() / want.norm()).item() for got, want in zip(found, exact, strict=True)]
    return sorted(ratios)[len(ratios) // 2]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_layer_trains(mode: str | None) -> None:
    """Three steps: of a CUDA graph the first warms up, the second records and the third replays."""
    torch.manual_seed(0)
    model = Layer().cuda()
    compiled = ef.compile(model, mode=mode, fullgraph=True, dynamic=False, sites="all")
    for seed in range(3):
        x = torch.randn(4, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()
        double = copy.deepcopy(model).double()
        exact = gradients(double, double, x.double(), amp=False)
        torch.compiler.cudagraph_mark_step_begin()
        ours = median_error(gradients(model, compiled, x), exact)
        assert ours <= 1.1 * median_error(gradients(model, model, x), exact)
    assert {row.graph for row in ef.report(compiled).fused} == {"forward", "backward"}
    assert all(row.plan.startswith("sm90") for row in ef.report(compiled).fused)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_float32_trains_in_full() -> None:
    """Its products too that have nothing beside them: cuBLAS multiplies float32 without tensor cores."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    x, double = torch.randn(2048, 1024, device="cuda"), copy.deepcopy(model).double()
    compiled = ef.compile(model, fullgraph=True, dynamic=False)
    exact = gradients(double, double, x.double(), amp=False)
    ours = median_error(gradients(model, compiled, x, amp=False), exact)
    assert ours <= 1.1 * median_error(gradients(model, model, x, amp=False), exact)
    assert len(ef.report(compiled).fused) == 5


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize(("m", "n"), [(256, 1), (1, 256)])
def test_one_row_or_column_is_multiplied_in_full(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By cuBLAS, where tf32 is allowed, and so by us."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    x, w = torch.randn(m, 512, device="cuda"), torch.randn(512, n, device="cuda")
    compiled = ef.compile(lambda x, w: (x @ w).tanh(), fullgraph=True, dynamic=False, sites="all")
    exact = (x.double() @ w.double()).tanh()
    with torch.no_grad():
        ours, theirs = ((y - exact).norm() for y in (compiled(x, w), (x @ w).tanh()))
    assert ours <= 4 * theirs
    assert len(ef.report(compiled).fused) == 1


SCALE = 2.0


def act(accum: Any, r: Any) -> Any:
    return ef.gelu(accum * SCALE) + r


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_captured_number_is_read_again(mode: str | None) -> None:
    a, b, r = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    compiled = ef.compile(lambda a: ef.gemm(a, b, epilogue=act, r=r), mode=mode, fullgraph=True, sites="all")
    try:
        for value in (2.0, 3.0, 0.5, 2.0):
            globals()["SCALE"] = value
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                got = compiled(a).float()
                want = F.gelu((a.float() @ b.float()) * value) + r.float()
                torch.testing.assert_close(got, want, atol=0.5, rtol=0.02)  # of a product that is rounded to bfloat16
    finally:
        globals()["SCALE"] = 2.0


def test_a_replay_reads_new_values() -> None:
    """And writes what the second replay leaves as it is only where that was copied."""
    w, r = torch.randn(256, 512, device="cuda").bfloat16(), torch.randn(256, 512, device="cuda").bfloat16()
    compiled = ef.compile(
        lambda x: torch.relu(x @ w) + r, mode="reduce-overhead", fullgraph=True, dynamic=False, sites="all"
    )
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)).cuda().bfloat16()
            torch.compiler.cudagraph_mark_step_begin()
            want = torch.relu(x.float() @ w.float()) + r.float()
            torch.testing.assert_close(compiled(x).float(), want, atol=0.25, rtol=0.02)
    assert len(ef.report(compiled).fused) == 1


@pytest.mark.filterwarnings("ignore:.*Profiler clears")
def test_a_profile_shows_kernels_under_our_name() -> None:
    w, x = torch.randn(256, 512, device="cuda").bfloat16(), torch.randn(256, 256, device="cuda").bfloat16()
    compiled = ef.compile(lambda x: torch.relu(x @ w), fullgraph=True, dynamic=False, sites="all")
    with torch.no_grad():
        compiled(x)
        compiled(x)
        with torch.profiler.profile() as profile:
            compiled(x)
            torch.cuda.synchronize()
    # On the host, and the range that the profiler makes of it on the device.
    found = [event for event in profile.key_averages() if event.key.startswith("epifuse::sm90")]
    assert found
    assert all(event.count == 1 for event in found)
    assert any(event.device_time_total > 0 for event in found)
