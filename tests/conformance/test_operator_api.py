"""The fusion tests of NVIDIA's operator API, one by one, on the CPU. Values are -1, 0 and 1, as in the original.

One meaning differs: epifuse overwrites the buffer of a reduction, and does not combine the result with its content.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import epifuse as ef
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments, Load, Store

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
P1 = (256, 512, 128, 2)
P3 = ((256, 512, 1024, 1), (256, 512, 128, 1), P1)
T3 = ((F16, F32, F32, F32), (F16, F16, F16, F16), (BF16, BF16, BF16, F32))  # A and B, C, D, accumulator
OPS = ("+", "-", "*")

Size = tuple[int, int, int, int]


def ones(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    """A random tensor of -1, 0 and 1."""
    return torch.randint(-1, 2, shape).to(dtype)


def full(size: Size, dtype: torch.dtype = F16) -> torch.Tensor:
    M, N, _, L = size
    return ones(L, M, N, dtype=dtype)


def product(size: Size, dtype: torch.dtype = F16) -> tuple[torch.Tensor, torch.Tensor]:
    M, N, K, L = size
    return ones(L, M, K, dtype=dtype), ones(L, K, N, dtype=dtype)


def meaning(source: str) -> Callable[..., Any]:
    """The function in a source string, which runs on PyTorch tensors."""
    namespace: dict[str, Any] = {name: getattr(ef, name) for name in ef.__all__}
    exec(source, namespace)
    return next(value for name, value in namespace.items() if name == "epi")


def check(
    source: str,
    A: torch.Tensor,
    B: torch.Tensor,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
    acc: torch.dtype = F16,
) -> list[Any]:
    """Find the kernels, run the first one, and compare each output with PyTorch on the float32 product."""
    args = arguments(source, A, B, inputs, outputs, acc)
    kernels = ef.get_kernels(args)
    assert kernels
    kernels[0].run(args)
    compare(source, A, B, inputs, outputs)
    return kernels


def arguments(
    source: str, A: torch.Tensor, B: torch.Tensor, inputs: Mapping[str, Any], outputs: Mapping[str, Any], acc: Any
) -> GemmArguments:
    epilogue = EpilogueArguments(source, **inputs, **outputs)
    D = outputs["D"].tensor if isinstance(outputs["D"], Store) else outputs["D"]
    return GemmArguments(A=A, B=B, out=D, accumulator_type=acc, epilogue=epilogue)


def compare(
    source: str, A: torch.Tensor, B: torch.Tensor, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> None:
    wide = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    expected = meaning(source)(A.float() @ B.float(), **wide)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for (name, got), want in zip(outputs.items(), expected, strict=True):
        torch.testing.assert_close(got, want.to(got.dtype).reshape(got.shape), msg=lambda text, n=name: f"{n}: {text}")


def one_output(source: str, size: Size, inputs: Mapping[str, Any] | None = None, types: Any = (F16, F16, F16)) -> None:
    ab, d, acc = types
    check(source, *product(size, ab), inputs or {}, {"D": full(size, d)}, acc)


def returning(expression: str, *names: str) -> str:
    return f"def epi({', '.join(('accum', *names))}): D = {expression}; return D"


# --- 1 to 8: elementwise, one output ---------------------------------------------------------------------------


def test_01_no_fusion() -> None:
    A, B = product(P1)
    D = full(P1)
    args = GemmArguments(A=A, B=B, out=D, accumulator_type=F16)
    ef.get_kernels(args)[0].run(args)
    assert torch.equal(D, (A.float() @ B.float()).half())


@pytest.mark.parametrize("size", P3)
@pytest.mark.parametrize("f", ["", "relu", "tanh", "sigmoid", "exp"])
def test_02_unary(f: str, size: Size) -> None:
    one_output(returning(f"{f}(accum)"), size)


@pytest.mark.parametrize("g", ["sigmoid", "tanh"])
def test_03_unary_composition(g: str) -> None:
    one_output(returning(f"{g}(relu(accum))"), P1)


@pytest.mark.parametrize("size", P3)
@pytest.mark.parametrize("f", ["", "relu"])
def test_04_unary_literal(f: str, size: Size) -> None:
    one_output(returning(f"{f}(accum) * 3.0 - 1.234"), size)


@pytest.mark.parametrize("types", T3)
@pytest.mark.parametrize("size", P3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("f", ["identity", "relu"])
def test_05_unary_binary_composition(f: str, op: str, size: Size, types: tuple[torch.dtype, ...]) -> None:
    ab, c, d, acc = types
    source = f"def epi(accum, C): z = {f}(accum); D = z {op} C; return D"
    one_output(source, size, {"C": full(size, c)}, (ab, d, acc))


@pytest.mark.parametrize("size", P3)
@pytest.mark.parametrize("ops", list(itertools.product("+-", repeat=2)))
@pytest.mark.parametrize("types", list(itertools.product((F16, F32), repeat=2)))
def test_06_binary_binary_composition(types: tuple[torch.dtype, ...], ops: tuple[str, ...], size: Size) -> None:
    source = f"def epi(accum, C0, C1): z = relu(accum); z1 = z {ops[0]} C0; D = z1 {ops[1]} C1; return D"
    one_output(source, size, {"C0": full(size, types[0]), "C1": full(size, types[1])})


@pytest.mark.parametrize(("divisor", "inputs"), [("2.0", {}), ("scalar", {"scalar": 4.0})])
def test_07_08_division(divisor: str, inputs: dict[str, float]) -> None:
    M, N, K, L = P1
    A, B = torch.ones(L, M, K, dtype=F16), torch.ones(L, K, N, dtype=F16)
    check(returning(f"accum / {divisor}", *inputs), A, B, inputs, {"D": full(P1)})


# --- 9 to 15: several outputs, values used twice ---------------------------------------------------------------


@pytest.mark.parametrize("size", P3)
@pytest.mark.parametrize("g", ["sigmoid", "tanh"])
def test_09_unary_multi_output(g: str, size: Size) -> None:
    source = f"def epi(accum): z0 = relu(accum); z = {g}(z0); D = z + z0; return D, z"
    check(source, *product(size), {}, {"D": full(size), "z": full(size)})


@pytest.mark.parametrize("size", P3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("c", [F16, F32])
def test_10_binary_multi_output(c: torch.dtype, op: str, size: Size) -> None:
    source = f"def epi(accum, C): z0 = relu(accum); z = z0 {op} C; D = z + z0; return D, z"
    check(source, *product(size), {"C": full(size, c)}, {"D": full(size), "z": full(size)})


def test_11_return_acc() -> None:
    source = "def epi(accum, C): D = relu(accum) + C; return D, accum"
    check(source, *product(P1), {"C": full(P1, F32)}, {"D": full(P1), "accum": full(P1)})


@pytest.mark.parametrize(
    ("expression", "names"),
    [("relu(relu(accum) * C) + accum", ("C",)), ("relu(sigmoid(relu(accum))) + accum", ())],
)
def test_12_13_acc_as_multiple_input(expression: str, names: tuple[str, ...]) -> None:
    one_output(returning(expression, *names), P1, {name: full(P1, F32) for name in names})


@pytest.mark.parametrize("expression", ["sigmoid(relu(accum) * C) + A", "tanh(relu(accum)) + A"])
def test_14_15_matmul_input_as_aux(expression: str) -> None:
    size = (1024, 1024, 1024, 2)
    A, B = product(size)
    inputs = {"C": full(size, F32), "A": A} if "C" in expression else {"A": A}
    check(returning(expression, *inputs), A, B, inputs, {"D": full(size)})


# --- 16 to 18: alpha and beta ----------------------------------------------------------------------------------


def alpha_beta(accum: Any, alpha: Any, beta: Any, C: Any) -> Any:
    D = alpha * accum + beta * C
    return D


@pytest.mark.parametrize("types", T3)
@pytest.mark.parametrize("size", P3)
def test_16_alpha_beta(size: Size, types: tuple[torch.dtype, ...]) -> None:
    """The kernel is found once, and each run gets other numbers."""
    ab, c, d, acc = types
    A, B = product(size, ab)
    C, D = full(size, c), full(size, d)
    kernel = artifact = None
    for alpha, beta in ((0.5, 0.5), (1.0, 0.0), (0.0, 1.0)):
        epilogue = EpilogueArguments(alpha_beta, alpha=alpha, beta=beta, C=C, D=D)
        args = GemmArguments(A=A, B=B, out=D, accumulator_type=acc, epilogue=epilogue)
        kernel = kernel or ef.get_kernels(args)[0]
        artifact = artifact or kernel.compile(args)
        kernel.run(args, compiled_artifact=artifact)
        torch.testing.assert_close(D, alpha_beta(A.float() @ B.float(), alpha, beta, C.float()).to(d))


@pytest.mark.parametrize("load", ["tma", None])
@pytest.mark.parametrize("store", ["tma", None])
def test_17_alpha_beta_transports(load: Any, store: Any) -> None:
    """The CPU's kernels treat "tma" like any other transport."""
    size = (256, 512, 128, 1)
    A, B = product(size)
    C, D = full(size), full(size)
    inputs = {"alpha": 0.5, "beta": 0.5, "C": C}
    source = returning("alpha * accum + beta * C", *inputs)
    args = arguments(source, A, B, {**inputs, "C": Load(C, load)}, {"D": Store(D, store)}, F32)
    kernels = ef.get_kernels(args)
    kernels[0].run(args)
    compare(source, A, B, inputs, {"D": D})


