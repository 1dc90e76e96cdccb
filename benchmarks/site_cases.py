"""Random products with random operations around them, as graphs of ATen operations. `sites.py` measures them.

Sizes are those of transformers, MLPs, classifiers with many labels, recommenders and vision models. The operations
around a product, its tail, are those of training, forward and backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor.inductor_prims  # registers prims.fma
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

Tail = Callable[[Tensor, "Given"], Any]


class Given:
    """The tensors that a tail reads besides the product. They are taken from `handed` in order; if that is None, empty
    ones are made on request and kept in `tensors`."""

    def __init__(self, case: Case, device: str, handed: Sequence[Tensor] | None = None) -> None:
        self.shape, self.dtype, self.wide, self.device = case.shape, case.dtype, case.wide, device
        self.handed = None if handed is None else list(handed)
        self.tensors: list[Tensor] = []

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The next tensor."""
        if self.handed is not None:
            return self.handed.pop(0)
        self.tensors.append(torch.empty(shape, dtype=dtype or self.dtype, device=self.device))
        return self.tensors[-1]

    def full(self, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the product's shape."""
        return self.tensor(*self.shape, dtype=dtype)

    def stream(self) -> Tensor:
        """A residual stream, which is in float32 if the case is `wide`, as under autocast."""
        return self.full(torch.float32 if self.wide else self.dtype)

    def row(self, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of one value for each column."""
        return self.tensor(self.shape[-1], dtype=dtype)

    def column(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of one value for each row."""
        return self.tensor(*self.shape[:-1], 1, dtype=dtype)


def gelu(y: Tensor, at: Given) -> Any:
    return F.gelu(y + at.row())


def gelu_saved(y: Tensor, at: Given) -> Any:
    z = y + at.row()
    return F.gelu(z, approximate="tanh"), z


def gelu_residual(y: Tensor, at: Given) -> Any:
    return F.gelu(y + at.row()) + at.stream()


def gelu_backward(y: Tensor, at: Given) -> Any:
    dz = torch.ops.aten.gelu_backward(y, at.full())
    return dz, dz.sum(0)


def gelu_tanh_backward(y: Tensor, at: Given) -> Any:
    return torch.ops.aten.gelu_backward(y, at.full(), approximate="tanh")


def relu_saved(y: Tensor, at: Given) -> Any:
    z = torch.relu(y + at.row())
    return z, z <= 0


def relu_backward(y: Tensor, at: Given) -> Any:
    dz = torch.where(at.full() > 0, y, 0.0)
    return dz, dz.sum(0, dtype=torch.float32)


def silu_gate(y: Tensor, at: Given) -> Any:
    return F.silu(y) * at.full()


def gate_of_silu(y: Tensor, at: Given) -> Any:
    return y * F.silu(at.full()), y


def silu_gate_backward(y: Tensor, at: Given) -> Any:
    gate, up = at.full().float(), at.full().float()
    s, d = torch.sigmoid(gate), y.float()
    return (d * gate * s).to(y.dtype), (d * up * s * (1 + gate * (1 - s))).to(y.dtype)


def residual(y: Tensor, at: Given) -> Any:
    return at.stream() + y


def scaled_residual(y: Tensor, at: Given) -> Any:
    return at.stream() + at.row() * (y + at.row())


def two_residuals(y: Tensor, at: Given) -> Any:
    return at.stream() + at.stream() + y


def rms_statistics(y: Tensor, at: Given) -> Any:
    r = at.stream().float() + y.float()
    return r.to(torch.float32 if at.wide else y.dtype), torch.rsqrt(r.square().mean(-1, keepdim=True) + 1e-6)


def rms_norm(y: Tensor, at: Given) -> Any:
    r = at.stream().float() + y.float()
    rstd = torch.rsqrt(r.square().mean(-1, keepdim=True) + 1e-6)
    return r, (r * rstd * at.row(torch.float32)).to(y.dtype), rstd


def layer_norm(y: Tensor, at: Given) -> Any:
    r = at.stream().float() + y.float() + at.row(torch.float32)
    return r, F.layer_norm(r, r.shape[-1:], at.row(torch.float32), at.row(torch.float32)).to(y.dtype)


def layer_norm_backward(y: Tensor, at: Given) -> Any:
    n = y.shape[-1]
    d, xhat, rstd = at.stream().float() + y.float(), at.full(torch.float32), at.column()
    g = d * at.row(torch.float32)
    dx = rstd / n * (g * n - g.sum(-1, keepdim=True) - xhat * (g * xhat).sum(-1, keepdim=True))
    return dx, dx.to(y.dtype), (d * xhat).sum(0), d.sum(0)


def dropout_residual(y: Tensor, at: Given) -> Any:
    return at.stream() + torch.where(at.full(torch.bool), (y + at.row()) * (1 / 0.9), 0.0)


def scaled(y: Tensor, at: Given) -> Any:
    return (y * 0.125).float()


def widened(y: Tensor, at: Given) -> Any:
    return y.float()


def accumulated(y: Tensor, at: Given) -> Any:
    return at.full(torch.float32) + y.float()


def softmax(y: Tensor, at: Given) -> Any:
    return torch.softmax((y * 0.125).float(), -1).to(y.dtype)


def masked_softmax(y: Tensor, at: Given) -> Any:
    return torch.softmax((y * 0.125).float() + at.row(torch.float32), -1).to(y.dtype)


def softmax_backward(y: Tensor, at: Given) -> Any:
    p, d = at.full().float(), y.float()
    return ((d - (d * p).sum(-1, keepdim=True)) * p * 0.125).to(y.dtype)


def bce(y: Tensor, at: Given) -> Any:
    z, t = (y + at.row()).float(), at.full(torch.bool).float()
    return ((torch.sigmoid(z) - t) / z.numel()).to(y.dtype), (F.softplus(z) - z * t).sum()


def capped(y: Tensor, at: Given) -> Any:
    return torch.tanh(y.float() / 30) * 30


def amax(y: Tensor, at: Given) -> Any:
    z = y.float() + at.row(torch.float32)
    return z.to(y.dtype), z.abs().amax()


def column_sum(y: Tensor, at: Given) -> Any:
    return y, y.sum(0, dtype=torch.float32)


ELEMENTWISE = (
    *(gelu, gelu_saved, gelu_residual, gelu_tanh_backward, relu_saved, silu_gate, gate_of_silu, silu_gate_backward),
    *(residual, scaled_residual, two_residuals, dropout_residual, scaled, capped),
)
SUMS = (gelu_backward, relu_backward, column_sum, amax, bce)
ROWS = (rms_statistics, rms_norm, layer_norm, layer_norm_backward, softmax)
WEIGHTS = (widened, accumulated)
SCORES = (softmax, masked_softmax, softmax_backward, scaled)
WIDTHS = (512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
TOKENS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


class Case(NamedTuple):
    """A product by `operation`, followed by `tail`. `shape` is ([L,] M, N). B lies by columns if it is a weight."""

    index: int
    operation: str
    tail: Tail
    shape: tuple[int, ...]
    k: int
    dtype: torch.dtype
    wide: bool
    by_columns: bool

    @property
    def name(self) -> str:
        """The case in words."""
        shape = " x ".join(map(str, (*self.shape, self.k)))
        return f"{self.operation} {shape} {str(self.dtype)[6:]} {self.tail.__name__}{' wide' * self.wide}"


def drawn(index: int, seed: int, largest: int | None = None) -> Case:
    """The case with the number `index`. Every run with the same seed draws the same cases. No extent is larger than
    `largest`."""
    pick = random.Random(f"{seed} {index}")
    dtype = torch.bfloat16 if pick.random() < 0.8 else torch.float16
    wide, forward = pick.random() < 0.6, pick.random() < 0.6
    operation = "mm"
    tails: tuple[Tail, ...] = (*ELEMENTWISE, *SUMS)
    family = pick.choices(
        ("transformer", "vision", "mlp", "labels", "dlrm", "weights", "scores"), (7, 3, 3, 1, 2, 3, 1)
    )[0]
    if family in ("transformer", "vision"):
        m = pick.choice(TOKENS) if family == "transformer" else pick.choice((32, 64)) * pick.choice((197, 257))
        width = pick.choice(WIDTHS)
        n, k = pick.choice(((width, width), (4 * width, width), (width, 4 * width), (3 * width, width)))
        if n <= 2048 and pick.random() < 0.4:
            tails = ROWS
        operation = pick.choice(("mm", "mm", "addmm"))
    elif family == "mlp":
        m, n, k = pick.choice((256, 512, 1024, 4096)), pick.choice((2048, 4096, 8192, 14336)), pick.choice((1024, 4096))
    elif family == "labels":
        m, n, k = pick.choice((256, 512, 1024)), pick.choice((16384, 32768, 65536)), pick.choice((256, 512, 1024))
        tails = (bce, bce, *SUMS)
    elif family == "dlrm":
        m, n, k = (
            pick.choice((4096, 16384, 65536)),
            pick.choice((64, 128, 256, 512, 1024)),
            pick.choice((64, 256, 512, 1024)),
        )
    elif family == "weights":
        m, n, k = pick.choice(WIDTHS), pick.choice(WIDTHS), pick.choice(TOKENS)
        tails, operation = WEIGHTS, "mm"
    else:
        m = pick.choice((128, 256, 512))
        n, k, tails, operation = pick.choice((128, 256, 512)), pick.choice((64, 128)), SCORES, "bmm"
    batches = pick.choice((64, 128, 192)) if operation == "bmm" else 1
    if largest is not None:
        m, n, k, batches = min(m, largest), min(n, largest), min(k, largest), min(batches, largest // 64)
    shape = (batches, m, n) if operation == "bmm" else (m, n)
    return Case(index, operation, pick.choice(tails), shape, k, dtype, wide, forward or operation == "bmm")


def graph_of(case: Case, device: str) -> tuple[Graph, Node]:
    """The graph that the compiler's pass would get, with fake tensors, and the node of its product."""
    *batch, m, n = case.shape
    with FakeTensorMode():
        asked = Given(case, device)
        case.tail(torch.empty(case.shape, dtype=case.dtype, device=device), asked)
        a = torch.empty(*batch, m, case.k, dtype=case.dtype, device=device)
        b = torch.empty(*batch, n, case.k, dtype=case.dtype, device=device).transpose(-1, -2)
        if not case.by_columns:
            b = torch.empty(*batch, case.k, n, dtype=case.dtype, device=device)
        bias = torch.empty(n, dtype=case.dtype, device=device)

    def function(a: Tensor, b: Tensor, bias: Tensor, *tensors: Tensor) -> Any:
        at = Given(case, device, tensors)
        y = torch.bmm(a, b) if batch else torch.addmm(bias, a, b) if case.operation == "addmm" else torch.mm(a, b)
        return case.tail(y, at)

    module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        a, b, bias, *asked.tensors
    )
    module.graph.eliminate_dead_code()
    product = next(node for node in module.graph.nodes if str(node.target).startswith(f"aten.{case.operation}."))
    return module.graph, product
