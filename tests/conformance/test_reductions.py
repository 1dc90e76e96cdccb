"""Every reduction over every choice of dims, with and without keepdim, on ragged panels, compared with its function.

These run on the CPU, which carries the whole language. The Hopper kernel's are in tests/gpu/test_reductions.py.
"""

import itertools
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.fusion.vocabulary import VOCABULARY

SHAPES = [(2, 5, 7, 3), (1, 1, 1, 1), (3, 1, 9, 2), (2, 19, 1, 4), (0, 9, 37, 5), (0, 4, 8, 2)]  # L (0: none), M, N, K
TILE = (4, 8)
DIMS = [None, 0, 1, 2, -1, -2, (0, 1), (0, 2), (-2, -1), (0, 1, 2)]


def product(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a product whose elements are multiples of 1/4, so that sums are exact in any order."""
    L, M, N, K = shape
    batch = (L,) if L else ()
    return torch.randint(-3, 4, (*batch, M, K)) / 2, torch.randint(-3, 4, (*batch, K, N)) / 2


def fused(source: str, a: torch.Tensor, b: torch.Tensor, tile: Any = TILE, **inputs: Any) -> dict[str, Any]:
    epilogue = ef.EpilogueArguments.partial(source, inputs)
    args = ef.GemmArguments(a, b, epilogue=epilogue, constraints=ef.Constraints(tile=tile))
    return ef.get_kernels(args, limit=1)[0].run(args)


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, equal_nan=True)


def in_rank(dim: Any, rank: int) -> bool:
    return all(-rank <= d < rank for d in ((dim,) if isinstance(dim, int) else dim or ()))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dim", DIMS)
def test_of_floats(dim: Any, name: str) -> None:
    function = VOCABULARY[name].function
    for shape, keepdim in itertools.product(SHAPES, (False, True)):
        a, b = product(shape)
        accum = a @ b
        if in_rank(dim, accum.dim()):
            source = f"def epi(accum): r = {name}(accum, dim={dim}, keepdim={keepdim}); D = accum; return D, r"
            equal(fused(source, a, b)["r"], function(accum, dim, keepdim))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dim", [None, 0, 1, 2, (0, 2)])
def test_the_result_is_a_value_again(dim: Any, name: str) -> None:
    """A reduction of rows is used in the same tile, which must have whole rows. Others are used in a second sweep."""
    if name in ("any", "all"):
        source = f"def epi(accum, x): r = {name}(accum > x, dim={dim}, keepdim=True); D = where(r, accum, -x); return D"
    else:
        source = f"def epi(accum, x): r = {name}(accum * x, dim={dim}, keepdim=True); D = accum - r * x; return D"
    for shape in SHAPES[:4]:
        a, b = product(shape)
        M, N = shape[1:3]
        x = torch.randint(1, 4, (M, 1)).float()
        want = meaning(source)(a @ b, x)
        equal(fused(source, a, b, tile=(4, N), x=x)["D"], want)


def meaning(source: str) -> Any:
    namespace: dict[str, Any] = {name: entry.function for name, entry in VOCABULARY.items()}
    exec(source, namespace)
    return namespace["epi"]


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_of_what_is_not_finite(broken: float, name: str) -> None:
    """A single element is not finite. It lies in a ragged lane of the last panel."""
    a, b = product((0, 9, 37, 5))
    x = torch.zeros(9, 37)
    x[8, 36] = broken
    for dim in (None, 0, 1):
        source = f"def epi(accum, x): r = {name}(accum + x, dim={dim}); D = accum; return D, r"
        equal(fused(source, a, b, x=x)["r"], VOCABULARY[name].function(a @ b + x, dim))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("kind", ["mask", "int32"])
def test_of_integers_and_masks(kind: str, name: str) -> None:
    a, b = (x.mul(4).to(torch.int8) for x in product((0, 9, 37, 5)))
    accum = a.int() @ b.int()
    x = accum > 0 if kind == "mask" else accum
    written = "accum > 0" if kind == "mask" else "accum"
    for dim in (None, 0, 1):
        source = f"def epi(accum): r = {name}({written}, dim={dim}); D = accum; return D, r"
        rule = REDUCTIONS[name].rule
        if rule == "float" or (kind == "mask" and rule in ("ordered", "squares")):
            with pytest.raises(ef.errors.EpilogueTypeError, match=r"takes floats|does not work on masks"):
                fused(source, a, b)
        else:
            equal(fused(source, a, b)["r"], VOCABULARY[name].function(x, dim))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [-1, -2, 0])
def test_softmax(dim: int, name: str) -> None:
    for shape in SHAPES:
        a, b = product(shape)
        if dim == 0 and shape[0] == 0:
            continue
        source = f"def epi(accum): D = {name}(accum, dim={dim}); return D"
        equal(fused(source, a, b, tile=(4, shape[2]))["D"], getattr(torch, name)(a @ b, dim))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_destinations(name: str) -> None:
    """An output may have torch's shape, the keepdim shape also without leading ones, or (1,) for one number. Its
    content is overwritten."""
    a, b = product((2, 9, 37, 5))
    accum = a @ b
    for dim, shapes in {
        None: [(), (1,), (1, 1), (1, 1, 1)],
        0: [(9, 37), (1, 9, 37)],
        1: [(2, 37), (2, 1, 37)],
        2: [(2, 9), (2, 9, 1)],
        (0, 1): [(37,), (1, 37), (1, 1, 37)],
        (0, 2): [(9,), (9, 1), (1, 9, 1)],
    }.items():
        want = VOCABULARY[name].function(accum, dim)
        for shape in shapes:
            held = torch.full(shape, 7).to(want.dtype)
            source = f"def epi(accum): r = {name}(accum, dim={dim}); D = accum; return D, r"
            got = fused(source, a, b, r=held)["r"]
            assert got is held
            equal(got, want.reshape(shape))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("extents", [(0, 7), (5, 0), (0, 0)])
def test_of_nothing(extents: tuple[int, int], name: str) -> None:
    M, N = extents
    a, b = torch.ones(M, 3), torch.ones(3, N)
    source = f"def epi(accum): r = {name}(accum); D = accum; return D, r"
    if not REDUCTIONS[name].has_identity:
        with pytest.raises(ef.errors.ArgumentError, match="of no elements has no value"):
            fused(source, a, b)
        return
    equal(fused(source, a, b)["r"], VOCABULARY[name].function(a @ b))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_reduced_vector_needs_keepdim(dim: int) -> None:
    """Also if M = N, when the shapes would fit without it."""
    a, b = product((0, 8, 8, 3))
    source = f"def epi(accum): D = accum / sum(accum, dim={dim}); return D"
    if dim == 0:  # by NumPy's rule (N,) broadcasts to (M, N)
        equal(fused(source, a, b)["D"], a @ b / (a @ b).sum(0))
        return
    with pytest.raises(ef.errors.EpilogueTypeError, match="keepdim=True"):
        fused(source, a, b)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_same_bits_every_run(name: str) -> None:
    a, b = torch.randn(67, 31), torch.randn(31, 45)
    source = f"def epi(accum): r = {name}(accum); c = {name}(accum, dim=0); D = accum; return D, r, c"
    runs = [fused(source, a, b) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(other[key], value) for key, value in runs[0].items())


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:PyTorch runs the derivative")
def test_the_gradient_of_a_product_with_zeros(zeros: int) -> None:
    def epilogue(accum: Any, x: Any) -> Any:
        rows, total = torch.prod(accum + x, -1), ef.prod(x)
        return rows, total

    a, b = product((0, 4, 6, 3))
    x = torch.rand(4, 6) + 0.5
    a[1], x[1, :zeros] = 0.0, 0.0
    found = []
    for compute in (lambda a, b, x: ef.gemm(a, b, epilogue=epilogue, x=x), lambda a, b, x: epilogue(a @ b, x)):
        leaves = [value.clone().requires_grad_() for value in (a, b, x)]
        rows, total = compute(*leaves)
        found.append(torch.autograd.grad(rows.sin().sum() + total, leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def of_columns(accum: Any) -> Any:
    place, turned = accum.argmax(-2), accum.permute(1, 0, 2)
    return place, turned


@pytest.mark.parametrize("m", [2, 7, 9])
def test_a_product_that_is_computed_again_has_the_same_bits(m: int) -> None:
    """Otherwise no element would equal the maximum. Therefore the sweep that stores `turned` must not change the bits,
    although it could multiply directly into `turned`."""
    a, b = torch.randn(2, m, 8), torch.randn(8, 64)
    place, _ = ef.gemm(a, b, epilogue=of_columns)
    assert place.amax() < m
    torch.testing.assert_close((a @ b).gather(-2, place[:, None])[:, 0], (a @ b).amax(-2))
