"""The linear layers of a decoder block of Llama or Qwen3 in 8-bit floats, with scales of rows or of blocks.

`rows`: one scale for each row of the activations, found as they come, and one for each row of a weight: what torchao
calls PerRow. Between the two products of the MLP there is one scale, that of the step before, which Transformer Engine
calls delayed scaling: the epilogue that computes silu(gate) * up divides by it, stores 8 bits and finds the next one.
`blocks`: one scale for each 1 x 128 of the activations and each 128 x 128 of a weight, as DeepSeek-V3 has them. The
epilogue finds those of silu(gate) * up and stores them beside its 8 bits. A scale times a stored value is the value, as
in `torch._scaled_mm`; Transformer Engine's `scale_inv` is the same.

Weights are random, because nothing is downloaded: the errors are those of the numbers, not a trained model's.

python examples/quantised_llama.py --model qwen3 --tokens 512
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import epifuse as ef

E4M3, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (transformers.LlamaConfig, modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (transformers.Qwen3Config, modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RotaryEmbedding),
}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
"""On the CPU, and on a GPU: a block of Llama-3-8B."""


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) in 8 bits, and the scale of each row, (M, 1) in float32."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x / scale).to(E4M3), scale


def by_blocks(x: Tensor, rows: int) -> ef.Scaled:
    """(M, K) in 8 bits, and the scale of each block of so many rows and of 128 columns. Both divide the extents."""
    blocks = x.float().unflatten(0, (-1, rows)).unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
    return ef.Scaled((blocks / scale).view_as(x).to(E4M3), scale.flatten(2).flatten(0, 1))


# --- what happens to a product: epilogues ---------------------------------------------------------------------------


def dequantised(accum: Any, scale: Any, weight_scale: Any) -> Any:
    """A scale a row of the activations, and one a row of the weight, which is a column of the product."""
    D = accum * scale * weight_scale
    return D


def gated_and_delayed(accum: Any, scale: Any, weight_scale: Any, h_scale: Any) -> Any:
    """silu(gate) * up by the scale of the step before, and its own largest size for the next one."""
    gate, up = (accum * scale * weight_scale).chunk(2, dim=-1)
    h = ef.silu(gate) * up
    D, largest = h / h_scale, ef.absmax(h)
    return D, largest


def gated_blocks(accum: Any) -> Any:
    """silu(gate) * up with a scale for each 128 columns of a row."""
    gate, up = accum.chunk(2, dim=-1)
    blocks = (ef.silu(gate) * up).unflatten(-1, (-1, BLOCK))
    scale = ef.block_scale(ef.absmax(blocks, dim=-1, keepdim=True))
    D = (blocks / scale).flatten(-2, -1)
    return D, scale


# --- layers ---------------------------------------------------------------------------------------------------------


class RowLinear(nn.Module):
    """A linear layer without bias, with scales of rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, scale = by_rows(weight.detach())
        self.scale = scale.flatten()

    def multiplied(self, x: Tensor, epilogue: Any, **named: Any) -> Any:
        """The product with activations of 16 or 32 bits, (M, K), and what the epilogue makes of it."""
        values, scale = by_rows(x)
        return ef.linear(values, self.weight, epilogue=epilogue, scale=scale, weight_scale=self.scale, **named)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        y: Tensor = self.multiplied(x.flatten(0, -2), dequantised, out_dtypes=x.dtype)
        return y.unflatten(0, x.shape[:-1])


class RowMlp(nn.Module):
    """Both products of a gated MLP. `h_scale` is of the step before: the first step only finds it."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.first = RowLinear(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.second = RowLinear(mlp.down_proj.weight)
        self.h_scale = torch.ones((), device=mlp.down_proj.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., K)."""
        dtypes = {"D": E4M3, "largest": torch.float32}
        flat = x.flatten(0, -2)
        h, largest = self.first.multiplied(flat, gated_and_delayed, h_scale=self.h_scale, out_dtypes=dtypes)
        scales = {"scale": self.h_scale, "weight_scale": self.second.scale}
        y: Tensor = ef.linear(h, self.second.weight, epilogue=dequantised, out_dtypes=x.dtype, **scales)
        self.h_scale = (largest / LARGEST).clamp(min=1e-12)
        return y.unflatten(0, x.shape[:-1])


class BlockLinear(nn.Module):
    """A linear layer without bias, with scales of blocks."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = by_blocks(weight.detach(), BLOCK)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        y: Tensor = ef.linear(by_blocks(x.flatten(0, -2), 1), self.weight, out_dtypes=x.dtype)
        return y.unflatten(0, x.shape[:-1])


class BlockMlp(nn.Module):
    """Both products of a gated MLP; the first one's epilogue finds the scales of what lies between them."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.first = BlockLinear(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.second = BlockLinear(mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., K)."""
        dtypes = {"D": E4M3, "scale": torch.float32}
        values = by_blocks(x.flatten(0, -2), 1)
        h, scale = ef.linear(values, self.first.weight, epilogue=gated_blocks, out_dtypes=dtypes)
        h = ef.Scaled(h, scale.squeeze(-1))
        y: Tensor = ef.linear(h, self.second.weight, out_dtypes=x.dtype)
        return y.unflatten(0, x.shape[:-1])


KINDS: dict[str, tuple[Callable[[Tensor], nn.Module], Callable[[Any], nn.Module]]] = {
    "rows": (RowLinear, RowMlp),
    "blocks": (BlockLinear, BlockMlp),
}


def quantise(block: Any, kind: str) -> None:
    """Put layers of 8 bits in the place of a decoder block's own."""
    linear, mlp = KINDS[kind]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(block.self_attn, name, linear(getattr(block.self_attn, name).weight))
    block.mlp = mlp(block.mlp)


# --- a run ----------------------------------------------------------------------------------------------------------


def block_of(model: str, device: torch.device) -> tuple[Any, Any]:
    """A decoder block with random weights, the same each time, and its rotary embedding."""
    config_of, block_class, rotary_class = MODELS[model]
    torch.manual_seed(0)
    config = config_of(**(LARGE if device.type == "cuda" else SMALL), attn_implementation="sdpa")
    return block_class(config, 0).to(device, torch.bfloat16).eval(), rotary_class(config).to(device)


def applied(block: Any, rotary: Any, x: Tensor) -> Tensor:
    """The hidden states behind the block."""
    places = torch.arange(x.shape[1], device=x.device)[None]
    made: Tensor = block(x, position_embeddings=rotary(x, places))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="llama")
    parser.add_argument("--tokens", type=common.amount, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--warmup_iterations", type=common.amount, default=2, help="runs before the timing")
    parser.add_argument("--iterations", type=common.amount, default=10, help="timed runs")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    with torch.no_grad():
        block, rotary = block_of(options.model, device)
        x = torch.randn(1, options.tokens, block.hidden_size).to(device, torch.bfloat16)
        runs = {"bfloat16": lambda: applied(block, rotary, x)}
        for kind in KINDS:
            narrow, _ = block_of(options.model, device)
            quantise(narrow, kind)
            applied(narrow, rotary, x)  # finds the delayed scale
            runs[kind] = lambda narrow=narrow: applied(narrow, rotary, x)  # type: ignore[misc]
        made = {name: call() for name, call in runs.items()}
        want = applied(block_of(options.model, device)[0].double(), rotary, x.double())
        for name, found in made.items():
            print(f"error of {name} against float64: {float((found - want).norm() / want.norm()):.1e}")
        common.say_times(runs, device, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
