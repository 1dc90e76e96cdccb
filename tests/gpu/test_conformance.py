"""The fusion tests of NVIDIA's operator API on the Hopper kernel, line by line, several variants in one kernel.

Values are -1, 0 and 1 and products of float16 accumulate in float16, as there: all sums are exact.
"""

import itertools
from typing import Any

import pytest
import torch
from gpu.harness import Machine, check

import epifuse as ef
from epifuse.runtime.arguments import Load, Store

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
P1 = (256, 512, 128, 2)
P3 = ((256, 512, 1024, 1), (256, 512, 128, 1), P1)
T2 = ((F16, F32, F32), (BF16, BF16, BF16))  # A and B, C, D
HALF = (F16, F16, F16)
OPS = {"plus": "+", "minus": "-", "times": "*"}

Size = tuple[int, int, int, int]


def lines_of(outputs: dict[str, str], *names: str, before: str = "") -> str:
    """An epilogue with these outputs."""
    body = "".join(f"    {name} = {text}\n" for name, text in outputs.items())
    given = ", ".join(("accum", *names))
    return f"def epi({given}):\n{before and '    ' + before + chr(10)}{body}    return {', '.join(outputs)}\n"


def listed(
    machine: Machine, source: str, size: Size, dtypes: tuple[torch.dtype, ...] = HALF, **inputs: Any
) -> dict[str, torch.Tensor]:
    """Run and judged. Inputs are shapes or numbers."""
    m, n, k, l = size
    ab, _, d = dtypes
    a, b = machine.whole(l, m, k, most=1, dtype=ab), machine.whole(l, k, n, most=1, dtype=ab)
    given = {name: full(machine, value) for name, value in inputs.items()}
    return check(machine, source, a, b, given, out_dtypes=d, accumulator=F16 if ab == F16 else F32)


def full(machine: Machine, value: Any) -> Any:
    """`(shape, dtype)` as data, a number as it is."""
    return machine.whole(*value[0], most=1, dtype=value[1]) if isinstance(value, tuple) else value


