"""The cases of gemm_epilogue.py: shapes, epilogues, and how epifuse and its peers compute each epilogue."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import epifuse as ef

SHAPES = (
    (8192, 8192, 8192),
    (4096, 14336, 4096),
    (4096, 4096, 4096),
    (16384, 4096, 1024),
    (8192, 8192, 512),
    (1024, 4096, 4096),
    (64, 14336, 4096),
)
"""M, N and K of the products."""
ROW_SHAPES = tuple((16384, n, 4096) for n in (128, 256, 512, 1024))
"""M, N and K of the cases whose values need whole rows of the product."""


def shapes(text: str) -> tuple[tuple[int, int, int], ...]:
    """Parse the shapes of a command line, such as 4096x4096x4096,64x14336x4096."""
    found = []
    for shape in text.split(","):
        try:
            m, n, k = map(int, shape.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError("a shape is MxNxK") from None
        found.append((m, n, k))
    return tuple(found)


ALPHA, BETA = 1.25, 0.5
EPS = 1e-5
Outputs = tuple[torch.Tensor, ...]


class Operands(NamedTuple):
    """One set of inputs and destinations; `b` is the weight (N, K) as a transposed view."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    preact: torch.Tensor

    @staticmethod
    def random(m: int, n: int, k: int, device: str = "cuda") -> Operands:
        """Make normal data. The weight is scaled as in a layer, so that activations see both sides of zero."""

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device)

        weight = normal(n, k).mul_(k**-0.5)
        empty = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        return Operands(normal(m, k), weight.t(), normal(n), normal(m, n), empty, torch.empty_like(empty))


def same(outputs: Outputs) -> Outputs:
    """Return the outputs unchanged."""
    return outputs


class Peer(NamedTuple):
    """Another way to compute a case. If it leaves a part out, `finish` adds that part for the comparison of results."""

    run: Callable[[Operands], Outputs]
    finish: Callable[[Outputs], Outputs] = same


@dataclass(frozen=True)
class Case:
    """One epilogue. `eager` computes it in PyTorch: it defines the right result, and is what torch.compile compiles."""

    name: str
    formula: str
    eager: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
    epilogue: Callable[..., Any] | None = None
    operands: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("D",)
    peers: Mapping[str, Peer] = field(default_factory=dict)
    compiled: bool = True
    reduces: bool = False
    shapes: tuple[tuple[int, int, int], ...] = SHAPES

    def arguments(self, x: Operands, constraints: ef.Constraints | None = None) -> ef.GemmArguments:
        """The arguments with which epifuse computes the case."""
        if self.epilogue is None:
            return ef.GemmArguments(x.a, x.b, out=x.D, constraints=constraints)
        own = [name for name in self.outputs if name in Operands._fields]  # the others are small, and are allocated
        given = {name: getattr(x, name) for name in (*self.operands, *own)}
        epilogue = ef.EpilogueArguments.partial(self.epilogue, {**given, **self.numbers})
        return ef.GemmArguments(x.a, x.b, epilogue=epilogue, constraints=constraints)


# --- the epilogues as epifuse reads them -------------------------------------------------------------------------


def gelu_bias(accum, bias):
    """A linear layer's bias and activation."""
    D = ef.gelu_tanh(accum + bias)
    return D


def gelu_bias_preact(accum, bias):
    """As `gelu_bias`, but it also stores the pre-activation, which the backward pass needs."""
    preact = accum + bias
    D = ef.gelu_tanh(preact)
    return D, preact


def relu_residual(accum, C, alpha, beta):
    """A scaled residual connection."""
    D = ef.relu(alpha * accum + beta * C)
    return D


def binary_cross_entropy(accum, bias, C):
    """A loss whose logits are not stored. C holds the targets."""
    x = accum + bias
    loss = ef.sum(ef.softplus(x) - x * C)
    return loss


def gelu_column_sums(accum, bias):
    """An activation with its column sums, which a bias gradient needs."""
    D = ef.gelu_tanh(accum + bias)
    sums = ef.sum(D, dim=0)
    return D, sums


def residual_row_squares(accum, C):
    """A residual connection with the sum of squares of each row, which RMSNorm needs."""
    D = accum + C
    squares = ef.sum_of_squares(D, dim=-1)
    return D, squares


def largest_absolute(accum):
    """A product with its largest absolute value, from which the scale to quantise it is made."""
    D = accum
    largest = ef.absmax(D)
    return D, largest


def softmax_bias(accum, bias):
    """The weights of a router or of attention."""
    D = ef.softmax(accum + bias, dim=-1)
    return D


def rms_norm(accum, bias):
    """RMSNorm of a projection; the bias takes the place of its weight."""
    D = accum * ef.rsqrt(ef.mean(accum * accum, dim=-1, keepdim=True) + EPS) * bias
    return D


# --- the epilogues as PyTorch and other peers compute them -------------------------------------------------------


