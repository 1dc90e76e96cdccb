"""Small models whose products have real neighbours, and a compiler that runs the pass without generating code."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

Step = Callable[..., Tensor]
BATCH, LENGTH, HIDDEN, HEADS = 3, 10, 32, 4


def split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class Encoder(nn.Module):
    """A block with layer norms behind the residuals, as BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = (split(each(x), HEADS) for each in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        x = self.first(x + self.o(found))
        return self.second(x + self.down(F.gelu(self.up(x))))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


class Decoder(nn.Module):
    """A block with rotary positions, grouped heads, a causal mask and a gated MLP, as Llama's; attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, HIDDEN // 2, bias=False) for _ in range(2))
        self.first, self.second = RMSNorm(), RMSNorm()
        self.gate, self.up = (nn.Linear(HIDDEN, 48, bias=False) for _ in range(2))
        self.down = nn.Linear(48, HIDDEN, bias=False)
        angle = torch.arange(LENGTH)[:, None] * 0.1 ** torch.arange(HIDDEN // HEADS // 2).repeat(2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * self.cos + torch.cat([-x[..., half:], x[..., :half]], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = split(self.q(y), HEADS), split(self.k(y), HEADS // 2), split(self.v(y), HEADS // 2)
        k, v = (each.repeat_interleave(2, 1) for each in (self.turned(k), v))
        scores = self.turned(q) @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        found = torch.softmax(scores.masked_fill(~causal, float("-inf")), -1) @ v
        x = x + self.o(found.transpose(1, 2).reshape(x.shape))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Labels(nn.Module):
    """A wide classifier behind a hidden layer, with a loss for each label, as XML-CNN's."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.labels = nn.Linear(HIDDEN, 48), nn.Linear(48, 96)

    def forward(self, x: Tensor) -> Tensor:
        z = self.labels(torch.relu(self.hidden(x.flatten(0, 1))))
        return F.binary_cross_entropy_with_logits(z, (z.detach() > 0.3).to(z.dtype))


class Tokens(nn.Module):
    """The decoder between an embedding and tied logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(50, HIDDEN), Decoder()

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.block(self.table(ids)) @ self.table.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten().roll(1))


class Pooled(nn.Module):
    """Patches by a convolution, learned positions, an encoder, and a head on the first of them, as ViT's."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block = nn.Conv2d(3, HIDDEN, 4, 4), Encoder()
        self.positions, self.head = nn.Parameter(torch.randn(9, HIDDEN)), nn.Linear(HIDDEN, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return F.cross_entropy(self.head(self.block(x)[:, 0]), torch.arange(BATCH))


def hidden() -> Tensor:
    return torch.randn(BATCH, LENGTH, HIDDEN)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "encoder": (Encoder, hidden),
    "decoder": (Decoder, hidden),
    "labels": (Labels, hidden),
    "tokens": (Tokens, lambda: torch.randint(0, 50, (BATCH, LENGTH))),
    "pooled": (Pooled, lambda: torch.randn(BATCH, 3, 12, 12)),
}


def interpreted(fuse: Callable[[Graph], object]) -> Any:
    """A backend that runs the pass on PyTorch's training graphs, and the graphs operation by operation."""

    def compiler(module: GraphModule, _: Any) -> Any:
        fuse(module.graph)
        module.recompile()

        def run(args: list[Any]) -> Any:
            taken, args[:] = list(args), []
            return module(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd looks for
        return run

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def gradients(model: nn.Module, step: Step, x: Tensor) -> dict[str, Tensor]:
    """The loss and the gradient of each parameter, in float64."""
    model.zero_grad()
    loss = step(x)
    loss = loss if loss.dim() == 0 else (loss.float() if loss.dtype != torch.float64 else loss).sin().mean()
    loss.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **found}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """By tensor: the error beside its norm, or a thousandth of the median norm where that is more."""
    norms = sorted(value.norm().item() for name, value in exact.items() if name != "loss")
    least = 1e-3 * norms[len(norms) // 2]
    return {
        name: ((found[name] - value).norm() / max(value.norm().item(), least)).item() for name, value in exact.items()
    }
