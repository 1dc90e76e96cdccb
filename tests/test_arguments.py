"""What a person hands over: shapes, dtypes, names, outputs, aliasing, gradients; refused before anything is written."""

import functools
import pickle
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError, ArgumentTypeError, EpifuseError, EpilogueTypeError

M, N, K = 4, 6, 3
A, B = torch.arange(12.0).reshape(M, K) - 5, torch.arange(18.0).reshape(K, N) - 7
C = torch.arange(24.0).reshape(M, N)
ACCUM = A @ B


def epi(accum: Any, C: Any) -> Any:
    D = accum + C
    return D


def two(accum: Any, C: Any) -> Any:
    D = accum + C
    E = accum - C
    return D, E


def add(operand: Any, a: Any = A, b: Any = B, **named: Any) -> Any:
    return ef.gemm(a, b, epilogue=epi, C=operand, **named)


# --- operands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operand",
    [
        2.0, 2, True, np.float32(2.5), np.int64(3), np.bool_(True),
        torch.tensor(2.5), torch.tensor(3), torch.tensor(True),
        torch.ones(1), torch.ones(1, 1), torch.arange(6.0), torch.ones(1, N), torch.arange(4.0).reshape(M, 1), C,
        C.half(), C.bfloat16(), C.to(torch.int8), C.to(torch.int64), C > 3, C.T.contiguous().T, C[:, :1].expand(M, N),
    ],
    ids=lambda x: f"{type(x).__name__} {tuple(getattr(x, 'shape', ()))} {getattr(x, 'dtype', '')}",
)  # fmt: skip
def test_operands(operand: Any) -> None:
    wide = operand.float() if isinstance(operand, torch.Tensor) else float(operand)
    assert torch.equal(add(operand), ACCUM + wide)


@pytest.mark.parametrize(
    "shape", [(1,), (), (2, 1, 1), (N,), (M, 1), (2, 1, N), (2, M, 1), (M, N), (2, M, N), (1, M, N)]
)
def test_operands_of_a_batched_product(shape: tuple[int, ...]) -> None:
    a, b = torch.stack([A, A + 1]), torch.stack([B, B - 1])
    operand = torch.randint(-9, 9, shape).float()
    assert torch.equal(add(operand, a, b), a @ b + operand)


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((M,), r"C\[:, None\]"),
        ((N, M), "broadcast"),
        ((2,), "broadcast"),
        ((M, 2), "broadcast"),
        ((2, M, N), "broadcast"),
    ],
)
def test_an_operand_that_does_not_broadcast(shape: tuple[int, ...], hint: str) -> None:
    with pytest.raises(EpilogueTypeError, match=hint) as caught:
        add(torch.ones(shape))
    assert caught.value.loc is not None


def test_one_row_a_batch_needs_an_index() -> None:
    with pytest.raises(EpilogueTypeError, match=r"C\[:, None, :\]"):
        add(torch.ones(2, N), torch.stack([A, A]), torch.stack([B, B]))


@pytest.mark.parametrize(
    ("operand", "error", "match"),
    [
        ("text", ArgumentTypeError, "must be a tensor or a number, not a str"),
        (None, ArgumentTypeError, "must be a tensor or a number, not None"),
        ([1.0], ArgumentTypeError, "must be a tensor or a number, not a list"),
        (2j, ArgumentTypeError, "must be a tensor or a number, not a complex"),
        (10**400, ArgumentError, "does not fit the float"),
        (C.to(torch.complex64), ArgumentError, "complex64"),
        (C.double(), ArgumentError, "is float64 beside an accumulator of torch.float32"),
        (C.to_sparse(), ArgumentError, "is not a plain dense tensor"),
        (C.to("meta"), ArgumentError, "is on meta, but the GEMM is on cpu"),
        (np.ones((M, N), np.float32), ArgumentTypeError, "must be a tensor or a number, not an ndarray"),
    ],
    ids=str,
)  # fmt: skip
def test_an_operand_of_the_wrong_kind(operand: Any, error: type[EpifuseError], match: str) -> None:
    with pytest.raises(error, match=match):
        add(operand)


