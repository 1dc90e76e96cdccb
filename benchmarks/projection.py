"""Compare the GPU time of one projection to q, k and v, with norms of heads and rotary embedding, with the plain
product and torch.compile.

    python benchmarks/projection.py --save results.json [--tokens 8192] [--models Qwen3-8B] [--rounds 15]

The weights of q, k and v lie one behind the other in one matrix. `norm, rotary` applies RMSNorm with a weight to each
head of q and k, and rotates it; q, k and v are stored as (heads, tokens, head). `rotary` leaves out the norm, `split`
norm and rotation, and `split, rows` stores (tokens, columns). The plain product stores all columns at once. All of a
shape are interleaved in one run.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gpu_timing import Backlog, beside, measured, parser_of, that_run, told

import epifuse as ef

PLAIN = "plain"


class Model(NamedTuple):
    """`width` is K, `query` the number of heads of q, `shared` that of k and of v, and `head` the columns of a head."""

    width: int
    query: int
    shared: int
    head: int


MODELS = {
    "Llama-3-8B": Model(4096, 32, 8, 128),
    "Qwen3-8B": Model(4096, 32, 8, 128),
    "Qwen3-4B": Model(2560, 32, 8, 128),
}


def rms_norm(x, weight):
    """RMSNorm of each head, weighted."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x, cos, sin):
    """Rotate the two halves of each head by angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def epilogues(model: Model) -> Mapping[str, Callable[..., Any]]:
    """The epilogues of a model's projection, by name."""
    sizes = (model.query * model.head, model.shared * model.head, model.shared * model.head)
    of_q, of_k, of_v = sizes
    head = model.head

    def plain(accum):
        D = accum
        return D

    def rows(accum):
        q, k, v = accum.split([of_q, of_k, of_v], dim=-1)
        return q, k, v

    def split(accum):
        q, k, v = accum.split([of_q, of_k, of_v], dim=-1)
        query = q.unflatten(-1, (-1, head)).transpose(0, 1)
        key = k.unflatten(-1, (-1, head)).transpose(0, 1)
        value = v.unflatten(-1, (-1, head)).transpose(0, 1)
        return query, key, value

    def rotary(accum, cos, sin):
        q, k, v = accum.split([of_q, of_k, of_v], dim=-1)
        query = rotate(q.unflatten(-1, (-1, head)), cos, sin).transpose(0, 1)
        key = rotate(k.unflatten(-1, (-1, head)), cos, sin).transpose(0, 1)
        value = v.unflatten(-1, (-1, head)).transpose(0, 1)
        return query, key, value

    def norm_and_rotary(accum, cos, sin, q_norm, k_norm):
        q, k, v = accum.split([of_q, of_k, of_v], dim=-1)
        query = rotate(rms_norm(q.unflatten(-1, (-1, head)), q_norm), cos, sin).transpose(0, 1)
        key = rotate(rms_norm(k.unflatten(-1, (-1, head)), k_norm), cos, sin).transpose(0, 1)
        value = v.unflatten(-1, (-1, head)).transpose(0, 1)
        return query, key, value

    return {
        PLAIN: plain,
        "split, rows": rows,
        "split": split,
        "rotary": rotary,
        "norm, rotary": norm_and_rotary,
    }


def operands(tokens: int, head: int) -> dict[str, torch.Tensor]:
    """Cosines and sines of each token's angles, and weights of the norms of heads."""
    turns = torch.outer(torch.arange(tokens), 10000.0 ** -(torch.arange(0, head, 2) / head))
    angles = torch.cat((turns, turns), dim=-1)[:, None].cuda()
    weights = {name: torch.randn(head, device="cuda").bfloat16() for name in ("q_norm", "k_norm")}
    return {"cos": angles.cos().bfloat16(), "sin": angles.sin().bfloat16(), **weights}


def read_by(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The operands in `given` that the function has parameters for."""
    return {name: given[name] for name in function.__code__.co_varnames[1 : function.__code__.co_argcount]}


def ours(name: str, function: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, given: Any) -> Callable[[], Any]:
    """A bound launch of the best kernel."""
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function, read_by(function, given)))
    blank = args.allocate()
    made = ef.EpilogueArguments(function, **read_by(function, given), **dict(blank.items()))
    args = ef.GemmArguments(a, b, epilogue=made)
    kernel = ef.get_kernels(args)[0]
    launches = len(kernel.plan.allocation.launches) or 1
    print(f"  {name}: {kernel.plan.spec.name}, {launches} launches", flush=True)
    return kernel.bind(args)


def peers(functions: Any, a: torch.Tensor, b: torch.Tensor, given: Any) -> dict[str, Callable[[], Any]]:
    """cuBLAS's product, and for each epilogue the product and the function, compiled by torch.compile."""
    found: dict[str, Callable[[], Any]] = {}
    torch._dynamo.reset()  # beyond its limit of recompilations torch.compile runs a function in eager mode
    wide = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    found["cuBLAS"] = lambda: torch.mm(a, b, out=wide)
    for name, function in functions.items():
        if name == PLAIN:
            continue
        own = read_by(function, given)

        def unfused(a, b, function=function, own=own):
            return [x.contiguous() for x in function(a @ b, **own)]

        compiled = torch.compile(unfused, dynamic=False)
        found[f"torch.compile, {name}"] = lambda compiled=compiled: compiled(a, b)
    return found


def measure(name: str, tokens: int, rounds: int, backlog: Backlog) -> dict[str, Any]:
    """Measure one model: microseconds, and ratios to the plain product with their 95 % intervals."""
    model = MODELS[name]
    columns = (model.query + 2 * model.shared) * model.head
    a = torch.randn(tokens, model.width, device="cuda").bfloat16()
    b = (torch.randn(columns, model.width, device="cuda") / model.width**0.5).bfloat16().t()
    given, functions = operands(tokens, model.head), epilogues(model)
    calls = {each: ours(each, function, a, b, given) for each, function in functions.items()}
    calls |= that_run(peers(functions, a, b, given))
    return {"model": name, "shape": [tokens, columns, model.width], **beside(calls, PLAIN, rounds, backlog)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-8B", "Qwen3-4B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 2048])
    options = parser.parse_args(argv)
    return measured(
        options,
        itertools.product(options.models, options.tokens),
        measure,
        lambda row: f"{row['model']}, {row['shape'][0]} tokens: {told(row)}",
    )


if __name__ == "__main__":
    sys.exit(main())
