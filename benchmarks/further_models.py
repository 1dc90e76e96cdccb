"""Further models for `model_time.py`, on which nothing was tuned. Two layers each unless --layers is less.

The sizes of layers are those of published models. Vocabularies are of 32000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any], Tensor]
_LAYERS = 2
_RANK = 16


def _language_model(model: Any, at: Any, sequences: int, length: int = 2048) -> tuple[nn.Module, Loss]:
    ids = at.ids(at.of(32000, 500), at.of(sequences, 2), at.of(length, 32))
    return model, lambda own: own(input_ids=ids, labels=ids).loss


def _sizes(at: Any, width: int, heads: tuple[int, int], inner: int) -> dict[str, Any]:
    return {
        "vocab_size": at.of(32000, 500),
        "hidden_size": at.of(width, 64),
        "num_hidden_layers": at.depth(_LAYERS),
        "num_attention_heads": at.of(heads[0], 4),
        "num_key_value_heads": at.of(heads[1], 2),
        "intermediate_size": at.of(inner, 176),
        "max_position_embeddings": at.of(4096, 64),
        "use_cache": False,
    }


def qwen3(at: Any) -> tuple[nn.Module, Loss]:
    """Layers of Qwen3-4B, 2 sequences of 2048 tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_sizes(at, 2560, (32, 8), 9728), head_dim=at.of(128, 16))
    return _language_model(Qwen3ForCausalLM(config), at, 2)


class _LowRank(nn.Module):
    """A frozen linear layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, _RANK, bias=False)
        self.up = nn.Linear(_RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


def lora(at: Any) -> tuple[nn.Module, Loss]:
    """The frozen layers of `qwen3` with updates of rank 16."""
    model, loss = qwen3(at)
    model.requires_grad_(False)
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, name, child in found:
        if isinstance(child, nn.Linear) and name.endswith("_proj"):
            setattr(parent, name, _LowRank(child))
    return model, loss


def gemma2(at: Any) -> tuple[nn.Module, Loss]:
    """Layers of Gemma-2-2B, 2 sequences of 2048 tokens."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**_sizes(at, 2304, (8, 4), 9216), head_dim=at.of(256, 16))
    return _language_model(Gemma2ForCausalLM(config), at, 2)


def phi3(at: Any) -> tuple[nn.Module, Loss]:
    """Layers of Phi-3-mini, whose gate and up projections are stacked; 2 sequences of 2048 tokens."""
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {**_sizes(at, 3072, (32, 32), 8192), "num_key_value_heads": at.of(32, 4)}
    return _language_model(Phi3ForCausalLM(Phi3Config(**sizes, pad_token_id=0, eos_token_id=0)), at, 2)


def opt(at: Any) -> tuple[nn.Module, Loss]:
    """Layers of OPT-1.3B, with relu and dropout; 4 sequences of 2048 tokens."""
    from transformers import OPTConfig, OPTForCausalLM

    width = at.of(2048, 64)
    config = OPTConfig(
        vocab_size=at.of(32000, 500),
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=at.depth(_LAYERS),
        num_attention_heads=at.of(32, 4),
        ffn_dim=4 * width,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return _language_model(OPTForCausalLM(config), at, 4)


def neox(at: Any) -> tuple[nn.Module, Loss]:
    """Layers of Pythia-2.8B, where attention and MLP are parallel; 4 sequences of 2048 tokens."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    width = at.of(2560, 64)
    config = GPTNeoXConfig(
        vocab_size=at.of(32000, 500),
        hidden_size=width,
        num_hidden_layers=at.depth(_LAYERS),
        num_attention_heads=at.of(32, 4),
        intermediate_size=4 * width,
        use_cache=False,
    )
    return _language_model(GPTNeoXForCausalLM(config), at, 4)


def whisper(at: Any) -> tuple[nn.Module, Loss]:
    """Layers of Whisper-medium, encoder and decoder; 8 recordings of 30 s with 448 tokens each."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, frames, vocabulary = at.of(1024, 64), at.of(1500, 50), at.of(32000, 500)
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=at.depth(_LAYERS),
        decoder_layers=at.depth(_LAYERS),
        encoder_attention_heads=at.of(16, 4),
        decoder_attention_heads=at.of(16, 4),
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    sound = torch.randn(at.of(8, 2), config.num_mel_bins, 2 * frames, device=at.device)
    ids = at.ids(vocabulary, at.of(8, 2), at.of(448, 32))
    return WhisperForConditionalGeneration(config), lambda model: model(input_features=sound, labels=ids).loss


def _images(model: nn.Module, at: Any, side: int) -> tuple[nn.Module, Loss]:
    count = at.of(64, 2)
    images = torch.randn(count, 3, side, side, device=at.device)
    labels = torch.randint(0, 16, (count,), device=at.device)
    return model, lambda own: F.cross_entropy(own(pixel_values=images).logits, labels)


def convnext(at: Any) -> tuple[nn.Module, Loss]:
    """ConvNeXt of the width of its large variant, with 1, 1, 2 and 1 blocks; 64 images of 224 x 224."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    widths = [at.of(192, 16) * 2**i for i in range(4)]
    config = ConvNextConfig(hidden_sizes=widths, depths=[1, 1, 2, 1], num_labels=16)
    return _images(ConvNextForImageClassification(config), at, at.of(224, 64))


def swin(at: Any) -> tuple[nn.Module, Loss]:
    """Swin of the width of its base variant, with 1, 1, 2 and 1 blocks; 64 images of 224 x 224."""
    from transformers import SwinConfig, SwinForImageClassification

    heads = [at.of(4, 1) * 2**i for i in range(4)]
    config = SwinConfig(
        embed_dim=at.of(128, 16), depths=[1, 1, 2, 1], num_heads=heads, num_labels=16, drop_path_rate=0.0
    )
    return _images(SwinForImageClassification(config), at, 224)


class _AdaptiveBlock(nn.Module):
    """A block of a diffusion transformer: norms without weights, whose scales, shifts and gates are computed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, *others = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        normed = self.first(x) * (1 + scale) + shift
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + gate * self.out(attended)
        shift, scale, gate = others
        normed = self.second(x) * (1 + scale) + shift
        return x + gate * self.down(F.gelu(self.up(normed), approximate="tanh"))


class _Adaptive(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_AdaptiveBlock(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x


def dit(at: Any) -> tuple[nn.Module, Loss]:
    """Blocks of DiT-XL/2, 32 images of 256 tokens."""
    width = at.of(1152, 64)
    x = torch.randn(at.of(32, 2), at.of(256, 16), width, device=at.device)
    condition = torch.randn(at.of(32, 2), width, device=at.device)
    return _Adaptive(width, at.of(16, 4), at.depth(_LAYERS)), lambda model: model(x, condition).square().mean()


class _GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.gelu(gate) * up)


def geglu_mlp(at: Any) -> tuple[nn.Module, Loss]:
    """The gated MLP blocks of a diffusion U-Net, 1280 to 5120 to 1280; 16384 tokens."""
    width = at.of(1280, 64)
    x = torch.randn(at.of(16384, 64), width, device=at.device)
    blocks = nn.Sequential(*(_GatedMlp(width, 4 * width) for _ in range(at.depth(_LAYERS))))
    return blocks, lambda model: model(x).square().mean()


FURTHER = (qwen3, lora, gemma2, phi3, opt, neox, whisper, convnext, swin, dit, geglu_mlp)