def _plain(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    return (a @ b,)


def _gelu(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    return (F.gelu(torch.addmm(bias, a, b), approximate="tanh"),)


def _gelu_preact(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    preact = torch.addmm(bias, a, b)
    return F.gelu(preact, approximate="tanh"), preact


def _relu(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    return (torch.relu(torch.addmm(c, a, b, alpha=ALPHA, beta=BETA)),)


def _bce(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    logits = torch.addmm(bias, a, b).float()
    return ((F.softplus(logits) - logits * c.float()).sum(),)


def _gelu_sums(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    d = F.gelu(torch.addmm(bias, a, b), approximate="tanh")
    return d, d.float().sum(0)


def _row_squares(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    d = torch.addmm(c, a, b)
    return d, d.float().square().sum(-1)


def _absmax(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    d = a @ b
    return d, d.abs().amax().float()


def _softmax(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    return (torch.softmax(torch.addmm(bias, a, b).float(), -1).to(a.dtype),)


def _rms_norm(a: Any, b: Any, bias: Any, c: Any) -> Outputs:
    x = (a @ b).float()
    return ((x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * bias).to(a.dtype),)


def cublas(x: Operands) -> Outputs:
    """The product alone."""
    return (torch.mm(x.a, x.b, out=x.D),)


def _cublaslt_gelu(x: Operands) -> Outputs:
    # The only operation of PyTorch that uses cuBLASLt's epilogues. Its GELU is the tanh form.
    return (torch._addmm_activation(x.bias, x.a, x.b, use_gelu=True, out=x.D),)


def _quack(x: Operands) -> Outputs:
    from quack.gemm_interface import gemm

    return (gemm(x.a, x.b, out=x.D, tuned=False),)


def _quack_gelu(x: Operands) -> Outputs:
    from quack.gemm_interface import gemm_act

    _, post = gemm_act(
        x.a, x.b, bias=x.bias, activation="gelu_tanh_approx", postact_out=x.D, store_preact=False, tuned=False
    )
    return (post,)


def _quack_gelu_preact(x: Operands) -> Outputs:
    from quack.gemm_interface import gemm_act

    preact, post = gemm_act(
        x.a, x.b, bias=x.bias, activation="gelu_tanh_approx", preact_out=x.preact, postact_out=x.D, tuned=False
    )
    assert preact is not None
    return post, preact


def _quack_add(x: Operands) -> Outputs:
    from quack.gemm_interface import gemm_add

    return (gemm_add(x.a, x.b, x.C, out=x.D, alpha=ALPHA, beta=BETA, tuned=False),)


def _with_relu(outputs: Outputs) -> Outputs:
    return tuple(map(torch.relu, outputs))


def _eager(function: Callable[..., Outputs]) -> Peer:
    return Peer(lambda x: function(x.a, x.b, x.bias, x.C))


CASES = (
    Case("plain", "A @ B", _plain, peers={"cuBLAS": Peer(cublas), "QuACK": Peer(_quack)}, compiled=False),
    Case(
        "gelu",
        "gelu_tanh(A @ B + bias)",
        _gelu,
        gelu_bias,
        ("bias",),
        peers={"eager": _eager(_gelu), "cuBLASLt": Peer(_cublaslt_gelu), "QuACK": Peer(_quack_gelu)},
    ),
    Case(
        "gelu_preact",
        "the same, A @ B + bias stored too",
        _gelu_preact,
        gelu_bias_preact,
        ("bias",),
        outputs=("D", "preact"),
        peers={"eager": _eager(_gelu_preact), "QuACK": Peer(_quack_gelu_preact)},
    ),
    Case(
        "relu_residual",
        "relu(alpha * A @ B + beta * C)",
        _relu,
        relu_residual,
        ("C",),
        {"alpha": ALPHA, "beta": BETA},
        # QuACK's function has no relu. Its time is compared although it computes less.
        peers={"eager": _eager(_relu), "QuACK gemm_add": Peer(_quack_add, _with_relu)},
    ),
    Case(
        "bce",
        "sum(softplus(x) - x * C), x = A @ B + bias",
        _bce,
        binary_cross_entropy,
        ("bias", "C"),
        outputs=("loss",),
        peers={"eager": _eager(_bce)},
        reduces=True,
    ),
    Case(
        "gelu_sums",
        "gelu_tanh(A @ B + bias) and its column sums",
        _gelu_sums,
        gelu_column_sums,
        ("bias",),
        outputs=("D", "sums"),
        peers={"eager": _eager(_gelu_sums)},
        reduces=True,
    ),
    Case(
        "row_squares",
        "A @ B + C and its row sums of squares",
        _row_squares,
        residual_row_squares,
        ("C",),
        outputs=("D", "squares"),
        peers={"eager": _eager(_row_squares)},
        reduces=True,
    ),
    Case(
        "absmax",
        "A @ B and its largest absolute value",
        _absmax,
        largest_absolute,
        outputs=("D", "largest"),
        peers={"eager": _eager(_absmax)},
        reduces=True,
    ),
    Case(
        "softmax",
        "softmax(A @ B + bias)",
        _softmax,
        softmax_bias,
        ("bias",),
        peers={"eager": _eager(_softmax)},
        shapes=ROW_SHAPES,
    ),
    Case(
        "rmsnorm",
        "RMSNorm of A @ B, weighted",
        _rms_norm,
        rms_norm,
        ("bias",),
        peers={"eager": _eager(_rms_norm)},
        shapes=ROW_SHAPES,
    ),
)
"""All cases. QuACK runs with its untuned defaults, because epifuse's choice is untuned too."""

COMPILED = {"torch.compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""torch.compile's modes by name. None uses CUDA graphs, which would copy the inputs at each call."""
