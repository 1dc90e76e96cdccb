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


def written_through_a_view(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(S, S, dtype=torch.bool)
    mask[:, 3:].fill_(False)
    return attention(q, k, v, mask)


def written_through_a_view_of_a_view(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(S, S, dtype=torch.bool)
    mask[2:][:, 3:] = False
    return attention(q, k, v, mask)


def written_through_itself_again(q: Any, k: Any, v: Any) -> Any:
    """`contiguous` and `bool` copy nothing here."""
    mask = torch.ones(S, S, dtype=torch.bool)
    mask.transpose(0, 1).contiguous().bool().tril_()
    mask.contiguous().bool().tril_()
    return attention(q, k, v, mask)


def narrowed(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(S, S, dtype=torch.bool)
    mask.narrow(1, 3, 2).zero_()
    return attention(q, k, v, mask)


def written_by_out(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(S, S, dtype=torch.bool)
    at = torch.arange(S)
    torch.logical_and(mask, at[None, :] <= at[:, None], out=mask)
    return attention(q, k, v, mask)


def made_by_out(q: Any, k: Any, v: Any) -> Any:
    mask, other = torch.ones(S, S, dtype=torch.bool), torch.zeros(S, S, dtype=torch.bool)
    return attention(q, k, v, torch.logical_or(mask, mask, out=other))


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
    compiled, found = passed(function)
    torch.testing.assert_close(compiled(*QKV), function(*QKV))
    return found


def passed(function: Attends) -> tuple[Attends, list[bool]]:
    """The function with the pass, and what `masks` returns, once it has been called."""
    found: list[bool] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        LeaveOutFullMasks()(module.graph)
        module.graph.lint()
        module.recompile()
        calls = [node for node in module.graph.nodes if node.target is attention]
        found.extend(any(each is not None for each in (*call.args[3:], call.kwargs.get("attn_mask"))) for call in calls)
        return module

    torch.compiler.reset()
    return torch.compile(function, backend=backend, fullgraph=True), found


@pytest.mark.parametrize("function", [bidirectional, of_ones])
def test_a_full_mask_is_left_out(function: Attends) -> None:
    assert not any(masks(function))


@pytest.mark.parametrize(
    "function",
    [
        *(causal, written, written_by_a_method, written_through_a_view, written_through_a_view_of_a_view),
        *(written_through_itself_again, narrowed, written_by_out, made_by_out),
        *(added, of_an_argument, random, large),
    ],
    ids=lambda each: each.__name__,
)
def test_another_is_kept(function: Attends) -> None:
    assert all(masks(function))


@pytest.mark.parametrize("batches", [(4, 1), (4, H), (5, 1, 1)])
def test_a_mask_that_adds_batches_is_kept(batches: tuple[int, ...]) -> None:
    def with_more(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, torch.ones(*batches, S, S, dtype=torch.bool, device=q.device))

    compiled, found = passed(with_more)
    inputs = [each[:1].to("meta") for each in QKV]  # the CPU's kernels refuse such a mask
    assert compiled(*inputs).shape == with_more(*inputs).shape
    assert found == [True]


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own, on its way to the pass
def test_a_compiled_model_trains_without_it() -> None:
    inputs = [each.clone().requires_grad_() for each in QKV]
    want = torch.autograd.grad(bidirectional(*inputs).square().sum(), inputs)
    got = torch.autograd.grad(ef.compile(bidirectional)(*inputs).square().sum(), inputs)
    torch.testing.assert_close(got, want)
