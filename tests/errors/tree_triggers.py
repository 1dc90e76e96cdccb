"""The smallest mistakes in visitor trees: one for each sentence of that section."""

from collections.abc import Callable
from typing import Any

import torch

import epifuse as ef
from epifuse.forms.evt import (
    EVT,
    AccFetch,
    AuxLoad,
    AuxStore,
    Compute,
    RowBroadcast,
    ScalarBroadcast,
    ScalarReduction,
    SplitTreeVisitor,
    SrcFetch,
    TopologicalVisitor,
    Visitor,
    functional,
)

M, N, K = 6, 10, 4


def run(tree: Visitor, **named: Any) -> Any:
    return ef.gemm(torch.ones(M, K), torch.ones(K, N), epilogue=tree, **named)


def scaled() -> EVT:
    return EVT(Compute(ef.mul), ScalarBroadcast("alpha"), AccFetch())


def reduced_permuted() -> Visitor:
    return EVT(ScalarReduction("total"), EVT(Compute(ef.permute, dims=(1, 0)), AccFetch()))


TREES: dict[str, Callable[[], Any]] = {
    "compute_function": lambda: Compute(torch.linalg.inv),
    "tree_node": lambda: SplitTreeVisitor(AccFetch(), AccFetch),
    "tree_field": lambda: RowBroadcast("bias", default="zero"),
    "tree_operator": lambda: EVT(AccFetch(), SrcFetch()),
    "tree_arity": lambda: EVT(Compute(ef.add), AccFetch()),
    "tree_edges": lambda: TopologicalVisitor(((), (0,)), AccFetch()),
    "tree_edge": lambda: TopologicalVisitor(((), (2,)), AccFetch(), Compute(ef.relu)),
    "tree_order": lambda: TopologicalVisitor(((), (2,), (0,)), AccFetch(), Compute(ef.relu), Compute(ef.tanh)),
    "tree_cycle": lambda: TopologicalVisitor(((), (2,), (1,)), AccFetch(), Compute(ef.relu), Compute(ef.tanh)),
    "tree_name": lambda: run(EVT(Compute(ef.add), AuxLoad("my aux"), AccFetch())),
    "tree_default": lambda: run(EVT(Compute(ef.add), ScalarBroadcast("x", 1.0), ScalarBroadcast("x", 2.0))),
    "tree_name_twice": lambda: run(EVT(AuxStore("D"), EVT(AuxStore("D"), AccFetch()))),
    "tree_reduction": lambda: ScalarReduction("total", functional.plus, functional.atomic_maximum),
    "tree_identity": lambda: ScalarReduction("total", functional.plus, identity=1.0),
    "tree_stride": lambda: ScalarReduction("total", stride=(0, 1, 0)),
    "tree_pointer": lambda: EVT(Compute(ef.add), RowBroadcast("bias"), AccFetch()).arguments(
        ((torch.ones(2 * N)[::2], 0, (0, 1, 0)), (), ())
    ),
    "tree_arguments": lambda: scaled().arguments((((2.0,),), ())),
    "tree_argument_twice": lambda: EVT(Compute(ef.mul), ScalarBroadcast("alpha"), scaled()).arguments(
        (((1.0,),), (((2.0,),), (), ()), ())
    ),
    "tree_batches": lambda: EVT(ScalarReduction("s"), AccFetch()).arguments(((), (torch.zeros(2), 0, (0, 0, 1)))),
    "tree_null": lambda: run(scaled(), alpha_ptr=None),
    "tree_access": lambda: run(EVT(Compute(ef.add), RowBroadcast("bias"), AccFetch()), bias=torch.ones(M, 1)),
    "tree_reduced_dims": lambda: run(reduced_permuted()),
}
