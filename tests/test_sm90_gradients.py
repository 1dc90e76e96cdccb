"""Gradients as a Hopper GPU computes them: its plans and launches, which PyTorch emulates."""

from typing import Any

import pytest
import torch
from emulated import emulated as emulated  # a fixture
from emulated import on_hopper as on_hopper  # a fixture
from gpu import test_gradients as on_gpu
from gpu.harness import Machine
from torch.nn import functional as F

from epifuse.providers.cutedsl import launch
from epifuse.providers.cutedsl.kernel_text import read

WIDTH = on_gpu.WIDTH


def attention_inputs(accum: Any, cos: Any, sin: Any, weight: Any) -> Any:
    """Queries of more heads than keys and values; what is stored is of all columns, and each output of some."""
    width = accum.shape[-1] // 4
    q, k, v = accum.split((2 * width, width, width), dim=-1)
    q_rotated = on_gpu.rotary(F.rms_norm(q.unflatten(-1, (-1, WIDTH)), (WIDTH,), weight).flatten(-2), cos, sin)
    k_rotated = on_gpu.rotary(k, cos, sin)
    return q_rotated, k_rotated, v


def all_and_a_range(accum: Any, bias: Any) -> Any:
    x = accum + bias
    first = torch.tanh(x[:, :WIDTH])
    return x, first


@pytest.mark.filterwarnings("ignore:PyTorch runs the derivative of .* unfused")
@pytest.mark.parametrize("save", ["auto", "recompute", "preactivation"])
@pytest.mark.parametrize("epilogue", [*on_gpu.EPILOGUES, on_gpu.projection, attention_inputs, all_and_a_range])
def test_gradients(epilogue: Any, save: str, on_hopper: Machine) -> None:
    for shape in ((200, 256, 136), (4, 768, 64)):  # where there are few rows, A and B are exchanged
        on_gpu.judge_gradients(epilogue, torch.bfloat16, save, on_hopper, shape)


def halves_of_a_bias_added(accum: Any, bias: Any) -> Any:
    return on_gpu.halves(accum + bias)


@pytest.mark.parametrize("m", [1, 2])
def test_one_row_is_fused_as_many_are(m: int, on_hopper: Machine) -> None:
    """The gradient of the bias needs no sum then. That PyTorch runs it would be a warning, which is an error here."""
    on_gpu.judge_gradients(halves_of_a_bias_added, torch.bfloat16, "auto", on_hopper, (m, 256, 136))


def test_gradients_across_columns_are_not_loaded_directly(on_hopper: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product with such a derivative as its epilogue would load the columns of each head from memory three times."""
    texts, emulate = list[str](), launch.function
    monkeypatch.setattr(launch, "function", lambda text, name: texts.append(text) or emulate(text, name))
    on_gpu.judge_gradients(on_gpu.normed_rotary, torch.bfloat16, "recompute", on_hopper, (200, 256, 136))
    assert not [load for text in texts for program in read(text).programs for load in program.loads if _is_direct(load)]


def _is_direct(load: tuple[Any, Any]) -> bool:
    return bool(load[1].way == "direct")
