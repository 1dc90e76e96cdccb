"""Golden texts: what each pass makes of an epilogue, one after the other, then lowering and the digest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse import passes
from epifuse.forms.evt import EVT, ColBroadcast, ColReduction, Compute, ScalarBroadcast
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Graph
from epifuse.passes.lower import lower
from epifuse.passes.split_operators import split_operators
from epifuse.request.problem import Problem
from epifuse.runtime.arguments import parsed

EPILOGUES: dict[str, Any] = {
    "linear_combination": "def epi(accum, C, alpha, beta): D = alpha * accum + beta * C; return D",
    "host_arithmetic": "def epi(accum, alpha, beta): s = alpha if beta > 0 else 1 - beta; D = accum * s; return D",
    "literals": "def epi(accum, C): D = (accum * 1 + 0) / 4 - C ** 2 * 1.0 - 0; return D, accum",
    "unused": "def epi(accum, C, alpha, bias): t = accum * C; u = t + alpha * 3; D = t * 2; return D",
    "broadcasts": "def epi(accum, bias, col, alpha): D = accum * col + bias; E = bias * alpha + col; return D, E",
    "masks": "def epi(accum, C): keep = (accum > 0) & ~(C <= 1) | (C == 2); D = where(keep, accum, -C); return D, keep",
    "integers": "def epi(accum, labels): k = labels // 2 % 3; D = where(index_n(accum) == labels, accum, k); return D",
    "activations": "def epi(accum, C): D = silu(accum) * hardswish(C) + gelu(accum, approximate='tanh'); return D",
    "row_stage": "def epi(accum, bias): D = softmax(accum + bias, dim=-1); return D",
    "finish": "def epi(accum): D = accum; s = sum(accum, dim=0); r = s / norm(s); return D, r",
    "second_sweep": "def epi(accum): t = exp(accum); D = t / sum(t); m = amax(D); E = D / m; return D, E",
    "operands_alone": "def epi(accum, bias): D = accum - mean(bias); return D",
    "casts": "def epi(accum, C): h = accum.half() + C.half(); D = h.int(); return D, h",
    "layout": "def epi(accum, heads): h = accum.reshape(8, 3, 4); D = h * heads; m = sum(h, dim=-1); return D, m",
    "transposed": "def epi(accum, T): D = accum.permute(1, 0) + T; return D",
    "effects": "def epi(accum): debug_print('t = {}', accum * 2); D = accum + 1; return D",
    "known_reductions": EVT(ColReduction("sums"), EVT(Compute(ef.mul), ColBroadcast("col"), ScalarBroadcast("alpha"))),
    "fused": "def epi(accum, C): t = C / (1 + exp(-C)); D = accum * (1 / (1 + exp(-accum))) + t; return D",
    "split": "def epi(accum, C): D = silu(C); E = dsilu(accum, C); return D, E",
    "one_hot": "def epi(accum, C, col): h = assume_one_hot(C); D = accum - h; r = sum(h * col) + sum(h); return D, r",
    "added_on": "def epi(accum): D = relu(accum); db = sum(D, dim=0); return D, db",
    "shared": "def epi(accum): t = relu(accum); u = t * t; D = u * u + u; return D",
}
DESTINATIONS = {EPILOGUES["added_on"]: {"db": torch.empty(1, 12)}}
"""Of outputs that are added onto what these hold."""
OPERANDS = {
    "C": torch.empty(8, 12),
    "T": torch.empty(12, 8),
    "bias": torch.empty(12),
    "col": torch.empty(8, 1),
    "labels": torch.empty(8, 1, dtype=torch.int64),
    "heads": torch.empty(3, 1),
    "alpha": 1.0,
    "beta": 2.0,
}


def problem_for(source: Any, given: dict[str, Any] | None = None) -> tuple[Graph, Problem]:
    """The graph as parsed, and the problem on an 8 x 12 product."""
    graph = parsed(source).graph
    inputs = {name: OPERANDS[name] for name in graph.inputs} if given is None else given
    onto = DESTINATIONS.get(source, {})
    epilogue = ef.EpilogueArguments.partial(source, inputs | onto, tuple(onto))
    return graph, ef.GemmArguments(torch.empty(8, 4), torch.empty(4, 12), epilogue=epilogue).problem


@pytest.mark.parametrize("name", EPILOGUES)
def test_every_pass(name: str, golden: Callable[[str], None]) -> None:
    """Sections that a pass left as they were say so."""
    graph, problem = problem_for(EPILOGUES[name])
    parts = [str(EPILOGUES[name]), f"== parsed\n{graph}"]
    shown = str(graph)
    for step in passes.PIPELINE:
        graph = step(graph, problem)
        parts.append(f"== {step.__name__}\n{graph if str(graph) != shown else '(the same)'}")
        shown = str(graph)
    opened = split_operators(graph, problem)
    parts.append(f"== split_operators, where a kernel gains\n{opened if str(opened) != shown else '(the same)'}")
    lowered = lower(graph, frozenset())
    plain = str(lowered) if lowered.nodes != graph.nodes and any(n.op == "call" for n in graph.nodes) else "(the same)"
    identity = passes.identity(graph, problem)
    parts += [f"== lower\n{plain}", f"== digest\n{identity.digest}\n{', '.join(identity.names)}"]
    golden("\n\n".join(parts))


def test_every_pass_of_the_pipeline_changes_something() -> None:
    """A pass that no golden text shows at work is not tested."""
    idle = {step.__name__ for step in passes.PIPELINE}
    for source in EPILOGUES.values():
        graph, problem = problem_for(source)
        for step in passes.PIPELINE:
            before, graph = str(graph), step(graph, problem)
            if str(graph) != before:
                idle.discard(step.__name__)
    assert not idle


@pytest.mark.parametrize("name", [n for n, e in VOCABULARY.items() if e.group == "activation"])
def test_lowering_leaves_primitives_alone(name: str) -> None:
    inputs = {f"x{i}": 0.5 for i in range(1, len(VOCABULARY[name].signature.parameters))}
    source = f"def epi({', '.join(['accum', *inputs])}): D = {name}({', '.join(['accum', *inputs])}); return D"
    graph, problem = problem_for(source, inputs)
    graph = passes.run(graph, problem)
    assert [node.attr for node in graph.nodes if node.op == "call"] == [name]
    plain = lower(graph, frozenset())
    passes.verify("lower", graph, plain)
    assert all(node.op != "call" for node in plain.nodes)
    assert lower(graph, frozenset({name})).nodes[-1].op == "call"