def test_names() -> None:
    with pytest.raises(ArgumentError, match="Argument C is not provided, and the epilogue takes it"):
        ef.gemm(A, B, epilogue=epi)
    with pytest.raises(ArgumentError, match="Unexpected argument 'Q'"):
        ef.gemm(A, B, epilogue=epi, C=C, Q=C)
    with pytest.raises(ArgumentError, match="'D' is an output of the epilogue"):
        ef.gemm(A, B, epilogue=epi, C=C, D=C)


def test_an_operand_may_be_called_a_or_b_or_like_an_option() -> None:
    source = "def epi(accum, a, b, A, B): D = accum + a * b + A * B; return D"
    assert torch.equal(ef.gemm(A, B, epilogue=source, a=2.0, b=3.0, A=4.0, B=5.0), ACCUM + 26)
    source = "def epi(accum, out, precision): D = accum * out + precision; return D"
    with pytest.raises(ArgumentError, match=r"pass it as operands=\{'out'"):
        ef.gemm(A, B, epilogue=source, precision=None)
    got = ef.gemm(A, B, epilogue=source, operands={"out": 2.0, "precision": C}, out_dtypes=torch.float64)
    assert torch.equal(got, (ACCUM * 2 + C).double())


def test_defaults() -> None:
    source = "def epi(accum, alpha=2.0, *, beta=-1.0): D = accum * alpha + beta; return D"
    assert torch.equal(ef.gemm(A, B, epilogue=source), ACCUM * 2 - 1)
    assert torch.equal(ef.gemm(A, B, epilogue=source, beta=C), ACCUM * 2 + C)


# --- A and B ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        (A, B[:2], "the inner extents 3 and 2 differ"),
        (A[0], B, "A must have 2 dims at least"),
        (A, B[:, 0], "B must have 2 dims at least"),
        (torch.stack([A, A]), torch.stack([B, B, B]), "the batch extents differ"),
        (A, B.half(), "the two dtypes must agree"),
        (A.to(torch.int8), B, "the two dtypes must agree"),
        (A.to(torch.int32), B.to(torch.int32), "which no kernel multiplies"),
        (A > 0, B > 0, "which no kernel multiplies"),
        (A.to(torch.complex64), B.to(torch.complex64), "complex64|dense"),
        (A, B.to("meta"), "B is on meta, but the GEMM is on cpu"),
        (A.to_sparse(), B, "not a plain dense tensor"),
    ],
)
def test_a_and_b(a: torch.Tensor, b: torch.Tensor, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        ef.gemm(a, b)


@pytest.mark.parametrize("a", [None, [[1.0]], 1.0, np.ones((2, 2))])
def test_a_is_a_tensor(a: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"A must be a torch\.Tensor"):
        ef.gemm(a, B)


@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [
        (torch.float32, torch.float16),
        (torch.float16, torch.int32),
        (torch.int8, torch.float32),
        (torch.float64, torch.float32),
    ],
)
def test_an_accumulator_that_does_not_go(dtype: torch.dtype, accumulator: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match="does not go with inputs of"):
        ef.gemm(A.to(dtype), B.to(dtype), accumulator_type=accumulator)


@pytest.mark.parametrize(
    ("named", "hint"), [({"out_dtype": torch.int8}, "did you mean out_dtypes="), ({"bas": B}, "did you mean bias=")]
)
def test_a_misspelled_argument_is_recognised(named: dict[str, Any], hint: str) -> None:
    with pytest.raises(ArgumentError, match=hint):
        ef.gemm(A, B, epilogue=lambda accum, bias=0.0: accum + bias, **named)


def test_an_epilogue_in_the_place_of_the_bias() -> None:
    with pytest.raises(ArgumentTypeError, match="pass an epilogue by its name"):
        ef.linear(A, B.T, ef.relu)  # type: ignore[arg-type]