def test_18_alpha_beta_fake_tensor() -> None:
    size = P1
    inputs = {"alpha": 0.5, "beta": 0.5}
    source = returning("alpha * accum + beta * C", *inputs, "C")
    with FakeTensorMode():
        fake = arguments(source, *product(size), {**inputs, "C": full(size, F32)}, {"D": full(size, BF16)}, F16)
    kernel = ef.get_kernels(fake)[0]
    artifact = kernel.compile(fake)
    A, B = product(size)
    C, D = full(size, F32), full(size, BF16)
    for alpha, beta in ((0.5, 0.5), (1.0, 0.0), (0.0, 1.0)):
        inputs = {"alpha": alpha, "beta": beta, "C": C}
        kernel.run(arguments(source, A, B, inputs, {"D": D}, F16), compiled_artifact=artifact)
        compare(source, A, B, inputs, {"D": D})


# --- 19 to 23: reductions --------------------------------------------------------------------------------------

SCALAR_SUM = "def epi(accum): D = accum; total = sum(accum); return D, total"


def test_19_scalar_reduction_fake_tensor() -> None:
    with FakeTensorMode():
        outputs = {"D": torch.empty(256, 512), "total": torch.zeros(1)}
        fake = arguments(SCALAR_SUM, ones(256, 128), ones(128, 512), {}, outputs, F32)
    kernel = ef.get_kernels(fake)[0]
    A, B = ones(256, 128), ones(128, 512)
    outputs = {"D": torch.empty(256, 512), "total": torch.zeros(1)}
    kernel.run(arguments(SCALAR_SUM, A, B, {}, outputs, F32), compiled_artifact=kernel.compile(fake))
    compare(SCALAR_SUM, A, B, {}, outputs)


