"""A mask that lets every key through is left out of a compiled model's attention, and no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

import epifuse as ef
from epifuse.pytorch.attention import LeaveOutFullMasks

B, H, S, E = 2, 3, 17, 8
QKV = tuple(torch.randn(B, H, S, E) for _ in range(3))
Attends = Callable[..., Any]


def bidirectional(q: Any, k: Any, v: Any) -> Any:
    """As transformers 5.17 writes it."""
    queries = torch.arange(S, device=q.device) + 0
    mask = (queries[None, None, :, None] >= 0).expand(B, -1, S, S)
    return attention(q, k, v, attn_mask=mask, dropout_p=0.0)


def of_ones(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(S, S, dtype=torch.bool, device=q.device)
    return attention(q, k, v, mask) + attention(v, k, q, mask)


def causal(q: Any, k: Any, v: Any) -> Any:
    at = torch.arange(S)
    return attention(q, k, v, at[None, :] <= at[:, None])


def written(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(S, S, dtype=torch.bool)
    mask[:, 3] = False
    return attention(q, k, v, mask)


def written_by_a_method(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(S, S, dtype=torch.bool)
    mask.logical_not_().tril_().logical_not_()
    return attention(q, k, v, mask)


def added(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, torch.ones(S, S))


def of_an_argument(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, q[0, 0, :, :1] >= -1e9)


def random(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, torch.rand(S, S) >= 0)


def large(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(1, S, S, 1 << 18, dtype=torch.bool)[..., 0]
    return attention(q, k, v, mask)


def masks(function: Attends) -> list[bool]:
    """Whether each attention of the graph that Dynamo makes has a mask after the pass; values are as before."""
    found: list[bool] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        LeaveOutFullMasks()(module.graph)
        module.graph.lint()
        module.recompile()
        calls = [node for node in module.graph.nodes if node.target is attention]
        found.extend(any(each is not None for each in (*call.args[3:], call.kwargs.get("attn_mask"))) for call in calls)
        return module

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*QKV), function(*QKV))
    return found


@pytest.mark.parametrize("function", [bidirectional, of_ones])
def test_a_full_mask_is_left_out(function: Attends) -> None:
    assert not any(masks(function))


@pytest.mark.parametrize(
    "function",
    [causal, written, written_by_a_method, added, of_an_argument, random, large],
    ids=lambda each: each.__name__,
)
def test_another_is_kept(function: Attends) -> None:
    assert all(masks(function))


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own, on its way to the pass
def test_a_compiled_model_trains_without_it() -> None:
    inputs = [each.clone().requires_grad_() for each in QKV]
    want = torch.autograd.grad(bidirectional(*inputs).square().sum(), inputs)
    got = torch.autograd.grad(ef.compile(bidirectional)(*inputs).square().sum(), inputs)
    torch.testing.assert_close(got, want)