def test_a_module_in_the_place_of_a_weight() -> None:
    with pytest.raises(ArgumentTypeError, match=r"pass the tensors that it holds, as layer\.weight"):
        ef.linear(A, torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_gradients() -> None:
    weight = torch.nn.Parameter(B)
    with torch.no_grad():
        assert torch.equal(ef.gemm(A, weight), ACCUM)
    assert torch.equal(ef.gemm(A, weight.detach()), ACCUM)
    with pytest.raises(ArgumentError, match=r"\.detach\(\) or torch\.no_grad\(\)"):
        ef.GemmArguments(A, weight)
    with pytest.raises(ArgumentError, match="output 'D' is given, and it or an input requires grad"):
        ef.gemm(A, B, out=torch.zeros(M, N, requires_grad=True))


def test_arguments_inside_vmap_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="A is a tensor inside vmap, grad or another transform"):
        torch.vmap(lambda a: ef.GemmArguments(a, B))(torch.stack([A, A]))


def test_subclasses_are_refused() -> None:
    class Mine(torch.Tensor):
        """A person's own."""

    with pytest.raises(ArgumentTypeError, match="A is a Mine"):
        ef.gemm(A.as_subclass(Mine), B)
    with pytest.raises(ArgumentTypeError, match="operand 'C' is a Mine"):
        add(C.as_subclass(Mine))
    with pytest.raises(ArgumentTypeError, match="output 'D' is a Mine"):
        ef.gemm(A, B, out=torch.zeros(M, N).as_subclass(Mine))


# --- outputs ------------------------------------------------------------------------------------------------------


def test_outputs_by_name() -> None:
    r = ef.gemm(A, B, epilogue=two, C=C)
    D, E = r
    assert r.names == ("D", "E")
    assert r.D is D
    assert r.E is E
    assert torch.equal(E, ACCUM - C)
    with pytest.raises(AttributeError, match="no output named 'F'; there are D, E"):
        _ = r.F


def test_out() -> None:
    D, E = torch.full((M, N), 7.0), torch.full((M, N), 7.0)
    assert add(C, out=D) is D
    assert torch.equal(D, ACCUM + C)
    r = ef.gemm(A, B, epilogue=two, C=C, out={"E": E})
    assert r.E is E
    assert torch.equal(E, ACCUM - C)
    assert ef.gemm(A, B, epilogue=two, C=C, out=E).D is E
    single = "def epi(accum): result = accum * 2; return result"
    assert torch.equal(ef.gemm(A, B, epilogue=single, out=D), ACCUM * 2)


