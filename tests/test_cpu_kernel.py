"""The CPU kernel: every input and output dtype, panels, memory, repeatability, threads."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import epifuse as ef
from epifuse.base.dtypes import ACCUMULATORS, BY_TORCH

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MIXED = [(torch.int8, torch.uint8), (torch.uint8, torch.int8), FP8, FP8[::-1]]
PAIRS = [(dtype, dtype) for dtype in ACCUMULATORS] + MIXED
OUTPUTS = list(BY_TORCH)


def small(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in every dtype."""
    low = 0 if dtype == torch.uint8 else -3
    return torch.randint(low, 4, shape).float().to(dtype)


def meaning(source: str) -> Any:
    namespace: dict[str, Any] = {name: getattr(ef, name) for name in ef.__all__}
    exec(source, namespace)
    return namespace["epi"]


# --- dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a_type", "b_type"), PAIRS)
@pytest.mark.parametrize("shape", [(5, 7, 3), (130, 33, 70)])
def test_inputs(a_type: torch.dtype, b_type: torch.dtype, shape: tuple[int, ...]) -> None:
    M, N, K = shape
    for accumulator in set(ACCUMULATORS[a_type]) & set(ACCUMULATORS[b_type]):
        a, b = small((M, K), a_type), small((K, N), b_type)
        D = ef.gemm(a, b, accumulator_type=accumulator, out_dtypes=torch.float64)
        assert torch.equal(D, a.double() @ b.double())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integer_products_are_exact_where_float32_is_not(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    K = 5000  # 5000 * 255 * 255 is far above 2**24
    a, b = torch.full((3, K), limits.max, dtype=dtype), torch.full((K, 2), limits.max, dtype=dtype)
    a[:, 0] = 1
    b[:, 1] = limits.min
    assert torch.equal(ef.gemm(a, b), (a.long() @ b.long()).int())


@pytest.mark.parametrize("dtype", OUTPUTS)
def test_outputs(dtype: torch.dtype) -> None:
    """Allocated, and given with holes between its elements, which stay as they were."""
    a, b = small((37, 5), torch.float32), small((5, 11), torch.float32)
    want = (a @ b).clamp(0, 100) if dtype in (torch.uint8, torch.bool) else (a @ b)
    source = "def epi(accum): D = maximum(accum, 0); return D" if dtype in (torch.uint8, torch.bool) else None
    assert torch.equal(ef.gemm(a, b, epilogue=source, out_dtypes=dtype).double(), want.to(dtype).double())
    held = torch.full((37, 23), 1.0).to(dtype)
    ef.gemm(a, b, epilogue=source, out=held[:, 1::2])
    assert torch.equal(held[:, 1::2].double(), want.to(dtype).double())
    assert torch.equal(held[:, ::2].double(), torch.ones(37, 12, dtype=torch.float64))


@pytest.mark.parametrize(
    ("a_type", "expected"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int8, torch.int32),
        (torch.uint8, torch.int32),
        *((dtype, torch.float32) for dtype in FP8),
    ],
)
def test_default_output_dtypes(a_type: torch.dtype, expected: torch.dtype) -> None:
    r = ef.gemm(
        small((4, 3), a_type),
        small((3, 5), a_type),
        epilogue="def epi(accum): D = accum; m = accum > 0; s = sum(accum); return D, m, s",
    )
    assert r.D.dtype == expected
    assert r.m.dtype == torch.bool
    assert r.s.dtype == {torch.float64: torch.float64, torch.int32: torch.int64}.get(expected, torch.float32)


def test_the_epilogue_computes_in_float32() -> None:
    """Not in D's dtype: 2049 does not exist in float16."""
    a, b = torch.full((3, 2049), 1.0, dtype=torch.float16), torch.ones(2049, 2, dtype=torch.float16)
    D = ef.gemm(a, b, epilogue="def epi(accum): D = accum - 2048; return D")
    assert torch.equal(D, torch.ones(3, 2, dtype=torch.float16))


