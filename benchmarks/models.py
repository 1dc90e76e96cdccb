"""Compare the gradients of whole models by `ef.compile`, eager PyTorch and torch.compile with gradients in float64.

    python benchmarks/models.py [bert gpt2 llama qwen3 vit dlrm xmlcnn] [--amp | --tf32] [--draws 8] [--save out.json]

The transformers models are made from configurations with random weights, so nothing is downloaded. The error of a
tensor is ||g - g64|| / max(||g64||, 1e-3 x the median norm of the parameters' gradients). Each model is one graph.

Errors are sums of roundings, and so they are random. The errors of the loss and of a tensor of few values differ by
10 % and more, in either direction, from one draw of weights and batch to the next. With --draws an error is the root of
the mean square over that number of draws.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import machine, save
from torch import Tensor, nn

import epifuse as ef

Batch = dict[str, Tensor]
LAYERS, WIDTH, HEADS, LENGTH, SIZE = 2, 128, 4, 64, 4
_TOKENS = {"vocab_size": 1000, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}


def _ids() -> Tensor:
    return torch.randint(1, 1000, (SIZE, LENGTH))


def bert() -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(**_TOKENS, **drops, intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH))
    ids = _ids()
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def gpt2() -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes = {
        "vocab_size": 1000,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops))
    model.loss_type = "ForCausalLM"  # without it the model logs a warning, which breaks the graph
    ids = _ids()
    return model, {"input_ids": ids, "labels": ids}


def llama() -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_key_value_heads": HEADS // 2, "intermediate_size": 352, "max_position_embeddings": LENGTH}
    model = LlamaForCausalLM(LlamaConfig(**_TOKENS, **heads, use_cache=False))
    ids = _ids()
    return model, {"input_ids": ids, "labels": ids}


def qwen3() -> tuple[nn.Module, Batch]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {
        "num_key_value_heads": HEADS // 2,
        "head_dim": 32,
        "intermediate_size": 352,
        "max_position_embeddings": LENGTH,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**_TOKENS, **heads, use_cache=False))
    ids = _ids()
    return model, {"input_ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {**_TOKENS, "intermediate_size": 4 * WIDTH, "image_size": 64, "patch_size": 8, "num_labels": 16}
    sizes.pop("vocab_size")
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = ViTForImageClassification(ViTConfig(**sizes, **drops))
    return model, {"pixel_values": torch.randn(SIZE, 3, 64, 64), "labels": torch.randint(0, 16, (SIZE,))}


class Dlrm(nn.Module):
    """An MLP for dense features, tables for sparse features, products of all pairs of them, and an MLP on top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(500, 32) for _ in range(8))
        self.below = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.above = nn.Sequential(nn.Linear(32 + 81, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor) -> tuple[Tensor]:
        x = self.below(dense)
        rows = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = (rows @ rows.transpose(1, 2)).flatten(1)
        z = self.above(torch.cat([x, pairs], 1)).squeeze(1)
        return (nn.functional.binary_cross_entropy_with_logits(z, labels),)


def dlrm() -> tuple[nn.Module, Batch]:
    labels = (torch.rand(256) < 0.3).float()
    return Dlrm(), {"dense": torch.randn(256, 16), "sparse": torch.randint(0, 500, (256, 8)), "labels": labels}


class XmlCnn(nn.Module):
    """Convolutions over words, a hidden layer, a wide classifier with a loss for each label."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.filters = nn.ModuleList(nn.Conv1d(64, 64, width) for width in (2, 4, 8))
        self.hidden, self.labels = nn.Linear(192, 256), nn.Linear(256, 2048)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        x = self.words(ids).transpose(1, 2)
        x = torch.cat([torch.relu(each(x)).amax(-1) for each in self.filters], 1)
        z = self.labels(torch.relu(self.hidden(x)))
        return (nn.functional.binary_cross_entropy_with_logits(z, labels),)


def xmlcnn() -> tuple[nn.Module, Batch]:
    return XmlCnn(), {"ids": torch.randint(0, 1000, (64, LENGTH)), "labels": (torch.rand(64, 2048) < 0.01).float()}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    each.__name__: each for each in (bert, gpt2, llama, qwen3, vit, dlrm, xmlcnn)
}


def gradients(model: nn.Module, step: Callable[..., Any], batch: Batch, amp: bool) -> dict[str, Tensor]:
    """The loss and the gradient of each parameter, by name, in float64. `amp` runs under autocast to bfloat16."""
    model.zero_grad()
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, torch.bfloat16) if amp else contextlib.nullcontext():
        found = step(**batch)
        loss = found[0] if isinstance(found, tuple) else found.loss
    loss.backward()
    by_name = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **by_name}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The error of each tensor, as the module's docstring defines it."""
    least = 1e-3 * statistics.median(value.norm().item() for name, value in exact.items() if name != "loss")
    return {
        name: ((found[name] - value).norm() / max(value.norm().item(), least)).item() for name, value in exact.items()
    }


def compared(model: nn.Module, batch: Batch, steps: dict[str, Any], amp: bool) -> dict[str, dict[str, float]]:
    """By name of a way to run the model, the error of each tensor."""
    wide = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    double = copy.deepcopy(model).double()
    exact = gradients(double, double, wide, amp=False)
    return {kind: errors(gradients(model, step, batch, amp), exact) for kind, step in steps.items()}


def measured(name: str, amp: bool, sites: str, device: str, draws: int = 1) -> dict[str, Any]:
    """Errors of one model, and the number of products that were fused."""
    torch.compiler.reset()
    model = MODELS[name]()[0].to(device).train()
    ours = ef.compile(model, fullgraph=True, dynamic=False, sites=sites)
    inductor = torch.compile(model, fullgraph=True, dynamic=False)
    steps = {"epifuse": ours, "torch.compile": inductor, "eager": model}
    each_draw = []
    for seed in range(draws):
        torch.manual_seed(seed)
        drawn, batch = MODELS[name]()
        model.load_state_dict(drawn.state_dict())
        each_draw.append(compared(model, {key: value.to(device) for key, value in batch.items()}, steps, amp))
    found = {kind: _root_mean_squares([one[kind] for one in each_draw]) for kind in steps}
    others = {each: max(found["eager"][each], found["torch.compile"][each]) for each in found["eager"]}
    ratios = {each: found["epifuse"][each] / max(others[each], 1e-12) for each in others}
    rows = ef.report(ours).rows
    fused = {graph: sum(row.fused for row in rows if row.graph == graph) for graph in ("forward", "backward")}
    return {
        "model": name,
        "products": len(rows),
        "fused": fused,
        "worst": {kind: max(each.values()) for kind, each in found.items()},
        "median": {kind: statistics.median(each.values()) for kind, each in found.items()},
        "highest_ratio": max(ratios.values()),
        "tensors_above_1.1": sorted(each for each, ratio in ratios.items() if not ratio <= 1.1),  # also for NaN
        "tensors": len(ratios),
    }


def _root_mean_squares(draws: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] ** 2 for one in draws) ** 0.5 for name in draws[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="model")
    parser.add_argument("--amp", action="store_true", help="under autocast in bfloat16")
    parser.add_argument("--tf32", action="store_true", help="float32 is multiplied as tf32, on a GPU")
    parser.add_argument("--sites", default="all", choices=["all", "predicted"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draws", type=int, default=1, help="of weights and batches")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    if given.tf32:
        torch.set_float32_matmul_precision("high")
    # If PyTorch found a graph on disk, epifuse's pass would not run, and the report would be empty.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    results = []
    print(f"{'model':8} {'fused':>14}  {'worst: ours':>11} {'compile':>8} {'eager':>8}   {'median':>8} {'':8} {'':8}")
    for name in given.models:
        one = measured(name, given.amp, given.sites, given.device, given.draws)
        results.append(one)
        fused = f"{one['fused']['forward']}+{one['fused']['backward']} of {one['products']}"
        worst, median = (" ".join(f"{each:8.2e}" for each in one[key].values()) for key in ("worst", "median"))
        above = f"{len(one['tensors_above_1.1'])} of {one['tensors']} tensors above 1.1 x the others"
        print(f"{name:8} {fused:>14}     {worst}   {median}   {above}", flush=True)
    if given.save:
        said = {"amp": given.amp, "tf32": given.tf32, "sites": given.sites, "draws": given.draws, "models": results}
        save(given.save, {**machine(given.device), **said})


if __name__ == "__main__":
    main()
