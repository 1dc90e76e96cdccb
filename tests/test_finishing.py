"""What Hopper computes after all tiles: its steps, and where in the workspace each finds what others left."""

import itertools
import math
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from emulated import Emulated, _value, emulated  # noqa: F401  # a fixture
from fuzzing.check import function_of
from gpu import test_reductions as on_gpu

import epifuse as ef
from epifuse.providers.cutedsl import partials
from epifuse.providers.cutedsl.kernels import merge

L, M, N = 3, 192, 128  # more rows than A and B are exchanged for
CASES = {
    "a mean of row losses": ("r = sum(x, dim=-1); s = mean(r * r); return r, s", 2),
    "a share of all": ("r = sum(x, dim=-1) / sum(x); return r", 2),
    "a share of the rows": ("w = sum(x, dim=-1); r = w / sum(w); return r", 3),
    "of both axes": ("r = mean(sum(x, dim=-1)) + mean(sum(x, dim=-2) + 1.0) * sum(x); return r", 3),
    "a batch at a time": ("r = mean(sum(x, dim=-1), dim=-1) + mean(x); return r", 3),
    "over batches": ("r = sum(sum(x, dim=-1) / sum(x), dim=0); s = sum(r); return r, s", 4),
}


class Workspace(dict[int, float]):
    """Words of 32 bits that were written."""

    def __getitem__(self, place: Any) -> float:
        return super().__getitem__(int(place))


@pytest.fixture
def on_numbers(monkeypatch):
    """The merging kernels' own addresses, on Python's numbers; values are computed by PyTorch."""

    def computed(self, merged, _tensors, _numbers, _m, _n, _batch, shape):
        values = {}
        for node in self.step.nodes:
            if node.op == "reduce":
                gone = {factor.axis for factor in node.attr[1]} if node.attr[0] == "mean" else ()
                count = math.prod(extent for axis, extent in zip("mnl", shape, strict=True) if axis in gone)
                values[node] = torch.tensor(merged[node][0]) / count
            else:
                args = [values[arg] for arg in node.args]
                values[node] = _value(node, args) if args else torch.tensor(node.attr)
        return values

    for name, stand_in in {
        "Int32": int,
        "Int64": int,
        "as_words": lambda _, workspace: workspace,
        "words": lambda value: [float(value)],
        "joined": lambda _, words: words[0],
        "arguments": lambda _reduction, value, _kind: (value,),
        "stored": lambda value, _kind, _dtype: (value,),
    }.items():
        monkeypatch.setattr(merge, name, stand_in)
    monkeypatch.setattr("epifuse.providers.cutedsl.kernels.reduce.Int64", int)
    monkeypatch.setattr(merge.Finish, "finished", computed)


def merge_all(finish, workspace, outputs, shape, ctas):
    """A launch of a merging kernel: each element's parts, one behind the other."""
    length = {"m": shape[0], "n": shape[1], "": 1}[finish.axis]
    regions = finish.layouts(shape)
    for element in range(length * shape[2] if finish.batched else length):
        at, batch = finish.whose(element, length)
        merged = {}
        for number in finish.needed:
            one, region = finish.reductions[number], regions[number]
            first = region.at(one, 0, at, batch)
            parts = range(finish.rounds(number, regions, shape, ctas))
            merged[one.node] = (sum(workspace[first + part * region.length] for part in parts),)
        finish.store(merged, (), (), outputs, at, batch, shape, workspace, regions)


def left_by_tiles(finish, workspace, x, ctas):
    """Every partial result that the main kernel leaves: all of a reduction is in the first one."""
    shape = x.shape[1], x.shape[2], x.shape[0]
    for one, region in zip(finish.reductions, finish.layouts(shape), strict=True):
        if one.of is not None:
            continue
        assert one.name in ("sum", "mean")
        gone = [axis for axis in "lmn" if axis not in finish.program.graph.types[one.node].axes]
        values = x.sum(["lmn".index(axis) for axis in gone], keepdim=True).reshape(-1, region.length)
        rounds = ctas * partials.MATH_WARPS if partials.is_carried(one) else region.kept * L
        every = itertools.product(range(rounds), range(region.length))
        workspace.update({region.base + part * region.length + at: 0.0 for part, at in every})
        for batch, at in itertools.product(range(len(values)), range(region.length)):
            workspace[region.at(one, 0, at, batch)] = float(values[batch, at])


@pytest.mark.parametrize("case", CASES)
def test_steps_find_what_others_left(case, on_numbers):
    body, count = CASES[case]
    text = f"def epi(accum): x = accum; {body}"
    a, b = (torch.empty(L, extent, 64, dtype=torch.bfloat16) for extent in (M, N))
    args = ef.GemmArguments(a, b.mT, epilogue=ef.EpilogueArguments.partial(text, {}))
    found = ef.get_kernels(args, cc=90)[0].plan.allocation.program
    kernels = merge.merging_kernels(found.design, found.program)
    assert len(kernels) == count
    x = torch.randint(-3, 4, (L, M, N)).float() + 1
    want = ef.reference(function_of(text, {}))(x)
    want = want if isinstance(want, tuple) else (want,)
    outputs = [torch.full((M, N, L), torch.nan) for _ in want]
    workspace, ctas = Workspace(), 4
    left_by_tiles(kernels[0], workspace, x, ctas)
    for kernel in kernels:
        merge_all(kernel, workspace, outputs, (M, N, L), ctas)
    words = partials.workspace_bytes(kernels[0].reductions, found.design, {"m": M, "n": N, "l": L}) // 4
    assert max(workspace) < words
    for output, access, value in zip(outputs, found.program.stores, want, strict=True):
        own = output.permute(2, 0, 1)[tuple(slice(None) if axis in access.axes else slice(0, 1) for axis in "lmn")]
        torch.testing.assert_close(own.reshape(value.shape), value)


@pytest.mark.parametrize("name", on_gpu.BESIDE)
def test_operands_are_reduced_beside_rows(name, emulated: Emulated):  # noqa: F811
    for m in (1, 70, 257):
        on_gpu.test_an_operand_is_reduced_beside_rows(name, m, emulated)


def test_operands_of_batches_are_reduced_beside_rows(emulated: Emulated):  # noqa: F811
    on_gpu.test_an_operand_of_batches_is_reduced_beside_rows(emulated)


@pytest.mark.parametrize("written", ["return 1.0 / total * loss", "return total, loss"])
def test_where_an_operand_is_reduced_does_not_matter(written):
    """Before the rows that it is reduced beside, or behind."""
    source = f"def epi(accum, w): total = sum(w); loss = sum(logsumexp(accum, -1, keepdim=True)); {written}"
    made = ef.EpilogueArguments.partial(source, {"w": torch.empty(M, 1)})
    args = ef.GemmArguments(torch.empty(M, 64).bfloat16(), torch.empty(64, N).bfloat16(), epilogue=made)
    assert ef.get_kernels(args, cc=90)
