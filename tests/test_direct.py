"""What generated code calls for a fused product: the operator's results, whatever changes from call to call."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import epifuse as ef
from epifuse.pytorch import direct, leaves
from epifuse.pytorch.fuse import Fuse
from epifuse.runtime.launch import Prepared

M, K, N = 16, 8, 24
A, B, C = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)


def spec_of(function: Any) -> str:
    module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(A, B, C)
    Fuse(sites="all")(module.graph)
    (spec,) = (node.args[3] for node in module.graph.nodes if "epifuse.fused" in str(node.target))
    return str(spec)


def one(a: Any, b: Any, c: Any) -> Any:
    return torch.relu(a @ b + c)


def two(a: Any, b: Any, c: Any) -> Any:
    y = torch.relu(a @ b + c)
    return y, y.sum(0, keepdim=True)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, starting at no multiple of 16 bytes."""
    return torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("function", [one, two])
def test_a_place_gives_what_the_operator_gives(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place, launched = direct.place(spec_of(function)), []
    run = Prepared.run
    monkeypatch.setattr(Prepared, "run", lambda *given: (launched.append(given), run(*given))[1])
    for a, c in ((A, C), (A + 1, C - 1), (shifted(A), C), (A, shifted(C)), (A * 2, C)):
        torch.testing.assert_close(place(a, B, [c]), function(a, B, c), atol=1e-4, rtol=1e-4)
    assert len(launched) == 5
    with FlopCounterMode(display=False):  # a mode of PyTorch sees the operator
        place(A, B, [C])
    monkeypatch.setattr(direct.leaves, "request", None)  # nothing is described any more
    torch.testing.assert_close(place(A, B, [C]), function(A, B, C), atol=1e-4, rtol=1e-4)


def test_a_stand_in_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    place, described = direct.place(spec_of(one)), []
    found = direct.find
    monkeypatch.setattr(direct, "find", lambda call: (described.append(call), replace(found(call), is_final=False))[1])
    for _ in range(3):
        place(A, B, [C])
    assert len(described) == 3


@pytest.mark.filterwarnings("ignore:.*Profiler clears")
def test_a_profile_names_it() -> None:
    place = direct.place(spec_of(one))
    place(A, B, [C])
    with torch.profiler.profile() as profile:
        place(A, B, [C])
        ef.gemm(A, B)
    assert sum(event.count for event in profile.key_averages() if event.key.startswith("epifuse::")) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_generated_code_calls_it() -> None:
    """All of it is products: no C++ to compile."""
    with inductor.patch(fx_graph_cache=False):
        got, (code,) = run_and_get_code(ef.compile(lambda a, b, c: a @ b + c, sites="all"), A, B, C)
    torch.testing.assert_close(got, A @ B + C, atol=1e-4, rtol=1e-4)
    assert "epifuse_place(" in code
    assert "torch.ops.epifuse.fused1.default(" not in code


def test_one_row_or_column_of_float32_is_in_full() -> None:
    """On a GPU, as cuBLAS multiplies it; the precision of others is PyTorch's switch."""
    with FakeTensorMode():
        for dtype, m, n, wanted in (
            (torch.float32, 256, 1, "ieee"),
            (torch.float32, 1, 256, "ieee"),
            (torch.float32, 2, 2, None),
            (torch.bfloat16, 256, 1, None),
        ):
            a, b = torch.empty(m, 64, dtype=dtype, device="cuda"), torch.empty(64, n, dtype=dtype, device="cuda")
            assert leaves.options_of(a, b).precision == wanted
            assert leaves.options_of(a.cpu(), b.cpu()).precision is None
