"""One elementwise kernel around the emitter: float32 values in, what the device makes of an epilogue out."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

import epifuse as ef
from epifuse.ir import Graph, Node
from epifuse.providers.cutedsl.device_types import DTYPES
from epifuse.providers.cutedsl.emit import walk
from epifuse.providers.cutedsl.lowering import lower
from epifuse.providers.cutedsl.precision import accuracies

SHAPE = ((2, 2), 1)  # nested, as an accumulator's is
WIDTH = 4
THREADS = 128
BLOCK = WIDTH * THREADS


def graph_of(function: str, loads: tuple[torch.dtype, ...], dtype: torch.dtype, **options: Any) -> Any:
    """The graph a Hopper kernel walks for `D = function(*operands)`, and what each node may be computed with."""
    names = "xyz"[: len(loads)]
    a = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    operands = {name: torch.empty(64, 64, dtype=load, device="meta") for name, load in zip(names, loads, strict=True)}
    source = f"def epilogue(accum, {', '.join(names)}):\n    D = {function}\n    return D\n"
    epilogue = ef.EpilogueArguments.partial(source, operands)
    args = ef.GemmArguments(a, a, epilogue=epilogue, out_dtypes={"D": dtype}, **options)
    explained = ef.explain(args, cc=90)
    problem = explained.args.problem
    graph = lower(explained.args.graph, problem).walked
    return graph, accuracies(graph, {"D": dtype}, fast_math=problem.constraints.fast_math)


class Elementwise:
    """`D = function(x, y, ...)` on float32 values, `WIDTH` of them a thread."""

    def __init__(self, graph: Graph, accuracy: Any) -> None:
        self.graph, self.accuracy = graph, accuracy

    @cute.kernel
    def kernel(self, inputs: tuple, out: cute.Tensor):
        row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        fragments = tuple(self.fragment(tensor, row) for tensor in inputs)

        def leaf(node: Node) -> Any:
            return fragments["xyz".index(node.attr.name)]

        found = walk(self.graph, leaf, fragments[0], self.accuracy)[self.graph.outputs[0].node]
        result = cute.make_rmem_tensor(SHAPE, out.element_type)
        result.store(found.to(out.element_type))
        for i in range(WIDTH):
            out[row, i] = result[i]

    def fragment(self, tensor: Any, row: Any) -> Any:
        values = cute.make_rmem_tensor(SHAPE, tensor.element_type)
        for i in range(WIDTH):
            values[i] = tensor[row, i]
        return values.load()

    @cute.jit
    def __call__(self, inputs: tuple, out: cute.Tensor, stream):
        rows = cute.size(out, mode=[0])
        self.kernel(inputs, out).launch(grid=(rows // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream)


def compiled(
    function: str, loads: tuple[torch.dtype, ...], dtype: torch.dtype, options: str = "", **arguments: Any
) -> Any:
    """The elementwise kernel as for an output of `dtype`, stored before it is rounded to that.

    Called with a list of (rows, WIDTH) tensors in the order x, y, z, and such an output; rows a multiple of THREADS.
    """
    graph, accuracy = graph_of(function, loads, dtype, **arguments)
    rows = cute.sym_int(divisibility=THREADS)

    def fake(kind: torch.dtype) -> Any:
        return make_fake_tensor(DTYPES[kind], (rows, WIDTH), (WIDTH, 1), assumed_align=16)

    inputs = tuple(map(fake, loads))
    held = {"float": torch.float32, "int32": torch.int32}[graph.types[graph.outputs[0].node].kind]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        Elementwise(graph, accuracy), inputs, fake(held), stream, options=f"--enable-tvm-ffi --gpu-arch=sm_90a{options}"
    )