def sized(size: Size, machine: Machine) -> Size:
    """The list's size on a GPU; on the CPU one that is quickly done."""
    m, n, k, l = size
    return size if machine.gpu else (m // 4, n // 8, k // 8, l)


def whole(size: Size, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    m, n, _, l = size
    return (l, m, n), dtype


# --- 1 to 15 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", P3, ids=str)
def test_01_to_04_unary(size: Size, machine: Machine) -> None:
    size = sized(size, machine)
    unary = {"D": "accum", "D1": "relu(accum)", "D2": "tanh(accum)", "D3": "sigmoid(accum)", "D4": "exp(accum)"}
    listed(machine, lines_of(unary), size)
    composed = {"D": "sigmoid(relu(accum))", "D1": "tanh(relu(accum))"}
    literal = {"D2": "accum * 3.0 - 1.234", "D3": "relu(accum) * 3.0 - 1.234", "D4": "accum / 2.0"}
    listed(machine, lines_of(composed | literal), size)


@pytest.mark.parametrize("dtypes", T2, ids=str)
@pytest.mark.parametrize("size", P3, ids=str)
def test_05_unary_binary_composition(size: Size, dtypes: tuple[torch.dtype, ...], machine: Machine) -> None:
    size = sized(size, machine)
    outputs = {f"{f}_{name}": f"{f}(accum) {op} C" for f in ("identity", "relu") for name, op in OPS.items()}
    listed(machine, lines_of(outputs, "C"), size, dtypes, C=whole(size, dtypes[1]))


@pytest.mark.parametrize("types", list(itertools.product((F16, F32), repeat=2)), ids=str)
@pytest.mark.parametrize("size", P3, ids=str)
def test_06_binary_binary_composition(size: Size, types: tuple[torch.dtype, ...], machine: Machine) -> None:
    size = sized(size, machine)
    signs = itertools.product("+-", repeat=2)
    outputs = {f"D{i}": f"relu(accum) {first} C0 {second} C1" for i, (first, second) in enumerate(signs)}
    listed(machine, lines_of(outputs, "C0", "C1"), size, C0=whole(size, types[0]), C1=whole(size, types[1]))


def test_07_08_division(machine: Machine) -> None:
    m, n, k, l = sized(P1, machine)
    a, b = (torch.ones(*shape, dtype=F16, device=machine.device) for shape in ((l, m, k), (l, k, n)))
    found = check(machine, lines_of({"D": "accum / 2.0", "E": "accum / s"}, "s"), a, b, {"s": 4.0}, out_dtypes=F16)
    assert (found["D"] == k / 2).all()
    assert (found["E"] == k / 4).all()


@pytest.mark.parametrize("c", [F16, F32], ids=str)
@pytest.mark.parametrize("size", P3, ids=str)
def test_09_to_11_several_outputs(size: Size, c: torch.dtype, machine: Machine) -> None:
    """A value that is returned and used again; accum itself among the outputs."""
    size = sized(size, machine)
    outputs = {"z": "sigmoid(z0)", "y": "tanh(z0)", "D": "z + y + z0", "E": "z0 * C", "F": "E + z0 - C"}
    source = lines_of(outputs, "C", before="z0 = relu(accum)").replace("return z", "return accum, z")
    listed(machine, source, size, C=whole(size, c))


def test_12_13_accum_read_twice(machine: Machine) -> None:
    outputs = {"D": "relu(relu(accum) * C) + accum", "E": "relu(sigmoid(relu(accum))) + accum"}
    listed(machine, lines_of(outputs, "C"), sized(P1, machine), C=whole(sized(P1, machine), F32))


def test_14_15_an_input_of_the_product_as_operand(machine: Machine) -> None:
    extent = 1024 if machine.gpu else 128
    a, b = (machine.whole(2, extent, extent, most=1, dtype=F16) for _ in range(2))
    outputs = {"D": "sigmoid(relu(accum) * C) + A", "E": "tanh(relu(accum)) + A"}
    operands = {"C": machine.whole(2, extent, extent, most=1, dtype=F32), "A": a}
    check(machine, lines_of(outputs, "C", "A"), a, b, operands, out_dtypes=F16)


# --- 16 to 18: numbers, transports, fake tensors -----------------------------------------------------------------

ALPHA_BETA = lines_of({"D": "alpha * accum + beta * C"}, "alpha", "beta", "C")
NUMBERS = ((0.5, 0.5), (1.0, 0.0), (0.0, 1.0))


def alpha_beta(
    machine: Machine, size: Size, dtypes: tuple[torch.dtype, ...], numbers: tuple[float, float]
) -> ef.GemmArguments:
    m, n, k, l = size
    a, b = machine.whole(l, m, k, most=1, dtype=dtypes[0]), machine.whole(l, k, n, most=1, dtype=dtypes[0])
    C = machine.whole(l, m, n, most=1, dtype=dtypes[1])
    D = torch.full((l, m, n), torch.nan, dtype=dtypes[2], device=machine.device)
    epilogue = ef.EpilogueArguments(ALPHA_BETA, alpha=numbers[0], beta=numbers[1], C=C, D=D)
    return ef.GemmArguments(A=a, B=b, out=D, accumulator_type=F32, epilogue=epilogue)


def assert_alpha_beta(args: ef.GemmArguments, numbers: tuple[float, float]) -> None:
    """Halves of small integers: every dtype holds them."""
    tensors = args.epilogue.tensors
    want = numbers[0] * (args.A.double() @ args.B.double()) + numbers[1] * tensors["C"].double()
    assert torch.equal(tensors["D"], want.to(tensors["D"].dtype))


@pytest.mark.parametrize("dtypes", T2, ids=str)
@pytest.mark.parametrize("size", P3, ids=str)
def test_16_one_artifact_serves_every_number(size: Size, dtypes: tuple[torch.dtype, ...], machine: Machine) -> None:
    size = sized(size, machine)
    kernel = artifact = None
    for numbers in NUMBERS:
        args = alpha_beta(machine, size, dtypes, numbers)
        kernel = kernel or machine.kernel(args)
        artifact = artifact or kernel.compile(args)
        kernel.run(args, compiled_artifact=artifact)
        assert_alpha_beta(args, numbers)


@pytest.mark.parametrize("load", ["tma", None])
@pytest.mark.parametrize("store", ["tma", None])
def test_17_transports_are_honoured(load: Any, store: Any, machine: Machine) -> None:
    plain = alpha_beta(machine, P3[1], HALF, NUMBERS[0])
    tensors = plain.epilogue.tensors
    hinted = {"C": Load(tensors["C"], load), "D": Store(tensors["D"], store)}
    epilogue = ef.EpilogueArguments(ALPHA_BETA, alpha=0.5, beta=0.5, **hinted)
    args = ef.GemmArguments(A=plain.A, B=plain.B, out=tensors["D"], accumulator_type=F32, epilogue=epilogue)
    machine.kernel(args).run(args)
    assert_alpha_beta(plain, NUMBERS[0])


def test_18_found_and_compiled_without_data(machine: Machine) -> None:
    """Fake tensors serve as well as real ones, for every number."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = alpha_beta(machine, P1, (F16, F32, BF16), NUMBERS[0])
    kernel = machine.kernel(fake)
    artifact = kernel.compile(fake)
    for numbers in NUMBERS:
        args = alpha_beta(machine, P1, (F16, F32, BF16), numbers)
        kernel.run(args, compiled_artifact=artifact)
        assert_alpha_beta(args, numbers)


# --- 19 to 23: reductions; 20: many operands ---------------------------------------------------------------------


def test_19_22_23_reductions_beside_d(machine: Machine) -> None:
    """Written, not combined onto what the destination held."""
    m, n, k, _ = sized(P1, machine)
    a, b = machine.whole(m, k, most=1, dtype=F16), machine.whole(k, n, most=1, dtype=F16)
    outputs = {"D": "accum", "total": "sum(accum)", "largest": "amax(accum)", "row_max": "amax(accum, dim=0)"}
    found = check(machine, lines_of(outputs), a, b, {}, out_dtypes=F32)
    assert found["total"] == found["D"].double().sum()
    assert found["largest"] == found["D"].max()
    assert torch.equal(found["row_max"].flatten(), found["D"].amax(0))


@pytest.mark.parametrize("out", [BF16, F32], ids=str)
def test_20_eight_operands_eight_outputs(out: torch.dtype, machine: Machine) -> None:
    """Eight float32 operands, and as many outputs: what finds no room in shared memory goes direct."""
    signs = "++-+-+-+"
    before = ["accum * sc0", *(f"Out{i}" for i in range(7))]
    outputs = {f"Out{i}": f"{before[i]} {sign} In{i}{f' * sc{i}' if i else ''}" for i, sign in enumerate(signs)}
    numbers = {f"sc{i}": 0.5 * i - 1 for i in range(8)}
    size = sized(P1, machine)
    inputs = {f"In{i}": whole(size, F32) for i in range(8)}
    listed(machine, lines_of(outputs, *inputs, *numbers), size, (BF16, F32, out), **inputs, **numbers)


# --- 24 to 30: broadcasts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", P3, ids=str)
def test_24_to_30_broadcasts(size: Size, machine: Machine) -> None:
    size = sized(size, machine)
    m, n, _, l = size
    shapes = {"each": (l, m, 1), "flat": (n,), "row": (1, n), "column": (m, 1)}
    outputs = {f"D_{name}": f"accum + {name}" for name in shapes}
    outputs |= {"D": "relu(alpha * accum + each)", "E": "alpha * accum + flat", "F": "accum + flat + each"}
    inputs: dict[str, Any] = {name: (shape, F16) for name, shape in shapes.items()}
    listed(machine, lines_of(outputs, *inputs, "alpha"), size, alpha=0.5, **inputs)
