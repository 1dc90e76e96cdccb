"""A decoder block of transformers whose linear layers are quantised, as the example has it."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

import epifuse as ef

pytest.importorskip("transformers", reason="an optional dependency of the examples")
EXAMPLES = Path(__file__).parents[1] / "examples"
E4M3 = torch.float8_e4m3fn
ROUNDING = 2.0**-4
"""Largest error of e4m3 beside its value."""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("quantised_llama")


def errors(printed: str) -> dict[str, float]:
    return {name: float(error) for name, error in re.findall(r"error of (\w+) against float64: (\S+)", printed)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_a_block_with_quantised_layers(model, device, example, capsys):
    """Rounding two factors errs less than `ROUNDING` twice, and most of a block's result is what came in."""
    assert example.main(f"--model {model} --tokens 96 --iterations 1 --device {device}".split()) == 0
    found = errors(capsys.readouterr().out)
    assert found.keys() == {"bfloat16", "rows", "blocks"}
    assert found["bfloat16"] < found["rows"] < 2 * ROUNDING
    assert found["bfloat16"] < found["blocks"] < 2 * ROUNDING


def relative(found, want):
    return float((found.double() - want).norm() / want.norm())


def wide(values, scale):
    """What values with a scale a row stand for."""
    return values.double() * scale.double()


def of_blocks(scaled, rows):
    """What values with scales of blocks stand for."""
    scales = scaled.scales.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return scaled.tensor.double() * scales


@pytest.fixture
def x():
    return torch.randn(48, 256)


def test_a_layer_multiplies_what_its_numbers_stand_for(example, x):
    weight = torch.randn(384, 256)
    of_rows = wide(*example.by_rows(x)) @ wide(*example.by_rows(weight)).t()
    assert relative(example.RowLinear(weight)(x), of_rows) < 1e-5
    of_all = of_blocks(example.by_blocks(x, 1), 1) @ of_blocks(example.by_blocks(weight, 128), 128).t()
    assert relative(example.BlockLinear(weight)(x), of_all) < 1e-5


class Mlp:
    """The weights of a gated MLP."""

    def __init__(self) -> None:
        self.gate_proj, self.up_proj, self.down_proj = (
            torch.nn.Linear(k, n, bias=False) for n, k in ((512, 256), (512, 256), (256, 512))
        )


def gated(first):
    gate, up = first.chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.no_grad()
def test_a_delayed_scale_is_that_of_the_step_before(example, x):
    mlp = example.RowMlp(Mlp())
    first, second = (wide(layer.weight, layer.scale[:, None]) for layer in (mlp.first, mlp.second))
    before, after = x, 3 * x
    mlp(before)
    h = gated(wide(*example.by_rows(before)) @ first.t())
    scale = h.abs().max() / 448
    torch.testing.assert_close(mlp.h_scale.double().reshape(()), scale, rtol=1e-6, atol=0)
    h = gated(wide(*example.by_rows(after)) @ first.t())
    saturated = (h / scale).clamp(-448, 448).to(E4M3)
    assert relative(mlp(after), wide(saturated, scale) @ second.t()) < 1e-3  # of ties that float32 breaks otherwise
    assert mlp.h_scale > scale
    mlp(0 * x)
    assert mlp(x).isfinite().all()


@torch.no_grad()
def test_the_scales_of_blocks_come_with_the_values(example, x):
    mlp = example.BlockMlp(Mlp())
    first, second = (of_blocks(layer.weight, 128) for layer in (mlp.first, mlp.second))
    h = gated(of_blocks(example.by_blocks(x, 1), 1) @ first.t())
    narrow = of_blocks(example.by_blocks(h, 1), 1)
    assert relative(mlp(x), narrow @ second.t()) < 1e-3


def test_hopper_carries_every_product_of_llama_3_8b(example):
    """In one launch each, on the tensor cores, whatever the number of tokens."""
    hidden, inner = example.LARGE["hidden_size"], example.LARGE["intermediate_size"]

    def narrow(*shape):
        return torch.empty(shape, dtype=torch.uint8).view(E4M3)

    def carried(tokens, n, k, epilogue, dtypes, *, blocks=False, **operands):
        a, weight = narrow(tokens, k), narrow(n, k)
        if blocks:
            a, weight = ef.Scaled(a, torch.empty(tokens, k // 128)), ef.Scaled(weight, torch.empty(n // 128, k // 128))
            b = ef.Scaled(weight.tensor.t(), weight.scales.t())
        else:
            b, operands = weight.t(), {"scale": torch.empty(tokens, 1), "weight_scale": torch.empty(n), **operands}
        made = ef.EpilogueArguments.partial(epilogue, operands)
        args = ef.GemmArguments(a, b, epilogue=made, out_dtypes=dtypes)
        kernels = ef.get_kernels(args, cc=90, limit=1)
        assert kernels, ef.explain(args, cc=90)
        assert kernels[0].spec.name.startswith("sm90")

    def as_it_is(accum):
        D = accum
        return D

    for tokens in (1, 100, 4096):
        for n, k in ((hidden, hidden), (hidden // 4, hidden), (hidden, inner)):
            carried(tokens, n, k, example.dequantised, torch.bfloat16)
            carried(tokens, n, k, as_it_is, torch.bfloat16, blocks=True)
        delayed = {"D": E4M3, "largest": torch.float32}
        carried(tokens, 2 * inner, hidden, example.gated_and_delayed, delayed, h_scale=torch.ones(()))
        dtypes = {"D": E4M3, "scale": torch.float32}
        carried(tokens, 2 * inner, hidden, example.gated_blocks, dtypes, blocks=True)
