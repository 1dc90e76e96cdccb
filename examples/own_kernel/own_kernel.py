"""A kernel of one's own, as a provider of epifuse in one file: a float32 product by NumPy, with elementwise epilogues.

    pip install ./examples/own_kernel            # its pyproject.toml has the entry point by which epifuse finds it
    python examples/own_kernel/own_kernel.py

A kernel that generates code walks the graph in `Program.run` as well, and writes a line where this one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import epifuse as ef
from epifuse.ir import Graph, Node
from epifuse.ir.types import shape_of
from epifuse.providers import Allocation, Answers, Details, KernelSpec, Plan, Provider, Reason, Refusal, Runner, Step
from epifuse.request.problem import Problem, TensorInfo

KERNEL = KernelSpec("numpy_gemm", "numpy", "cpu", (0,), "NumPy's product, epilogue by NumPy's functions")
COST = 2.0  # more than the kernels that epifuse brings: this one runs where it is asked for

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "where": np.where,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
"""Primitives and activations of the language that this kernel has, by name."""

DTYPES = {"float": torch.float32, "mask": torch.bool}
"""What values of a kind are loaded from and stored as."""


def function_of(node: Node) -> str:
    """The name of what an inner node computes: an activation is one node, a `call` of it."""
    return str(node.attr) if node.op == "call" else node.op


class Program:
    """An epilogue as this kernel runs it, for any extents. `missing` is why it cannot, with the user's line."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.missing = next(self._missing(), None)

    def _missing(self) -> Iterator[Reason]:
        for node in self.graph.nodes:
            where, name = self.graph.loc(node), function_of(node)
            if self.graph.types[node].kind not in DTYPES:
                yield Reason(f"it computes in float32, and {name} gives whole numbers", where)
            if node.op == "load" and node.attr.views:
                yield Reason(f"it takes operands as they are, and '{node.attr.name}' is reshaped", where)
            if node.args and name not in FUNCTIONS:
                yield Reason(f"it has no {name}", where)
            if node.op not in ("accum", "load", "const") and not node.args:
                yield Reason(f"it has no {name}", where)
        for output in self.graph.outputs:
            dims = output.dims or ()
            if output.views or any(len(dim) > 1 or any(factor.extent for factor in dim) for dim in dims):
                yield Reason(f"it stores whole matrices, and '{output.name}' is reshaped", self.graph.loc(output.node))
            axes = "".join(factor.axis for dim in dims for factor in dim)
            if axes != "".join(sorted(axes)):  # l, m, n
                yield Reason(f"it stores rows as rows, and '{output.name}' is permuted", self.graph.loc(output.node))
        if self.graph.effects:
            yield Reason("it does not print", self.graph.loc(self.graph.effects[0]))

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Mapping[str, Any],
        outputs: Mapping[str, torch.Tensor],
        extents: Mapping[str, int],
    ) -> None:
        """Compute every value, then store: an output may be the memory of an operand. Operands broadcast as NumPy's."""
        values: dict[Node, Any] = {}
        with np.errstate(all="ignore"):
            for node in self.graph.nodes:
                if node.op == "accum":
                    values[node] = array(a) @ array(b)
                elif node.op == "load":
                    values[node] = array(operands[node.attr.name])
                elif node.op == "const":
                    values[node] = array(node.attr)
                else:
                    values[node] = FUNCTIONS[function_of(node)](*(values[arg] for arg in node.args))
        for output in self.graph.outputs:
            shape = shape_of(output.dims or (), extents)
            outputs[output.name].detach().numpy()[...] = np.reshape(np.broadcast_to(values[output.node], shape), shape)


def array(value: Any) -> Any:
    """A tensor's memory, or a number in the type of its kind."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    return np.bool_(value) if isinstance(value, bool) else np.float32(value)


class NumpyProvider(Provider):
    """Nothing has to be compiled, so four methods are all."""

    name = "numpy"

    def specs(self) -> tuple[KernelSpec, ...]:
        """One kernel."""
        return (KERNEL,)

    def lower(self, graph: Graph, problem: Problem) -> Program:
        """Asked once for all extents of an epilogue."""
        return Program(graph)

    def supports(self, specs: Sequence[KernelSpec], work: Program, problem: Problem) -> Answers:
        """Whatever is refused is refused by name, here and never when it runs."""
        why = work.missing or unfit(problem)
        tile = problem.extents["m"], problem.extents["n"]
        fits = Allocation(tile, COST, details=Details(notes=("the whole product in one piece",)), program=work)
        return Answers.of([(spec, fits if why is None else Refusal(spec.name, why)) for spec in specs])

    def build(self, plan: Plan) -> Runner:
        """A runner binds tensors; each call of what it returns writes the outputs."""
        program, extents = plan.allocation.program, plan.problem.extents

        def bind(
            a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
        ) -> Step:
            return lambda: program.run(a, b, operands, outputs, extents)

        return bind


def unfit(problem: Problem) -> str | None:
    """Why this problem does not fit the kernel, whatever the epilogue."""
    if not problem.a.dtype == problem.b.dtype == problem.accumulator == torch.float32:
        return "it multiplies float32 in float32"
    for name, operand in problem.operands:
        if isinstance(operand, TensorInfo) and operand.dtype not in DTYPES.values():
            return f"operands are float32 or bool, and '{name}' is {operand.dtype}"
    for name, dtype in problem.dtypes:
        if dtype not in DTYPES.values():
            return f"it stores float32 and bool, and '{name}' is {dtype}"
    asked = problem.constraints
    if asked.tile or asked.cluster or asked.schedule or asked.split or asked.batch_invariant:
        return "it has one design, and no tile, cluster, schedule, split or batch invariance to choose"
    return None


def swish_like(accum, bias, C):
    """An epilogue."""
    x = accum + bias
    D = ef.silu(x) * 0.5 + C
    return D


def row_sums(accum):
    """Another one, which this kernel refuses."""
    sums = ef.gelu(accum).sum(dim=1)
    return sums


def main() -> None:
    """Find the kernel, run it, and see what it refuses."""
    a, b, bias, c = torch.randn(64, 32), torch.randn(32, 48), torch.randn(48), torch.randn(64, 48)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(swish_like, {"bias": bias, "C": c}))
    print("kernels:", ", ".join(kernel.metadata.kernel_name for kernel in ef.get_kernels(args)))
    kernel = ef.get_kernels(args, providers=["numpy"])[0]
    found = kernel.run(args)["D"]
    torch.testing.assert_close(found, swish_like(a @ b, bias, c))
    print(kernel.plan)
    refused = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(row_sums, {}))
    refusal = next(one for one in ef.explain(refused).refusals if one.kernel == KERNEL.name)
    print(refusal)
    print(refusal.loc)


if __name__ == "__main__":
    main()
