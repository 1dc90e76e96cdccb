"""Time training steps of whole models: eager, torch.compile, and ef.compile with predicted and with measured choices.

    python benchmarks/model_time.py --save out/ [--models bert vit gpt2 ...] [--layers 4] [--limit 240]
    python benchmarks/model_time.py --save cold/ --cold --models bert
    python benchmarks/model_time.py --save out/ --tiny --device cpu

A step is forward and backward under autocast to bfloat16, with the loss and the dropout of the configuration. Weights
are random. Each model runs in its own process, which is ended after --limit seconds. out/<model>.json is written anew
after each figure. A round runs each way once, in a random order. These figures of a way are saved: the milliseconds of
a step (CUDA events); the time in which its kernels run (by the profiler, interleaved as well; the time in which two
kernels overlap counts once); the seconds until two steps have run for the first time; peak memory; the bytes that
Inductor counts for its kernels; and the report. `bounds` are the times that these bytes take at the memory's rate, and
that the operations of eager's products take at the rate that large products reach. A way finds kernels that an earlier
way compiled. Therefore --cold measures only the seconds of the first two steps: each way in its own process with empty
caches, and then again with the caches that the first process left and PyTorch's caches of graphs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from further_models import FURTHER
from timing import machine
from torch import Tensor, nn

import epifuse as ef

Loss = Callable[[Any], Tensor]
WAYS = ("eager", "torch.compile", "predicted", "measured")


@dataclass(frozen=True)
class Setting:
    """The options with which a model is made."""

    tiny: bool
    layers: int | None
    dropout: bool
    device: str

    def of(self, full: int, small: int) -> int:
        """An extent: `small` for tiny models, else `full`."""
        return small if self.tiny else full

    def depth(self, full: int) -> int:
        """The number of layers; `full` if it is not limited."""
        return min(full, self.layers or (2 if self.tiny else full))

    def ids(self, vocabulary: int, *shape: int) -> Tensor:
        """Random tokens of this shape."""
        return torch.randint(1, vocabulary, shape, device=self.device)


def bert(at: Setting) -> tuple[nn.Module, Loss]:
    """BERT-large, masked language model, 32 sequences of 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    drops = {} if at.dropout else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    width, vocabulary = at.of(1024, 64), at.of(30522, 500)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=at.depth(24),
        num_attention_heads=width // 64 if not at.tiny else 2,
        intermediate_size=4 * width,
        **drops,
    )
    ids = at.ids(vocabulary, at.of(32, 2), at.of(512, 32))
    return BertForMaskedLM(config), lambda model: model(input_ids=ids, labels=ids).loss


def vit(at: Setting) -> tuple[nn.Module, Loss]:
    """ViT-L/14, 1000 classes, 64 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    width, side = at.of(1024, 64), at.of(224, 56)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=at.depth(24),
        num_attention_heads=width // 64 if not at.tiny else 2,
        intermediate_size=4 * width,
        image_size=side,
        patch_size=14,
        num_labels=at.of(1000, 16),
    )
    count = at.of(64, 2)
    images = torch.randn(count, 3, side, side, device=at.device)
    labels = torch.randint(0, at.of(1000, 16), (count,), device=at.device)
    return ViTForImageClassification(config), lambda model: model(pixel_values=images, labels=labels).loss


def gpt2(at: Setting) -> tuple[nn.Module, Loss]:
    """GPT-2 medium, 16 sequences of 1024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {} if at.dropout else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    vocabulary, length = at.of(50257, 500), at.of(1024, 32)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=at.of(1024, 64),
        n_layer=at.depth(24),
        n_head=at.of(16, 2),
        n_positions=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **drops,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # without it the model logs a warning, which breaks the graph
    ids = at.ids(vocabulary, at.of(16, 2), length)
    return model, lambda model: model(input_ids=ids, labels=ids).loss