# --- panels -----------------------------------------------------------------------------------------------------

EPILOGUES = [
    "def epi(accum, C, r, c): D = accum * 2; return D",
    "def epi(accum, C, r, c): D = accum * 2; return D, accum",
    "def epi(accum, C, r, c): D = accum * 2; s = sum(accum); return D, s",
    "def epi(accum, C, r, c): E = accum + C; D = accum * E; F = accum - E; return D, E, F",
    "def epi(accum, C, r, c): D = relu(accum * c + r) - C; s = sum(accum, dim=-1); return D, s",
    "def epi(accum, C, r, c): D = accum - accum.amax(dim=-1, keepdim=True); return D",
    "def epi(accum, C, r, c): D = accum - accum.amax(dim=-2, keepdim=True); s = amax(D); return D, s",
    "def epi(accum, C, r, c): t = accum - accum.sum() ; D = t * t.amin(); u = sum(r * 2); return D, u",
    "def epi(accum, C, r, c): D = index_m(accum) * 3 - index_n(accum) + accum; return D",
]
TILES = [None, (1, 1), (4, 8), (7, 13), (64, 64), (1000, 1000)]


@pytest.mark.parametrize("source", EPILOGUES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_tile_does_not_change_the_result(source: str, batch: tuple[int, ...]) -> None:
    M, N, K = 19, 37, 6
    a, b = small((*batch, M, K), torch.float32), small((*batch, K, N), torch.float32)
    given = {"C": small((M, N), torch.float32), "r": small((N,), torch.float32), "c": small((M, 1), torch.float32)}
    want = meaning(source)(a @ b, **given)
    want = want if isinstance(want, tuple) else (want,)
    ran = 0
    for tile in TILES:
        arguments = ef.GemmArguments(
            a, b, epilogue=ef.EpilogueArguments.partial(source, given), constraints=ef.Constraints(tile=tile)
        )
        if kernels := ef.get_kernels(arguments):
            ran += 1
            for got, right in zip(kernels[0].run(arguments).values(), want, strict=True):
                assert torch.equal(got, right)
        else:
            assert any("whole rows" in refusal.reason for refusal in ef.explain(arguments).refusals)
    assert ran > 1


@pytest.mark.parametrize("extents", [(0, 5, 3), (5, 0, 3), (5, 7, 0), (1, 1, 1), (1, 7, 3), (7, 1, 3), (0, 0, 0)])
@pytest.mark.parametrize("batch", [None, 0, 1, 2])
def test_extents_of_zero_and_one(extents: tuple[int, ...], batch: int | None) -> None:
    M, N, K = extents
    lead = () if batch is None else (batch,)
    a, b = torch.ones(*lead, M, K), torch.ones(*lead, K, N)
    source = "def epi(accum, r): D = accum * 2 + r; s = sum(D); q = sum(D, dim=-1); return D, s, q"
    r = torch.ones(N)
    for got, want in zip(ef.gemm(a, b, epilogue=source, r=r), meaning(source)(a @ b, r), strict=True):
        assert got.shape == want.shape
        assert torch.equal(got, want)


@pytest.mark.parametrize("M", [3, 700])
def test_without_a_batch_other_values_are_computed(M: int) -> None:
    """In memory that is filled with NaN before, where PyTorch is asked to be deterministic."""
    K, N = 5, 70
    a, b, C = torch.ones(0, M, K), torch.ones(K, N), small((M, N), torch.float32)
    source = """def epi(accum, C):
        D = accum * C
        s = accum.sum(0) + C
        e = accum.logsumexp(0, keepdim=True) * 2.0
        q = C.sum()
        r = C.sum(dim=-1)
        return D, s, e, q, r"""
    torch.use_deterministic_algorithms(True)
    try:
        found = ef.gemm(a, b, epilogue=source, C=C)
    finally:
        torch.use_deterministic_algorithms(False)
    for got, want in zip(found, meaning(source)(a @ b, C), strict=True):
        assert got.shape == want.shape
        assert torch.equal(got, want)


@pytest.mark.parametrize(("a_batch", "b_batch"), list(itertools.product([(), (1,), (3,)], repeat=2)))
def test_batches_broadcast(a_batch: tuple[int, ...], b_batch: tuple[int, ...]) -> None:
    a, b = small((*a_batch, 9, 4), torch.float32), small((*b_batch, 4, 5), torch.float32)
    assert torch.equal(ef.gemm(a, b), a @ b)


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x
    yield x.mT.contiguous().mT
    yield torch.zeros(*x.shape[:-1], 3 * x.shape[-1], dtype=x.dtype)[..., 1::3].copy_(x)
    yield x[:1].expand(x.shape)
    yield torch.cat([x, x], 0)[: x.shape[0]]


def test_any_stride_at_all() -> None:
    source = "def epi(accum, C): D = accum - C; s = sum(D, dim=0); return D, s"
    a0, b0, c0 = small((2, 9, 6), torch.float32), small((2, 6, 7), torch.float32), small((2, 9, 7), torch.float32)
    for a, b, c in itertools.product(layouts(a0), layouts(b0), layouts(c0)):
        D = torch.zeros(7, 9, 4).permute(2, 1, 0)[::2]
        got = ef.gemm(a, b, epilogue=source, C=c, out={"D": D})
        want = meaning(source)(a @ b, c)
        assert got.D is D
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite(value: float) -> None:
    a, b = small((9, 4), torch.float32), small((4, 7), torch.float32)
    a[8, 3] = value
    source = "def epi(accum): D = relu(accum); E = where(accum > 1, accum, 0.0); F = sign(accum); return D, E, F"
    for got, want in zip(ef.gemm(a, b, epilogue=source), meaning(source)(a @ b), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_store_saturates_what_is_not_finite() -> None:
    a, b = torch.tensor([[torch.nan], [torch.inf], [-torch.inf], [300.0], [2.5], [3.5]]), torch.ones(1, 1)
    assert ef.gemm(a, b, out_dtypes=torch.int8).flatten().tolist() == [0, 127, -128, 127, 2, 4]
    e4m3 = ef.gemm(a, b, out_dtypes=torch.float8_e4m3fn).float().flatten()
    assert e4m3[0].isnan()
    assert e4m3[1:].tolist() == [448.0, -448.0, 288.0, 2.5, 3.5]


# --- memory -----------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes that operations made, largest first; a view makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage().data_ptr() for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


SWEEPS = {
    "one sweep": "def epi(accum, C, x): D = silu(accum + C) * gelu(accum - C) + x; s = sum(D); return D, s",
    "rows": "def epi(accum, C, x): D = softmax(accum + C, dim=-1) * x; return D",
    "two sweeps": "def epi(accum, C, x): t = exp(accum - C); D = t / sum(t) * x; return D",
    "three sweeps": "def epi(accum, C, x): t = accum - mean(accum, dim=0); D = t / norm(t) + C * x; return D",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", SWEEPS.values(), ids=SWEEPS)
def test_no_full_size_intermediate(source: str, dtype: torch.dtype) -> None:
    """Neither the accumulator nor any value of the epilogue exists as a whole: only panels are ever made."""
    M, N, K = 4096, 1024, 16
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    C, x, D = torch.randn(M, N).to(dtype), torch.randn(N), torch.empty(M, N, dtype=dtype)
    arguments = ef.GemmArguments(
        a,
        b,
        out=D,
        epilogue=ef.EpilogueArguments(
            source, C=C, x=x, D=D, **({"s": torch.empty(())} if "return D, s" in source else {})
        ),
    )
    step = ef.get_kernels(arguments)[0].bind(arguments)
    with Allocations() as made:
        step()
    assert made.largest <= M * N * 4 / 6, "a panel is a few megabytes of float32; the whole is sixteen"
    right = meaning(source)(a.float() @ b.float(), C.float(), x)
    torch.testing.assert_close(D, (right[0] if isinstance(right, tuple) else right).to(dtype), rtol=2e-2, atol=1e-2)


def test_the_counter_of_allocations_counts() -> None:
    x = torch.ones(100, 100)
    with Allocations() as made:
        x.view(-1).add_(1)
    assert made.largest == 0
    with Allocations() as made:
        x + 1
    assert made.largest == 40_000


# --- the same result every time ---------------------------------------------------------------------------------

BUSY = """
def epi(accum, C):
    D = silu(accum + C)
    s = sum(D)
    r = logsumexp(accum, dim=-1)
    c = mean(D, dim=0)
    return D, s, r, c
"""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_bits_every_run(dtype: torch.dtype) -> None:
    a, b, C = (torch.randn(shape).to(dtype) for shape in ((301, 67), (67, 203), (301, 203)))
    first = ef.gemm(a, b, epilogue=BUSY, C=C)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(first, ef.gemm(a, b, epilogue=BUSY, C=C), strict=True))


@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_threads(count: int) -> None:
    """On exact data, to the last bit; else rounding may differ, since torch's own GEMM splits K by threads."""
    a, b, C = (small(shape, torch.float32) for shape in ((301, 67), (67, 203), (301, 203)))
    source = "def epi(accum, C): D = relu(accum + C); s = sum(D); c = amax(D, dim=0); E = D - s; return D, s, c, E"
    with threads(1):
        one = ef.gemm(a, b, epilogue=source, C=C)
    with threads(count):
        many = ef.gemm(a, b, epilogue=source, C=C)
    assert all(torch.equal(x, y) for x, y in zip(one, many, strict=True))


def test_two_threads_share_a_kernel() -> None:
    """A kernel holds no tensor: each launch has buffers of its own."""
    inputs = [(small((150, 9), torch.float32), small((9, 70), torch.float32), float(i)) for i in range(8)]
    source = "def epi(accum, s): t = accum * s; D = t - sum(t, dim=0); return D"
    wrong: list[int] = []

    def work(turn: int) -> None:
        for i in range(40):
            a, b, s = inputs[(i * (turn + 1)) % len(inputs)]
            t = (a @ b) * s
            if not torch.equal(ef.gemm(a, b, epilogue=source, s=s), t - t.sum(0)):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# --- bound steps ------------------------------------------------------------------------------------------------

STEPPED = """
def epi(accum, C, r, k):
    t = gelu(accum * k + r) + C
    D = t - mean(t, dim=0)
    E = softmax(t, dim=-1)
    s = sum(t * t)
    q = logsumexp(accum, dim=-1)
    return D, E, s, q
"""
SMALL, LARGE = (24, 8, 16), (300, 8, 400)


def stepped(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, *, inference: bool = False
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A step of every kind of instruction, and all that it reads; bound in inference mode where asked for."""
    M, K, N = shape
    given = {"C": torch.randn(M, N).to(dtype), "r": torch.randn(N).to(dtype), "k": torch.randn(1)}
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    outputs = {"D": torch.empty(M, N), "E": torch.empty(M, N), "s": torch.empty(()), "q": torch.empty(M)}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(STEPPED, **given, **outputs))
    with torch.inference_mode(inference):
        return ef.get_kernels(args)[0].bind(args), {"a": a, "b": b, **given}


def close(got: dict[str, torch.Tensor], read: dict[str, torch.Tensor]) -> bool:
    a, b, C, r, k = (read[name].float() for name in ("a", "b", "C", "r", "k"))
    want = meaning(STEPPED)(a @ b, C, r, k)
    return all(torch.allclose(x, y, rtol=1e-3, atol=1e-3) for x, y in zip(got.values(), want, strict=True))


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_step_reads_what_its_tensors_hold_at_each_launch(shape: tuple[int, int, int]) -> None:
    """Nothing is left of the launch before: converted operands, running sums and maxima are made anew."""
    step, read = stepped(shape)
    for turn in range(4):
        for name in ("a", "b", "C", "r"):
            read[name].copy_(torch.randn(read[name].shape) * (3 - turn))
        assert close(step(), read)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("bound_so", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_step_runs_in_and_outside_inference_mode(shape: tuple[int, int, int], bound_so: bool, first: bool) -> None:
    step, read = stepped(shape, inference=bound_so)
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            assert close(step(), read)


def test_a_step_leaves_grad_mode_as_it_was() -> None:
    a, b = (torch.nn.Parameter(small(shape, torch.float32)) for shape in ((5, 3), (3, 4)))
    C = torch.nn.Parameter(small((5, 4), torch.float32))
    with torch.no_grad():
        args = ef.GemmArguments(
            a,
            b,
            torch.empty(5, 4),
            epilogue=ef.EpilogueArguments.partial("def epi(accum, C): D = accum - C; return D", {"C": C}),
        )
        step = ef.get_kernels(args)[0].bind(args)
        assert torch.equal(step()["D"], a @ b - C)
        assert not torch.is_grad_enabled()
    assert torch.equal(step()["D"], a @ b - C)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_threads_may_launch_one_step_at_once(shape: tuple[int, int, int]) -> None:
    """Each launch has buffers of its own: what all of them write is the same."""
    step, read = stepped(shape)
    step()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                step()
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed
    assert close(step(), read)


@pytest.mark.parametrize(("shape", "kept"), [(SMALL, True), (LARGE, False)])
def test_a_small_step_keeps_its_buffers_and_a_large_one_none(shape: tuple[int, int, int], kept: bool) -> None:
    (M, K, N), E = shape, torch.empty(shape[0], shape[2], dtype=torch.bfloat16)
    a, b = torch.randn(M, K, dtype=torch.bfloat16), torch.randn(K, N, dtype=torch.bfloat16)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments("def epi(accum): E = gelu(accum) + 1; return E", E=E))
    step = ef.get_kernels(args)[0].bind(args)
    step()
    with Allocations() as made:
        step()
    assert (made.largest < M * N * 4) is kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_power_of_one_half_is_the_root(dtype):
    """As torch's is, where `pow` of C says infinity of -infinity."""
    C = torch.tensor([[-torch.inf, -0.0, 4.0, -1.0]], dtype=dtype).repeat(4, 1)
    zeros = torch.zeros(4, 4)
    got = ef.gemm(zeros, zeros, epilogue="def epi(accum, C): D = C ** 0.5; Copy = accum; return D, Copy", C=C)["D"]
    torch.testing.assert_close(got.float(), C.float() ** 0.5, rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(got[0, 1])


@pytest.mark.parametrize("shape", [(24, 16, 32), (3, 16, 5), (600, 16, 40), (700, 16, 1100)])
@pytest.mark.parametrize(
    "body",
    [
        "n = sqrt(sum(accum * accum, dim=-1, keepdim=True)); D = accum / (n + 1); return D, n",
        "n = sqrt(sum(accum * accum, dim=-1, keepdim=True)); p = n + 1; D = accum / p; return D, n, p",
        "n = amax(accum, dim=-1, keepdim=True) * 0.5; D = accum * n; u = n * 3; E = u * accum; return D, u, E, n",
    ],
)
def test_a_stored_column_is_not_changed_by_the_next_one(body: str, shape: tuple[int, int, int]) -> None:
    """Each is read by its tile, where it lies in a buffer, and evaluated whole once the sweep is done."""
    m, k, n = shape
    a, b = torch.randn(m, k), torch.randn(k, n)
    source = "def epi(accum):\n    " + body.replace("; ", "\n    ")
    scope: dict[str, object] = {name: getattr(torch, name) for name in ("sqrt", "sum", "amax")}
    exec(source, scope)
    want = scope["epi"](a @ b)  # type: ignore[operator]  # what exec has defined
    torch.testing.assert_close(tuple(ef.gemm(a, b, epilogue=source)), want, atol=1e-4, rtol=1e-4)
