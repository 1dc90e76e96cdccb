"""Any number of tensors read and written by one epilogue, to see what their traffic costs.

read = beta + alpha * (T0 + T1 + ...), doubled where it is 1 or more; each output is the one before it, times alpha,
plus read.

python examples/synthetic_custom_epilogue_dense_gemm.py --mnkl 512,256,128,1 --read_tensors 3 --written_tensors 2
"""

import argparse
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch

import epifuse as ef


def source(reads: int, writes: int) -> str:
    """The epilogue's text: an epilogue has no loops, so a program that wants many operands writes them out."""
    operands = [f"t{i}" for i in range(reads)]
    lines = [f"def epilogue_operation({', '.join(['self', 'accumulator', *operands, 'alpha', 'beta'])}):"]
    lines.append("    read = " + " + ".join(["beta", *(f"{name} * alpha" for name in operands)]))
    lines.append(
        "    read = ef.where(read < 1.0, read, 2.0 * read)"
        if reads
        else "    read = read if read < 1.0 else 2.0 * read"
    )
    lines.append("    t = accumulator")
    for i in range(writes):
        lines += [f"    w{i} = t * alpha + read", f"    t = w{i}"]
    lines.append(f"    return {', '.join(f'w{i}' for i in range(writes))}")
    return "\n".join(lines) + "\n"


def function_from(text: str, name: str) -> Callable[..., Any]:
    """A function from text that can be found again: epifuse reads an epilogue's source, as a debugger does."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"ef": ef}
    exec(compile(text, name, "exec"), namespace)
    function: Callable[..., Any] = namespace["epilogue_operation"]
    return function


def make(options: argparse.Namespace) -> tuple[ef.DenseGemm, tuple[torch.Tensor, ...], dict[str, float]]:
    """The GEMM, its tensors and its numbers."""
    m, n, k, l = options.mnkl
    reads, writes = options.read_tensors, options.written_tensors
    text = source(reads, writes)
    if options.verbose:
        print(text)
    method = function_from(text, f"<synthetic {reads} {writes}>")
    Synthetic = type("Synthetic", (ef.DenseGemm,), {"epilogue_operation": method})
    gemm = Synthetic(options.acc_dtype, False, options.mma_tiler_mn, options.cluster_shape_mn, device=options.device)
    majors = (options.a_major, options.b_major, options.cd_major)
    standard = gemm.create_arguments(l, m, n, k, *majors, options.ab_dtype)
    more = (gemm.matrix(l, m, n, options.cd_major == "m", options.t_dtype) for _ in range(reads + writes))
    return gemm, (*standard, *more), {"alpha": options.alpha, "beta": options.beta}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = common.command_line(str(__doc__).split("\n")[0], "t")
    parser.add_argument("--read_tensors", type=int, choices=range(9), default=2, metavar="0..8")
    parser.add_argument("--written_tensors", type=int, choices=range(1, 9), default=1, metavar="1..8")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--verbose", action="store_true", help="print the epilogue")
    return common.run(parser, arguments, make)


if __name__ == "__main__":
    raise SystemExit(main())
