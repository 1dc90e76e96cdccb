"""The article's binary cross-entropy: as a function, as its tree with a topological visitor, built from aliases."""

from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.forms.evt import (
    EVT,
    AccFetch,
    ColBroadcast,
    Compute,
    ScalarBroadcast,
    ScalarReduction,
    SrcFetch,
    TopologicalVisitor,
    Visitor,
)
from epifuse.forms.evt.functional import Clamp, Sigmoid, atomic_add, minus, multiplies, plus
from epifuse.tools.testing import assert_close_to_reference
from tests.evt.helpers import product

M, N, K = 200, 120, 48
BATCHES = 3
EDGES = ((), (), (0, 1), (0,), (3,), (4,), (2, 5))
ONE, LOWER, UPPER = 1.0, 0.001, 0.999


def fast_log(x: Any) -> Any:
    return ef.log(x)


def loss(accum: Any, C: Any, bias: Any, one: Any, lower: Any, upper: Any) -> Any:
    f = bias + accum
    result = ((C - one) * f + ef.log(ef.clip(ef.sigmoid(f), lower, upper))).sum()
    return result


def article(stride: tuple[int, int, int] = (0, 0, 0)) -> Visitor:
    """Node by node, as the article writes it."""
    return EVT(
        ScalarReduction("result", plus, atomic_add, stride=stride),
        TopologicalVisitor(
            EDGES,
            EVT(Compute(plus), ColBroadcast("bias"), AccFetch()),
            EVT(Compute(minus), SrcFetch(), ScalarBroadcast("one")),
            Compute(multiplies),
            Compute(Sigmoid),
            Compute(Clamp, min="lower", max="upper"),
            Compute(fast_log),
            Compute(plus),
        ),
    )


def aliases() -> Visitor:
    """From named pieces, and without a name for anything."""
    matmul_plus_bias = EVT(Compute("add"), ColBroadcast(), AccFetch())
    c_minus_1 = EVT(Compute("sub"), SrcFetch(), ScalarBroadcast())
    clamped = Compute(lambda x, low, high: ef.clip(x, low, high), low="low", high="high")
    visitor = TopologicalVisitor(
        EDGES, matmul_plus_bias, c_minus_1, Compute("mul"), Compute("sigmoid"), clamped, Compute("log"), Compute("add")
    )
    return EVT(ScalarReduction(), visitor)


@pytest.fixture
def data() -> dict[str, torch.Tensor]:
    return {
        "A": torch.randn(M, K) / K**0.5,
        "B": torch.randn(K, N),
        "C": (torch.rand(M, N) > 0.9).float(),
        "bias": torch.randn(M),
        "result": torch.full((), float("nan")),
    }


def nested(data: dict[str, torch.Tensor]) -> Any:
    """The article's argument tree; its braces are tuples."""
    return (
        (  # TopoVisitor
            (  # matmul + bias
                (data["bias"], 0, (1, 0, 0)),  # ColBroadcast
                (),  # AccFetch
                (),  # plus
            ),
            (  # C - 1
                (),  # SrcFetch
                ((ONE,),),  # ScalarBroadcast
                (),  # minus
            ),
            (),  # multiplies
            (),  # sigmoid
            (LOWER, UPPER),  # clamp
            (),  # log
            (),  # plus
        ),
        (data["result"], 0, (0, 0, 0)),  # ScalarReduction
    )


def definition(accum: Any, C: Any, bias: Any) -> Any:
    """In PyTorch, from the definition: the logarithm of the clamped probability."""
    f = accum + bias[:, None]
    return ((C - 1) * f + torch.clamp(torch.sigmoid(f), LOWER, UPPER).log()).sum()


def check(data: dict[str, torch.Tensor]) -> None:
    """The result beside PyTorch in float64."""
    accum = product(data["A"], data["B"])
    assert_close_to_reference({"result": data["result"]}, definition, accum, C=data["C"], bias=data["bias"])


