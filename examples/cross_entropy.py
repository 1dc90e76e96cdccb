"""The cross-entropy of a language model's last layer, without its logits: one GEMM stores two numbers a row.

loss = mean(logsumexp(logits, dim=-1) - logits[row, target]) with logits = hidden @ vocabulary.

python examples/cross_entropy.py --mnk 512,32000,256
"""

import argparse
from collections.abc import Sequence
from typing import Any

import common
import torch

import epifuse as ef


def epilogue(accum: Any, target: Any) -> Any:
    """A masked sum picks the target's logit: `target` is a column, the class of each row."""
    lse = ef.logsumexp(accum, dim=-1)
    picked = ef.sum(ef.where(ef.index_n(accum) == target, accum, 0.0), dim=-1)
    return lse, picked


def fused(
    gemm: common.Gemm, hidden: torch.Tensor, vocabulary: torch.Tensor, target: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What is left for PyTorch are M numbers."""
    lse, picked = gemm(hidden, vocabulary, epilogue=epilogue, target=target[:, None])
    return {"loss": torch.mean(lse - picked)}


def unfused(hidden: torch.Tensor, vocabulary: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """In PyTorch: the logits are written, and read again more than once."""
    return {"loss": torch.nn.functional.cross_entropy(hidden @ vocabulary, target)}


def make(options: argparse.Namespace) -> common.Layer:
    """The last layer and the tokens that should come out."""
    m, n, k = options.mnk
    hidden, vocabulary = common.normal(m, k, like=options), common.normal(k, n, like=options, scale=k**-0.5)
    target = torch.randint(n, (m,)).to(options.device)
    size, left = m * n * hidden.element_size() / 1e6, 2 * m * 4 / 1e6
    name = str(hidden.dtype).removeprefix("torch.")
    return common.Layer(
        fused=lambda gemm: fused(gemm, hidden, vocabulary, target),
        eager=lambda: unfused(hidden, vocabulary, target),
        exact=lambda: unfused(hidden.double(), vocabulary.double(), target),
        remark=f"The {m} x {n} logits, {size:.1f} MB of {name}, were never written; {left:.3f} MB were.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    meaning = "tokens, size of the vocabulary, hidden width"
    sizes = common.Sizes(checked=(256, 8000, 256), cpu=(1024, 32000, 256), gpu=(4096, 32000, 2048))
    parser = common.layer_command_line(str(__doc__).split("\n")[0], sizes, meaning)
    return common.run_layer(parser, arguments, make)


if __name__ == "__main__":
    raise SystemExit(main())