@pytest.mark.parametrize(
    ("epilogue", "out", "match"),
    [
        (two, {"F": torch.zeros(M, N)}, "out names 'F', but the outputs are D, E"),
        ("def epi(accum, C): X = accum; Y = C + accum; return X, Y", torch.zeros(M, N), "out is one tensor, but"),
        (epi, torch.zeros(M, N + 1), "must have the shape"),
        (epi, torch.zeros(1, M, N), "must have the shape"),
        ("def epi(accum, C): D = (accum + C).permute(1, 0); return D", torch.zeros(M, N), "must have the shape"),
        ("def epi(accum, C): D = (accum + C).reshape(-1); return D", torch.zeros(M, N), "must have the shape"),
        (epi, torch.zeros(M, N, dtype=torch.complex64), "cannot be stored as torch.complex64"),
        (epi, torch.zeros(M, N, device="meta"), "is on meta, but the GEMM is on cpu"),
        (epi, torch.zeros(M, 1).expand(M, N), "share one address"),
        (epi, torch.zeros(M + N).as_strided((M, N), (1, 1)), "share one address"),
    ],
)
def test_an_output_that_does_not_fit(epilogue: Any, out: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        ef.gemm(A, B, epilogue=epilogue, C=C, out=out)


def test_an_output_is_a_tensor() -> None:
    with pytest.raises(ArgumentTypeError, match=r"output 'D' must be a torch\.Tensor, not a float"):
        add(C, out=1.0)
    for out in ([C], (C,)):
        with pytest.raises(ArgumentTypeError, match="out must be a tensor or a mapping, not a"):
            add(C, out=out)


def test_out_dtypes() -> None:
    assert add(C, out_dtypes=torch.float16).dtype == torch.float16
    r = ef.gemm(A, B, epilogue=two, C=C, out_dtypes={"E": torch.int32})
    assert (r.D.dtype, r.E.dtype) == (torch.float32, torch.int32)
    with pytest.raises(ArgumentError, match="out_dtypes names 'F'"):
        ef.gemm(A, B, epilogue=two, C=C, out_dtypes={"F": torch.int32})


def test_out_dtypes_of_what_cannot_be_stored() -> None:
    with pytest.raises(ArgumentError, match="cannot be stored as"):
        add(C, out_dtypes=torch.complex64)
    with pytest.raises(ArgumentError, match="cannot be stored as int8"):
        add(C, out_dtypes={"D": "int8"})


def test_nothing_is_written_before_a_refusal() -> None:
    D = torch.full((M, N), 7.0)
    for call in (
        lambda: add(torch.ones(M), out=D),
        lambda: add(C.double(), out=D),
        lambda: ef.gemm(A, B[:2], out=D),
        lambda: ef.gemm(A, B, epilogue="def epi(accum): D = accum + nothing; return D", out=D),
        lambda: ef.gemm(A, B, epilogue="def epi(accum, s): D = accum * (1 / s); return D", s=0.0, out=D),
    ):
        with pytest.raises(EpifuseError):
            call()
        assert torch.equal(D, torch.full((M, N), 7.0))


# --- GemmArguments ------------------------------------------------------------------------------------------------


def test_out_of_gemm_arguments_describes_and_is_not_written() -> None:
    out, D = torch.full((M, N), 7.0), torch.zeros(M, N)
    args = ef.GemmArguments(A=A, B=B, out=out, epilogue=ef.EpilogueArguments(epi, C=C, D=D))
    ef.get_kernels(args)[0].run(args)
    assert torch.equal(out, torch.full((M, N), 7.0))
    assert torch.equal(D, ACCUM + C)


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ("accum.permute(1, 0)", (N, M)),
        ("accum.reshape(2, 2, 6)", (2, 2, N)),
        ("accum.reshape(2, 2, 2, 3).permute(0, 2, 1, 3)", (2, 2, 2, 3)),
        ("sum(accum, dim=0)", (N,)),
        ("sum(accum, dim=1, keepdim=True)", (M, 1)),
    ],
)
def test_out_is_described_as_the_epilogue_makes_it(source: str, shape: tuple[int, ...]) -> None:
    """And as the product, which is what the notebooks of CUTLASS hand in."""
    want = eval(f"lambda accum: {source}", {"sum": ef.sum})(ACCUM)
    epilogue = f"def epi(accum): D = {source}; return D"
    for described in (shape, (M, N)):
        D, out = torch.zeros(shape), torch.full(described, 7.0)
        args = ef.GemmArguments(A=A, B=B, out=out, epilogue=ef.EpilogueArguments(epilogue, D=D))
        ef.get_kernels(args)[0].run(args)
        assert torch.equal(D, want)
        assert torch.equal(out, torch.full(described, 7.0))
    D = torch.zeros(shape)
    args = ef.GemmArguments(A=A, B=B, out=D, epilogue=ef.EpilogueArguments(epilogue, D=D))
    ef.get_kernels(args)[0].run(args)
    assert torch.equal(D, want)
    with pytest.raises(ArgumentError, match="out must have the shape"):
        ef.GemmArguments(A=A, B=B, out=torch.zeros(M, N, 2), epilogue=ef.EpilogueArguments(epilogue, D=D))


def test_out_without_an_epilogue_is_written() -> None:
    out = torch.zeros(M, N)
    args = ef.GemmArguments(A=A, B=B, out=out)
    ef.get_kernels(args)[0].run(args)
    assert torch.equal(out, ACCUM)


def test_out_may_be_left_out() -> None:
    source = "def epi(accum): r = sum(accum, dim=1); return r"
    r = torch.zeros(M)
    args = ef.GemmArguments(A=A, B=B, epilogue=ef.EpilogueArguments(source, r=r))
    ef.get_kernels(args)[0].run(args)
    assert torch.equal(r, ACCUM.sum(1))
    with pytest.raises(ArgumentError, match="returns no output named D, but out= was given"):
        ef.GemmArguments(A=A, B=B, out=torch.zeros(M, N), epilogue=ef.EpilogueArguments(source, r=r))