def llama(at: Setting) -> tuple[nn.Module, Loss]:
    """A Llama of width 2048, 8192 in the MLP, 16 layers, 4 sequences of 2048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, length = at.of(32000, 500), at.of(2048, 32)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=at.of(2048, 64),
        num_hidden_layers=at.depth(16),
        num_attention_heads=at.of(32, 4),
        num_key_value_heads=at.of(8, 2),
        intermediate_size=at.of(8192, 176),
        max_position_embeddings=length,
        use_cache=False,
    )
    ids = at.ids(vocabulary, at.of(4, 2), length)
    return LlamaForCausalLM(config), lambda model: model(input_ids=ids, labels=ids).loss


def xmlcnn(at: Setting) -> tuple[nn.Module, Loss]:
    """The classifier of XML-CNN: pooled features of convolutions, a hidden layer, a loss for each label."""
    features, labels, count = at.of(4096, 128), at.of(131072, 1024), at.of(1024, 32)
    hidden = at.of(512, 64)
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, labels))
    x = torch.randn(count, features, device=at.device)
    target = (torch.rand(count, labels, device=at.device) < 1e-3).float()
    return model, lambda model: nn.functional.binary_cross_entropy_with_logits(model(x), target)


def mlp(at: Setting) -> tuple[nn.Module, Loss]:
    """MLP blocks of 4096 to 14336 to 4096 with gelu, 2 unless --layers is less; 4096 tokens."""
    width, inner = at.of(4096, 64), at.of(14336, 224)
    blocks = [(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(at.depth(2))]
    x = torch.randn(at.of(4096, 64), width, device=at.device)
    return nn.Sequential(*(each for block in blocks for each in block)), lambda model: model(x).square().mean()


MODELS: dict[str, Callable[[Setting], tuple[nn.Module, Loss]]] = {
    each.__name__: each for each in (mlp, xmlcnn, bert, vit, gpt2, llama, *FURTHER)
}


# --- one model --------------------------------------------------------------------------------------------------------


class Runs:
    """The runs of one model in each way. The results, `found`, are saved after each figure."""

    def __init__(self, name: str, at: Setting, path: Path) -> None:
        torch.manual_seed(0)
        self.at, self.path = at, path
        self.model, self.loss = MODELS[name](at)
        self.model.to(at.device).train()
        self.steps: dict[str, Any] = {}
        self.found: dict[str, Any] = {
            **machine(at.device),
            "model": name,
            "about": MODELS[name].__doc__,
            "layers": at.layers,
            "dropout": at.dropout,
            "parameters": sum(each.numel() for each in self.model.parameters()),
            "ways": {},
        }

    def save(self) -> None:
        """Write the results so that the file is never incomplete."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)

    def step(self, way: str) -> Tensor:
        """Run forward and backward. Return the loss."""
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.at.device, torch.bfloat16):
            loss = self.loss(self.steps[way])
        loss.backward()
        return loss

    def start(self, way: str) -> None:
        """Compile, and run two steps."""
        from torch._inductor import metrics

        metrics.reset()
        torch._dynamo.utils.counters.clear()
        begun = time.perf_counter()
        self.steps[way] = self._compiled(way)
        for _ in range(2):
            loss = self.step(way)
        _wait(self.at.device)
        found: dict[str, Any] = {"cold_seconds": time.perf_counter() - begun, "loss": loss.item()}
        found["graph_breaks"] = dict(torch._dynamo.utils.counters["graph_break"])
        if way in ("torch.compile", "predicted"):  # measuring sites compiles more kernels
            found["inductor_bytes"] = metrics.num_bytes_accessed
        if way in ("predicted", "measured"):
            report = ef.report(self.steps[way])
            found["products"], found["fused"] = len(report.rows), len(report.fused)
            found["report"] = str(report)
            found["rows"] = [_row(row) for row in report.rows]
        self.found["ways"][way] = found
        self.save()

    def _compiled(self, way: str) -> Any:
        if way == "eager":
            return self.model
        if way == "torch.compile":
            return torch.compile(self.model)
        return ef.compile(self.model, measure=way == "measured")

    def peaks(self) -> None:
        """Measure the peak memory of a step of each way."""
        for way, found in self.found["ways"].items() if self.at.device == "cuda" else ():
            torch.cuda.empty_cache()
            self.step(way)
            torch.cuda.reset_peak_memory_stats()
            self.step(way)
            _wait(self.at.device)
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        self.save()

    def kernel_times(self, rounds: int = 5) -> None:
        """Measure the kernel time of a step of each way, interleaved, because clocks fall as a GPU gets warm."""
        sums: dict[str, list[float]] = {way: [] for way in self.found["ways"]}
        drawn = random.Random(0)
        for _ in range(rounds):
            for way in drawn.sample(list(sums), len(sums)):
                found = kernels(lambda way=way: self.step(way), self.at.device, steps=1)
                sums[way].append(found["running_ms"])
                self.found["ways"][way]["kernels"] = found
        for way, all_ in sums.items():
            self.found["ways"][way].update(kernel_ms=statistics.median(all_), all_kernel_ms=[round(x, 3) for x in all_])
        self.save()

    def time(self, rounds: int) -> None:
        """Measure the milliseconds of a step of each way, interleaved."""
        taken: dict[str, list[float]] = {way: [] for way in self.found["ways"]}
        drawn = random.Random(0)
        for round_ in range(2 + rounds):
            for way in drawn.sample(list(taken), len(taken)):
                milliseconds = self._milliseconds(way)
                if round_ >= 2:
                    taken[way].append(milliseconds)
        for way, all_ in taken.items():
            self.found["ways"][way].update(ms=statistics.median(all_), all_ms=[round(each, 3) for each in all_])
        self.save()

    def _milliseconds(self, way: str) -> float:
        _wait(self.at.device)
        if self.at.device != "cuda":
            begun = time.perf_counter()
            self.step(way)
            return 1e3 * (time.perf_counter() - begun)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.step(way)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    def bounds(self) -> None:
        """Compute the least times that memory and multiprocessors allow."""
        from torch.utils.flop_counter import FlopCounterMode

        # PyTorch 2.11 does not count attention whose keys have fewer heads than its queries.
        with contextlib.suppress(AssertionError), FlopCounterMode(display=False) as counter:
            self.step("eager")
            self.found["operations"] = counter.get_total_flops()
        with contextlib.suppress(ImportError, AttributeError):  # missing in another version of epifuse
            from epifuse.base.target import target_of

            rates = target_of(self.at.device).processor
            self.found["rates"] = rates._asdict()
            bounds = {}
            if "operations" in self.found:
                bounds["products_ms"] = 1e3 * self.found["operations"] / rates.operations_a_second
            for way, found in self.found["ways"].items():
                if "inductor_bytes" in found:
                    bounds[f"{way}_bytes_ms"] = 1e3 * found["inductor_bytes"] / rates.bytes_a_second
            self.found["bounds"] = bounds
        self.save()