def as_function(data: dict[str, torch.Tensor]) -> ef.EpilogueArguments:
    numbers = {"one": ONE, "lower": LOWER, "upper": UPPER}
    return ef.EpilogueArguments(loss, C=data["C"], bias=data["bias"][:, None], result=data["result"], **numbers)


def as_tree(tree: Visitor, data: dict[str, torch.Tensor]) -> ef.EpilogueArguments:
    return ef.EpilogueArguments(tree, C=data["C"], **tree.arguments(nested(data)))


def by_name(data: dict[str, torch.Tensor]) -> ef.EpilogueArguments:
    numbers = {"one": ONE, "lower": LOWER, "upper": UPPER}
    return ef.EpilogueArguments(article(), C=data["C"], bias=data["bias"][:, None], result=data["result"], **numbers)


FORMS = {
    "function": as_function,
    "tree": lambda data: as_tree(article(), data),
    "aliases": lambda data: as_tree(aliases(), data),
    "by name": by_name,
}


def test_one_digest_one_plan_one_number(data: dict[str, torch.Tensor]) -> None:
    digests, designs, numbers = set(), set(), set()
    for form in FORMS.values():
        args = ef.GemmArguments(data["A"], data["B"], epilogue=form(data))
        kernel = ef.get_kernels(args)[0]
        data["result"].fill_(float("nan"))
        kernel.run(args)
        digests.add(kernel.plan.digest)
        designs.add((kernel.spec.name, kernel.plan.allocation))
        numbers.add(data["result"].item())
    assert (len(digests), len(designs), len(numbers)) == (1, 1, 1)


@pytest.mark.parametrize("form", FORMS)
def test_the_number_is_pytorchs(form: str, data: dict[str, torch.Tensor]) -> None:
    args = ef.GemmArguments(data["A"], data["B"], epilogue=FORMS[form](data))
    ef.get_kernels(args)[0].run(args)
    check(data)


def test_each_batch_by_itself_where_the_stride_says_so(data: dict[str, torch.Tensor]) -> None:
    a, c = torch.randn(BATCHES, M, K), torch.rand(BATCHES, M, N)
    bias = torch.randn(BATCHES, M)
    tree = article(stride=(0, 0, 1))
    arguments = nested({**data, "result": torch.empty(BATCHES)})
    ((first, *others), (result, identity, _)) = arguments
    first = ((bias, 0, (1, 0, M)), *first[1:])
    named = tree.arguments(((first, *others), (result, identity, (0, 0, 1))))
    args = ef.GemmArguments(a, data["B"], epilogue=ef.EpilogueArguments(tree, C=c, **named))
    ef.get_kernels(args)[0].run(args)
    for batch in range(BATCHES):
        check({"A": a[batch], "B": data["B"], "C": c[batch], "bias": bias[batch], "result": result[batch]})


def test_the_tree_as_printed() -> None:
    assert str(article()).splitlines() == [
        "ScalarReduction(result = sum)",
        "└─ TopologicalVisitor",
        "   ├─ 0: Compute(add)",
        "   │     ├─ ColBroadcast(bias)",
        "   │     └─ AccFetch()",
        "   ├─ 1: Compute(sub)",
        "   │     ├─ SrcFetch(C)",
        "   │     └─ ScalarBroadcast(one)",
        "   ├─ 2: Compute(mul) <- 0, 1",
        "   ├─ 3: Compute(sigmoid) <- 0",
        "   ├─ 4: Compute(clip, min=lower, max=upper) <- 3",
        "   ├─ 5: Compute(fast_log) <- 4",
        "   └─ 6: Compute(add) <- 2, 5",
    ]


def test_a_node_without_a_name_gets_one() -> None:
    assert str(aliases()).count("ColBroadcast(col)") == 1
    assert aliases().__epifuse__().parameters == ("col", "C", "scalar", "low", "high")
