"""Random numbers: those of TorchInductor bit for bit, in every kernel, differentiated, and in compiled models."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor

import epifuse as ef
from epifuse.base.config import Config
from epifuse.providers.cpu import native, toolchain
from epifuse.providers.cpu.emit_cpp import LANES

SEEDS = (0, 42, -1, 1 << 62, 0x7123456789ABCDEF, 0x80000000)
NUMBERS = {"philox_rand": ef.philox_rand, "philox_rand_cpp": ef.philox_rand_cpp}


def words(seed: int, positions: Any) -> Any:
    """Philox 4x32-10 in numpy's unsigned integers: the first words of the counters (position, 0, 0, 0)."""
    wide, factors = np.uint64, (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    counter = [positions.astype(wide), *[np.zeros(positions.shape, wide)] * 3]
    for _ in range(10):
        low, high = ([counter[i] * f & wide(0xFFFFFFFF) for i, f in zip((0, 2), factors, strict=True)],
                     [counter[i] * f >> wide(32) for i, f in zip((0, 2), factors, strict=True)])  # fmt: skip
        counter = [high[1] ^ counter[1] ^ wide(key[0]), low[1], high[0] ^ counter[3] ^ wide(key[1]), low[0]]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return counter[0].astype(np.uint32)


@pytest.mark.parametrize("seed", SEEDS)
def test_tritons_numbers(seed: int) -> None:
    """`tl.rand` of triton/language/random.py: a negative word is folded, and all are scaled."""
    signed = words(seed, np.arange(5000)).view(np.int32)
    want = np.where(signed < 0, -signed - 1, signed).astype(np.float32) * np.float32(4.6566127342e-10)
    assert (ef.philox_rand(torch.tensor(seed), torch.arange(5000)).numpy() == want).all()
    assert ef.philox_rand(seed, 77) == want[77]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_numbers_of_inductors_cpp() -> None:
    from torch._inductor import inductor_prims

    @torch.compile
    def drawn(seeds: Tensor) -> list[Tensor]:
        return [
            inductor_prims.random([37, 129], inductor_prims.lookup_seed(seeds, i), "rand") for i in range(len(SEEDS))
        ]

    for seed, want in zip(SEEDS, drawn(torch.tensor(SEEDS)), strict=True):
        assert torch.equal(ef.philox_rand_cpp(seed, ef.linear_index(want)), want)


@pytest.mark.parametrize(
    "seed", [1 << 63, -(1 << 63) - 1, 1.5, True, torch.tensor(3.0), torch.tensor(3, dtype=torch.uint64)]
)
def test_the_reference_refuses_the_seeds_that_kernels_refuse(seed: Any) -> None:
    def epilogue(accum: Any, seed: Any) -> Any:
        return ef.dropout(accum, 0.5, seed)

    x = torch.eye(4)
    for call in (lambda: ef.gemm(x, x, epilogue=epilogue, seed=seed), lambda: ef.reference(epilogue)(x, seed)):
        with pytest.raises(ef.errors.EpifuseError):
            call()


# --- kernels ---------------------------------------------------------------------------------------------------------

KERNELS = ["cpu_panel"]
if torch.backends.cpu.get_cpu_capability() in LANES and toolchain.missing() is None:
    KERNELS.append("cpu_native")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("shape", [(300, 523), (3, 40, 33)], ids=str)
def test_kernels_draw_the_same(kernel: str, name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CONFIG", Config(native_elements=0))
    a, b = torch.zeros(*shape[:-1], 4), torch.zeros(*shape[:-2], 4, shape[-1])
    source = f"def epi(accum, seed): D = accum + {name}(seed, linear_index(accum)); return D"
    for seed in (SEEDS[4], torch.tensor([SEEDS[3] + 5])):
        args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(source, {"seed": seed}))
        (found,) = ef.get_kernels(args, metadata_filter=lambda metadata: metadata.kernel_name == kernel)
        assert torch.equal(found.run(args)["D"], NUMBERS[name](seed, ef.linear_index(torch.empty(shape))))


def test_fragments_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a GPU on numpy's arrays, which stand for CuTe DSL's fragments."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency")
    from types import SimpleNamespace

    from epifuse.providers.cutedsl import random_math

    class Fragment(np.ndarray):
        def to(self, dtype: Any) -> Any:
            return self.astype(dtype)

    def full_like(x: Any, value: int, dtype: Any = None) -> Any:
        return np.full(x.shape, value, dtype or x.dtype).view(Fragment)

    def where(*values: Any) -> Any:
        return np.where(*values).view(Fragment)

    monkeypatch.setattr(random_math, "cute", SimpleNamespace(full_like=full_like, where=where))
    monkeypatch.setattr(random_math, "reinterpreted", lambda x, dtype: x.view(dtype))
    for name in ("Float32", "Int32", "Int64", "Uint32", "Uint64"):
        monkeypatch.setattr(random_math, name, getattr(np, name.lower()))
    index = np.arange(2000, dtype=np.int32).view(Fragment)
    for seed in SEEDS:
        for name, numbers in NUMBERS.items():
            with np.errstate(over="ignore"):
                found = getattr(random_math, name)(np.full(2000, seed, np.int64).view(Fragment), index)
            want = numbers(seed, torch.arange(2000)).numpy()
            assert (np.asarray(found, np.float32) == want).all()


