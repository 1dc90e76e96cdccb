"""A graph as a value of JSON and back: every operation, with an attribute of every form."""

import json
import math
from typing import Any

import pytest
import torch

from epifuse.fusion import operations
from epifuse.fusion.operations import OPERATIONS, Form, broken
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Builder, Factor, Graph, Load, Output
from epifuse.ir.text import packed, unpacked

VIEWS = (("permute", (1, 0)), ("reshape", (2, 3, -1)), ("unsqueeze", 0), ("part", (0, 1, 3, 1, False)))
SAMPLES: dict[str, tuple[Any, ...]] = {
    "_LOAD": (Load("x"), Load("x", VIEWS), Load("x", (), ((Factor("m"),), (), (Factor("n", 64), Factor("n", 1, 64))))),
    "_NUMBER": (True, 1, 1.0, -0.0, math.inf, -math.inf, 1e-300, 1 << 62, 0.1),
    "_ACTIVATION": tuple(name for name, entry in VOCABULARY.items() if entry.group == "activation"),
    "_DTYPE": (torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool),
    "_TEXT": ("log", 'a "quoted"\ntext'),
    "_WHOLES": ((1, 0), ()),
    "_WHOLE": (-1,),
    "_SIZES": ((2, None, -1), ()),
    "_ROLLED": ((-1, 16),),
    "_COLUMNS": ((0, 96),),
    "_AXIS_OR_DIM": ("m", -2),
    "_COUNTED": (((0, -1), 2), (None, 0)),
    "_MAYBE_DTYPE": (None, torch.int32),
    "_AXIS": ("m",),
    "_FACTORS": ((Factor("m"), Factor("n", 4, 2)),),
    "_WORDS": (("relu", "F"),),
    "_REARRANGED": (("unflatten", (-1, 2, 4)), ("unflatten", (-1, None, 4))),
    "_JOINED": ((-1, "cat"), (0, "stack")),
    "_PART": ((-1, "range", (0, 1 << 62, 2)),),
    "_PICKED": (((Factor("n", 4, 2), 1), (Factor("n", 8), 3)),),
    "_RANK": (("x", 2),),
    "_REDUCED": (("sum", (Factor("n"),)),),
    "_REDUCED_AXES": (("amax", ("m", "n")),),
    "_REDUCED_DIMS": (("mean", (0, -1), True), ("sum", None, False)),
    "_ORDER": (None, "mln"),
    "NOTHING": (None,),
}


def samples(form: Form) -> tuple[Any, ...]:
    (name,) = (name for name, value in vars(operations).items() if value is form)
    return SAMPLES[name]


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_survives(op: str) -> None:
    row = OPERATIONS[op]
    for attr in samples(row.form):
        builder = Builder()
        arity = len(VOCABULARY[attr].signature.parameters) if op == "call" else row.arity
        args = [builder.node("load", attr=Load(f"x{index}")) for index in range(2 if arity is None else arity)]
        node = builder.node(op, *args, attr=attr)
        assert broken(node, row.places[0]) is None
        graph = Graph(
            ("x", "x0", "x1"),
            (Output("D", node), Output("E", node, ((Factor("n"),),), torch.float16)),
            (builder.node("debug_print", node, attr="x"),),
            hosts={"#0": node},
            checked=(builder.node("exp", node),),
        )
        text = json.dumps(packed(graph))
        again = unpacked(json.loads(text))
        assert str(again) == str(graph)
        assert again.outputs[1][2:] == graph.outputs[1][2:]
        assert [type(each.attr) for each in again.nodes] == [type(each.attr) for each in graph.nodes]
        assert json.dumps(packed(again)) == text


def test_a_shared_value_is_one_node() -> None:
    builder = Builder()
    node = builder.node("accum")
    for _ in range(200):  # as a tree it would have 2 ** 200 nodes
        node = builder.node("add", node, node)
    graph = Graph((), (Output("D", node),))
    assert len(unpacked(packed(graph)).nodes) == len(graph.nodes)