def _row(row: Any) -> dict[str, Any]:
    measured = getattr(row, "measured", None)
    names = ("graph", "name", "operation", "shape", "k", "taken", "reason", "outputs", "bytes_saved", "seconds_saved")
    return {
        **{name: getattr(row, name) for name in names},
        "plan": row.plan,
        "dtype": str(row.dtype),
        "measured": measured and measured._asdict(),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


_KINDS = {
    "epifuse": ("epifuse", "sm90_gemm", "cutedsl", "kernel_cutlass"),
    "triton reduction": ("triton_red", "triton_per"),
    "triton pointwise": ("triton_poi",),
    "triton": ("triton",),
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn"),
    "product": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "copy": ("memcpy", "memset"),
}


def kind_of(name: str) -> str:
    """The kind of a kernel, a key of `_KINDS` or "other", by its name."""
    low = name.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in low for word in words)), "other")


def kernels(step: Callable[[], Any], device: str, steps: int) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, the longest kernels, and the time in which at least one runs."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    step()
    with profile(activities=[activity]) as profiled:
        for _ in range(steps):
            step()
        _wait(device)
    kinds: collections.Counter[str] = collections.Counter()
    longest = []
    for event in profiled.key_averages():
        own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if own > 0:
            kinds[kind_of(event.key)] += own / 1e3 / steps
            longest.append((round(own / 1e3 / steps, 4), event.count / steps, event.key[:160]))
    longest.sort(reverse=True)
    ran = (x for x in profiled.events() if x.device_type.name == device.upper() and not x.is_user_annotation)
    running = covered((x.time_range.start, x.time_range.end) for x in ran) / 1e3 / steps
    return {"kinds": dict(kinds), "longest": longest[:40], "running_ms": running}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The total length that lies in at least one of the spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def run_one(name: str, at: Setting, ways: Sequence[str], rounds: int, path: Path, *, cold: bool) -> None:
    """Measure all figures of one model. If a way fails, the reason is saved, and the other ways go on."""
    from torch._inductor import config

    if not cold:  # if PyTorch found a graph on disk, epifuse's pass would not run
        config.fx_graph_cache = False
        torch._functorch.config.enable_autograd_cache = False
        _count_bytes()
    torch.set_float32_matmul_precision("high")
    runs = Runs(name, at, path)
    with contextlib.suppress(Exception):
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=at.device))  # imports the compiler, starts its pool
    for way in ways:
        try:
            runs.start(way)
        except Exception as error:
            runs.steps.pop(way, None)
            runs.found.setdefault("failed", {})[way] = f"{type(error).__name__}: {error}"[:2000]
            runs.found["failed"][f"{way} at"] = traceback.format_exc()[-2000:]
            runs.save()
    runs.found["ways"] = {way: found for way, found in runs.found["ways"].items() if way in runs.steps}
    figures = [lambda: runs.time(rounds), runs.peaks, runs.kernel_times, *[runs.bounds] * ("eager" in runs.steps)]
    for figure in () if cold else figures:
        try:
            figure()
        except Exception:  # one figure may not fit in memory: the traceback is saved as "failed", beside the others
            runs.found.setdefault("failed", {})[str(figure)] = traceback.format_exc()[-2000:]
            runs.save()