# --- dropout ---------------------------------------------------------------------------------------------------------


def dropped(accum: Tensor, bias: Tensor, seed: Tensor, p: float) -> Tensor:
    D = ef.dropout(ef.gelu(accum + bias), p, seed)
    return D


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_dropout_is_differentiated_with_the_mask_it_drew(batch: tuple[int, ...]) -> None:
    a, b = (torch.randn(*batch, *shape, dtype=torch.float64, requires_grad=True) for shape in ((12, 5), (5, 9)))
    bias, seed = torch.randn(9, dtype=torch.float64, requires_grad=True), torch.tensor([SEEDS[4]])

    def function(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return ef.gemm(a, b, epilogue=dropped, bias=bias, seed=seed, p=0.25)

    out = function(a, b, bias)
    zero = ef.philox_rand(seed, ef.linear_index(out)) <= 0.25
    assert torch.equal(out == 0, zero)
    assert zero.any()
    assert not zero.all()
    gradient = torch.randn_like(out)
    plain = torch.nn.functional.gelu(a @ b + bias) * ~zero / 0.75
    want = torch.autograd.grad(plain, (a, b, bias), gradient)
    torch.testing.assert_close(torch.autograd.grad(out, (a, b, bias), gradient), want)


def test_dropout_is_compiled_and_batched_with_the_same_mask() -> None:
    a, b, bias, seed = torch.randn(24, 8), torch.randn(8, 32), torch.randn(32), torch.tensor(9)

    def function(a: Tensor) -> Tensor:
        return ef.gemm(a, b, epilogue=dropped, bias=bias, seed=seed, p=0.25)

    want = function(a) == 0
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(a) == 0, want)
    assert all(torch.equal(each == 0, want) for each in torch.vmap(function)(torch.stack([a, a])))


@pytest.mark.parametrize("p", [1, 1.5, -0.1])
def test_a_probability_is_less_than_one(p: float) -> None:
    with pytest.raises(ef.errors.EpifuseError, match=r"in \[0, 1\)"):
        ef.gemm(torch.ones(4, 4), torch.ones(4, 4), epilogue=dropped, bias=torch.ones(4), seed=3, p=p)
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        ef.dropout(torch.ones(4), p, 3)


class Layer(nn.Module):
    """As little as has a dropout to take: each kernel of Inductor's takes g++ 6 s."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(x), 0.1, training=True)  # type: ignore[no-any-return]  # untyped


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dropout_matches_inductor_and_stores_no_mask() -> None:
    torch.manual_seed(0)
    model, x, to = Layer(), torch.randn(4, 32, 64), torch.randn(4, 32, 64)

    def step(function: Any, kept: list[Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            loss = (function(x) * to).sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    saved: dict[str, list[Tensor]] = {"stored": [], "drawn": []}
    want = step(torch.compile(model), saved["stored"])
    fused = ef.compile(model, sites="all", masks="drawn")
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):  # as the pass is to run
        got = step(fused, saved["drawn"])
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert {name: any(t.dtype == torch.bool for t in kept) for name, kept in saved.items()} == {
        "stored": True,
        "drawn": False,
    }
    drawn = {row.graph for row in ef.report(fused).rows if any("inductor_random" in each for each in row.taken)}
    assert "forward" in drawn