def test_out_of_the_wrong_shape() -> None:
    with pytest.raises(ArgumentError, match=r"out must have the shape \(4, 6\)"):
        ef.GemmArguments(A=A, B=B, out=torch.zeros(N, M), epilogue=ef.EpilogueArguments(epi, C=C, D=C.clone()))


def test_a_returned_accum_needs_a_destination() -> None:
    source = "def epi(accum): D = accum * 2; return D, accum"
    with pytest.raises(ArgumentError, match="Argument accum is not provided"):
        ef.EpilogueArguments(source, D=torch.zeros(M, N))
    held = torch.zeros(M, N)
    args = ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments(source, D=torch.zeros(M, N), accum=held))
    ef.get_kernels(args)[0].run(args)
    assert torch.equal(held, ACCUM)


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [{"precision": "fp8"}, {"fallback": "numpy"}, {"allow_recompute": None}, {"fast_math": "yes"}], ids=str
)
def test_an_option_out_of_range(option: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(option))):
        ef.gemm(A, B, **option)


def test_hints_with_and_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = ef.Load(C, "tma")
    assert torch.equal(add(hint), ACCUM + C)
    monkeypatch.setattr("epifuse.providers.NAMES", ())
    with pytest.warns(UserWarning, match="PyTorch runs it unfused"):
        got = add(hint, a=A + 1, fallback="torch")
    assert torch.equal(got, (A + 1) @ B + C)


def test_a_reshape_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epifuse.providers.NAMES", ())
    heads = "def epi(accum): D = permute(reshape(accum, (4, 2, 3)), (1, 0, 2)); return D"
    with pytest.warns(UserWarning, match="PyTorch runs it unfused") as told:
        got = ef.gemm(A, B, epilogue=heads, fallback="torch")
    assert [warning.filename for warning in told] == [__file__]  # the line that calls
    assert torch.equal(got, ACCUM.reshape(4, 2, 3).permute(1, 0, 2))


def test_a_hint_on_the_wrong_side() -> None:
    with pytest.raises(ArgumentError, match=r"'C' is an operand, whose hint is ef\.Load"):
        ef.EpilogueArguments(epi, C=ef.Store(C), D=C.clone())
    with pytest.raises(ArgumentError, match=r"'D' is an output, whose hint is ef\.Store"):
        ef.EpilogueArguments(epi, C=C, D=ef.Load(C.clone()))


@pytest.mark.parametrize(
    ("last", "dtype"),
    [
        ("accum.float()", torch.float32),
        ("accum.to(torch.int8)", torch.int8),
        ("accum.half()", torch.float16),
        ("accum.to(torch.float8_e4m3fn)", torch.float8_e4m3fn),
        ("accum.half().permute(1, 0)", torch.float16),
        ("accum.sum(-1).half()", torch.float16),
        ("accum.float() * 2", torch.bfloat16),
        ("accum.half() + accum", torch.bfloat16),
        ("accum", torch.bfloat16),
    ],
)
def test_a_last_cast_decides_the_dtype_of_an_undeclared_output(last: str, dtype: torch.dtype) -> None:
    a, b = torch.ones(M, 4, dtype=torch.bfloat16), torch.ones(4, N, dtype=torch.bfloat16)
    text = f"def epi(accum):\n    D = {last}\n    return D"
    found = ef.gemm(a, b, epilogue=text)
    assert found.dtype == dtype
    want = eval(last, {"torch": torch, "accum": torch.full((M, N), 4.0)})
    torch.testing.assert_close(found.float(), want.float())
    assert ef.gemm(a, b, epilogue=text, out_dtypes=torch.float32).dtype == torch.float32
    out = torch.empty(found.shape)
    assert ef.gemm(a, b, epilogue=text, out=out) is out