def _count_bytes() -> None:
    """Make Inductor count the bytes that its kernels read and write. It does so only if its log of metrics is on."""
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.setLevel(logging.INFO)
    log.addHandler(logging.NullHandler())
    log.propagate = False


# --- all models -------------------------------------------------------------------------------------------------------


def in_a_process(name: str, options: argparse.Namespace) -> None:
    """Run one model in another process; with --cold, each way in two processes."""
    runs = [(f"{name}", [])]
    if options.cold:
        runs = [(f"{name}_{way}_{again}", ["--ways", way]) for way in options.ways for again in ("cold", "again")]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for index, (file, further) in enumerate(runs):
            caches = Path(folder) / str(index // 2)
            said = _run(
                [sys.executable, __file__, *sys.argv[1:], *further, "--one", name, "--file", file],
                caches,
                options.limit,
            )
            path = options.save / f"{file}.json"
            if said:
                print(f"{file}: {said}", flush=True)
            if path.exists():
                show(file, json.loads(path.read_text()))


def _run(arguments: Sequence[str], caches: Path, limit: float) -> str:
    """Run a process, which is ended after `limit` seconds. Return why it failed, or the empty string."""
    own = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    environment = {**os.environ, **own, "EPIFUSE_CACHE_DIR": f"{caches}/epifuse"}
    child = subprocess.Popen(arguments, env=environment, start_new_session=True)
    try:
        status = child.wait(limit)
        return "" if status == 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # its process group includes the compilers that it started
        child.wait()
        return f"ended after {limit} s"


def show(name: str, found: dict[str, Any]) -> None:
    """Print one line for each way."""
    for way, one in found["ways"].items():
        fused = f", {one['fused']} of {one['products']} fused" if "fused" in one else ""
        peak = f", peak {one['peak_bytes'] / 2**30:.2f} GiB" if "peak_bytes" in one else ""
        time_ = f"{one['ms']:9.2f} ms" if "ms" in one else " " * 12
        sum_ = f", kernels {one['kernel_ms']:9.2f} ms" if "kernel_ms" in one else ""
        print(f"{name:12} {way:14}{time_}{sum_}{peak}, cold {one['cold_seconds']:.1f} s{fused}", flush=True)
    for way, why in found.get("failed", {}).items():
        print(f"{name:12} {way}: {why[:400]}", flush=True)


def main() -> int:
    """Run every model in its own process; in such a process, run its model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--layers", type=int, help="at most so many")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=300, help="seconds of a model")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, required=True, help="a folder")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.save.mkdir(parents=True, exist_ok=True)
    if options.one:
        at = Setting(options.tiny, options.layers, not options.no_dropout, options.device)
        path = options.save / f"{options.file}.json"
        run_one(options.one, at, options.ways, options.rounds, path, cold=options.cold)
        return 0
    for name in options.models:
        in_a_process(name, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
