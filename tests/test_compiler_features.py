"""Features of PyTorch's compiler that a model may use beside the pass: each works as under torch.compile."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import flex_attention

import epifuse as ef

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # PyTorch's own, as it imports its compiler
]

HEADS, WIDTH = 4, 32


def run_as_it_is(module: GraphModule, inputs: Any, **options: Any) -> Callable[[Any], Any]:
    """What Inductor does with a graph up to the pass and with it. Then PyTorch runs the graph, operation by operation:
    to generate C++ and compile it takes ten seconds a graph."""
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(module, inputs)
    compile_fx._recursive_record_original_output_strides(module)
    with V.set_fake_mode(fake_mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=options.get("is_inference", False))
    module.recompile()

    def call(args: Any) -> Any:
        with torch.no_grad():
            return module(*args)

    call._boxed_call = True  # type: ignore[attr-defined]  # as AOTAutograd asks for
    return call


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch._inductor import compile_fx  # it warns, which is an error where pytest imports this file

    whole = compile_fx.compile_fx
    own = {"inner_compile": run_as_it_is}
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *args, **given: whole(*args, **(given | own)))
    torch.compiler.reset()
    counters.clear()
    # Otherwise PyTorch hides what the pass raises for a backward graph, and tries again at the first backward.
    with functorch.patch(force_non_lazy_backward_lowering=True):
        yield
    torch.compiler.reset()


class Attention(nn.Module):
    """Attention of several heads, by `flex_attention`, or by operations with a dropout."""

    def __init__(self, *, flex: bool) -> None:
        super().__init__()
        self.flex, self.qkv, self.out = flex, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.flex:
            mixed = flex_attention(q, k, v)
        else:
            weights = (q @ k.transpose(-1, -2) * k.shape[-1] ** -0.5).softmax(-1)
            mixed = F.dropout(weights, 0.3) @ v
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]  # a module's result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]  # a module's result


def test_flex_attention() -> None:
    model, x = Attention(flex=True), torch.randn(2, 128, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(ef.compile(model, sites="all")(x), torch.compile(model)(x))


def test_jagged_tensors() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    rows = [torch.randn(length, WIDTH) for length in (5, 8)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    found = ef.compile(model, sites="all")(jagged).values()
    torch.testing.assert_close(found, model(torch.cat(rows)))


def test_dropout_of_attention_weights_is_drawn_again() -> None:
    """Inductor's own pattern of attention takes this model's operations, before masks are marked."""
    model, x = Attention(flex=False), torch.randn(2, 16, WIDTH)
    ef.compile(model, sites="all", masks="drawn")(x).sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


def test_a_gradient_that_nobody_needs() -> None:
    """The derivative of a convolution has three results, and None for that of the input."""
    x, weight, bias = torch.randn(4, 8, 7), torch.randn(8, 8, 3), torch.randn(8, requires_grad=True)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv1d(x, weight, bias).sin().sum() + (x.mean(0).t() @ bias[:, None]).relu().sum()

    (found,) = torch.autograd.grad(ef.compile(loss, sites="all")(x, weight.requires_grad_(), bias), bias)
    (wanted,) = torch.autograd.grad(loss(x, weight, bias), bias)
    torch.testing.assert_close(found, wanted)


def test_equal_blocks_share_their_graphs() -> None:
    """Compiled one by one, as models of many layers often are; the ninth would otherwise not be compiled."""
    blocks, x = [ef.compile(Block(), sites="all") for _ in range(10)], torch.randn(8, WIDTH)
    with torch.no_grad():
        for block in blocks:
            x = block(x)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(ef.report(blocks[0]).rows) == 2
    assert "equal model" in str(ef.report(blocks[-1]))
    other = ef.compile(Block(), sites="none")
    with torch.no_grad():
        other(x)
    assert counters["stats"]["unique_graphs"] == 2, "other options"


def test_a_function_that_leaves_products_is_asked_again() -> None:
    """What it answers may have changed."""
    model, x, left = Block(), torch.randn(8, WIDTH), set[str]()

    def leave(row: Any) -> bool:
        return row.graph in left

    fused = []
    for _ in range(2):
        compiled = ef.compile(model, sites="all", leave=leave)
        with torch.no_grad():
            compiled(x)
        fused.append(len(ef.report(compiled).fused))
        left.add("forward")
    assert fused == [2, 0]