# --- copies --------------------------------------------------------------------------------------------------------


def copied_epilogue(accum: Any, C: Any, alpha: Any = 2.0, mode: str = "plain") -> Any:
    D = accum * alpha + C if mode == "plain" else -accum
    rows = ef.sum(D, dim=-1)
    return D, rows


@dataclass
class Adds:
    """An object whose method is an epilogue."""

    number: float

    def epilogue(self, accum: Any, C: Any) -> Any:
        return accum * self.number + C


_COPIED: list[tuple[Any, dict[str, Any]]] = [
    (copied_epilogue, {"alpha": 3, "rows": torch.zeros(M)}),
    (copied_epilogue, {"rows": torch.zeros(M), "mode": "negative"}),
    (functools.partial(copied_epilogue, alpha=0.5), {"rows": torch.zeros(M)}),
    ("def epi(accum, C, alpha=2): return accum * alpha - C", {}),
    (Adds(3.0).epilogue, {}),
    (ef.thread.LinearCombination(beta=2.0), {}),
]


@pytest.mark.parametrize("copy", [deepcopy, lambda args: pickle.loads(pickle.dumps(args))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(("epilogue", "named"), _COPIED, ids=lambda value: type(value).__name__)
def test_arguments_are_copied_and_run_on_their_own_tensors(copy: Any, epilogue: Any, named: dict[str, Any]) -> None:
    a, b, D = torch.randn(M, 4), torch.randn(4, N), torch.zeros(M, N)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(epilogue, C=C, D=D, **named))
    made = copy(args)
    kernel = ef.get_kernels(made)[0]
    kernel.run(made)
    assert not D.any(), "the copy has tensors of its own"
    assert (made.problem, str(made.graph)) == (args.problem, str(args.graph))
    kernel.run(args)
    for name in args.epilogue.output_names:
        assert torch.equal(made.epilogue.tensors[name], args.epilogue.tensors[name])


@pytest.mark.parametrize("cc", [None, 90])
@pytest.mark.parametrize("source", ["lambda accum: accum", "lambda accum: accum.softmax(-1).sum(0)"])
def test_an_explanation_is_pickled_with_its_reasons(source: str, cc: int | None) -> None:
    args = ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments.partial(source, {}))
    found = ef.explain(args, cc=cc)
    told = str(pickle.loads(pickle.dumps(found)))
    assert told == str(found) == str(pickle.loads(pickle.dumps(found)))


def test_arguments_of_no_epilogue_or_a_lambda_can_be_copied() -> None:
    plain = deepcopy(ef.GemmArguments(A, B, torch.zeros(M, N)))
    ef.get_kernels(plain)[0].run(plain)
    torch.testing.assert_close(plain.out, A @ B)
    number = 2.0
    made = deepcopy(ef.EpilogueArguments(lambda accum: accum * number, D=torch.zeros(M, N)))
    args = ef.GemmArguments(A, B, epilogue=made)
    ef.get_kernels(args)[0].run(args)
    torch.testing.assert_close(made.tensors["D"], A @ B * 2)
    with pytest.raises(ArgumentError, match="<lambda> cannot be imported"):
        pickle.dumps(args)


def test_a_part_of_an_axis_has_its_own_extent() -> None:
    """What a reshape leaves of M is not M: a destination of accum's shape was taken for one that keeps dims."""
    source = "def epi(accum): D = sum(accum.reshape(2, 3, 8), dim=0); return D"
    args = (torch.ones(6, 4), torch.ones(4, 8))
    with pytest.raises(ArgumentError, match=r"must have the shape \(3, 8\)"):
        ef.gemm(*args, epilogue=source, out=torch.empty(6, 8))
    assert torch.equal(ef.gemm(*args, epilogue=source, out=torch.empty(3, 8)), torch.full((3, 8), 8.0))


def test_operands_that_have_no_names_are_refused() -> None:
    with pytest.raises(TypeError, match="takes operands and outputs by name, not a list"):
        ef.EpilogueArguments.partial("lambda accum, C: accum + C", [A])  # type: ignore[arg-type]  # what is tested