def test_20_big_epilogue() -> None:
    signs = "++-+-+-+"
    lines = [
        f"Out{i} = {f'Out{i - 1}' if i else 'accum * sc0'} {sign} In{i}{f' * sc{i}' if i else ''}"
        for i, sign in enumerate(signs)
    ]
    lines[-1] = lines[-1].replace("Out7", "D", 1)
    names = ["D" if i == 7 else f"Out{i}" for i in range(8)]
    inputs: dict[str, Any] = {f"In{i}": full(P1, F32) for i in range(8)} | {f"sc{i}": 0.5 * i - 1 for i in range(8)}
    source = f"def epi(accum, {', '.join(inputs)}): {'; '.join(lines)}; return {', '.join(names)}"
    check(source, *product(P1, BF16), inputs, {name: full(P1, BF16) for name in names}, F32)


@pytest.mark.parametrize("acc", [F16, F32])
def test_21_row_max_is_available(acc: torch.dtype) -> None:
    """The original test expected no operator. NVIDIA's newer release has some, and epifuse has a kernel."""
    source = "def epi(accum): row_max = amax(accum, dim=0); D = accum; return D, row_max"
    size = (256, 512, 1024, 1)
    A, B = (x[0] for x in product(size))
    check(source, A, B, {}, {"D": ones(256, 512), "row_max": torch.full((512,), 7.0)}, acc)


def test_21_row_max_as_upstream_wrote_it() -> None:
    """torch's `max` with a dim returns a pair, so an error recommends amax. epifuse's own `max` is a reduction."""
    source = "def epi(accum): row_max = max(accum, dim=[0]); D = accum; return D, row_max"
    A, B = ones(256, 128), ones(128, 512)
    check(source, A, B, {}, {"D": ones(256, 512), "row_max": torch.full((512,), 7.0)}, F32)


@pytest.mark.parametrize("held", [0.0, 5.0, float("nan")])
def test_22_scalar_sum(held: float) -> None:
    outputs = {"D": torch.empty(256, 512), "total": torch.full((1,), held)}
    check(SCALAR_SUM, ones(256, 128), ones(128, 512), {}, outputs, F32)


def test_23_scalar_max() -> None:
    source = "def epi(accum): D = accum; max_val = max(accum); return D, max_val"
    A, B = ones(256, 128), ones(128, 512)
    outputs = {"D": torch.empty(256, 512), "max_val": torch.full((1,), -torch.inf)}
    check(source, A, B, {}, outputs, F32)
    assert torch.equal(outputs["max_val"], outputs["D"].max().reshape(1))


# --- 24 to 30: broadcasts --------------------------------------------------------------------------------------


def vector(kind: str, size: Size) -> torch.Tensor:
    M, N, _, L = size
    return ones(*{"(L,M,1)": (L, M, 1), "(N,)": (N,), "(1,N)": (1, N), "(M,1)": (M, 1)}[kind])


@pytest.mark.parametrize("size", P3)
@pytest.mark.parametrize("shape", ["(L,M,1)", "(N,)", "(1,N)", "(M,1)"])
def test_24_25_27_28_vector_broadcast(shape: str, size: Size) -> None:
    one_output(returning("accum + bias", "bias"), size, {"bias": vector(shape, size)})


@pytest.mark.parametrize("f", ["identity", "relu"])
def test_26_broadcast_with_activation(f: str) -> None:
    inputs = {"alpha": 0.5, "bias": vector("(L,M,1)", P1)}
    one_output(returning(f"{f}(alpha * accum + bias)", *inputs), P1, inputs)


def test_29_row_broadcast_with_scalar_multiply() -> None:
    inputs = {"alpha": 0.5, "bias": vector("(N,)", P1)}
    one_output(returning("accum * alpha + bias", *inputs), P1, inputs)


def test_30_row_and_column() -> None:
    inputs = {"row_bias": vector("(N,)", P1), "col_bias": vector("(L,M,1)", P1)}
    one_output(returning("accum + row_bias + col_bias", *inputs), P1, inputs)
