"""Values of the wrong Python type, handed to every public function: an error of ours that says what was wanted."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import epifuse as ef

A, B, C = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4)
ADD = "lambda accum, C: accum + C"
ARGS = ef.GemmArguments(A, B)
KERNEL = ef.get_kernels(ARGS)[0]


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(A, 0.1, 0, torch.qint8)


def quantised_by_rows() -> torch.Tensor:
    return torch.quantize_per_channel(A, torch.ones(4), torch.zeros(4), 0, torch.qint8)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "explain": (lambda: ef.explain(A), "explain takes GemmArguments, not a Tensor"),
    "explain None": (lambda: ef.explain(None), "explain takes GemmArguments, not None"),
    "explain cc": (lambda: ef.explain(ARGS, cc=True), "cc must be one of"),
    "kernel.compile": (lambda: KERNEL.compile(None), "takes GemmArguments, not None"),
    "kernel.supports": (lambda: KERNEL.supports(3), "takes GemmArguments, not an int"),
    "kernel.bind": (lambda: KERNEL.bind([]), "takes GemmArguments, not a list"),
    "kernel.get_workspace_size": (lambda: KERNEL.get_workspace_size("x"), "takes GemmArguments, not a str"),
    "kernel.run artifact": (lambda: KERNEL.run(ARGS, compiled_artifact=3), "compile.. returned .*, not an int"),
    "providers": (lambda: ef.get_kernels(ARGS, providers="cpu"), "providers must be a list of names, got 'cpu'"),
    "providers 3": (lambda: ef.get_kernels(ARGS, providers=3), "providers must be a list of names, got 3"),
    "metadata_filter": (lambda: ef.get_kernels(ARGS, 90), "metadata_filter must be a function"),
    "constraints": (lambda: ef.GemmArguments(A, B, constraints={"tile": 1}), "constraints=.*, not a dict"),
    "tile": (lambda: ef.Constraints(tile=[1, 2]), "tile must be two whole numbers"),
    "cluster": (lambda: ef.Constraints(cluster=2), "cluster must be two whole numbers"),
    "schedule": (lambda: ef.Constraints(schedule=3), "schedule must be a name or None"),
    "precision": (lambda: ef.gemm(A, B, precision=torch.ones(2)), "precision must be None, 'ieee' or 'tf32'"),
    "precision list": (lambda: ef.gemm(A, B, precision=[1]), "precision must be"),
    "fallback": (lambda: ef.gemm(A, B, fallback=torch.ones(2)), "fallback must be None or 'torch'"),
    "accumulator_type": (lambda: ef.gemm(A, B, accumulator_type=float), "accumulator_type must be a torch dtype"),
    "epilogue 3": (lambda: ef.epilogue(3), "epilogue takes a Python function, not an int"),
    "epilogue string": (lambda: ef.epilogue(ADD), "epilogue takes a Python function, not a str"),
    "epilogue builtin": (lambda: ef.epilogue(torch.relu), "epilogue takes a Python function"),
    "reassign": (lambda: ef.epilogue(reassign=3), "reassign must be True or False"),
    "operands list": (lambda: ef.gemm(A, B, epilogue=ADD, operands=[C]), "operands must be a mapping, not a list"),
    "operands tensor": (lambda: ef.gemm(A, B, epilogue=ADD, operands=C), "operands must be a mapping, not a Tensor"),
    "operands string": (lambda: ef.linear(A, B, epilogue=ADD, operands="C"), "operands must be a mapping"),
    "cc of an int": (lambda: ef.utils.is_device_cc_supported(90), "takes compute capabilities, .*, not an int"),
    "cc of None": (lambda: ef.utils.is_device_cc_supported(None), "takes compute capabilities"),
    "cc of strings": (lambda: ef.utils.is_device_cc_supported(["90", 100]), "takes compute capabilities"),
    "NumPy A": (lambda: ef.gemm(A.numpy(), B), "A must be a torch.Tensor.*\n.*from_numpy"),
    "NumPy operand": (lambda: ef.gemm(A, B, epilogue=ADD, C=C.numpy()), "(?s)operand 'C' must be.*from_numpy"),
    "NumPy out": (lambda: ef.gemm(A, B, out=A.numpy()), "(?s)output 'D' must be.*from_numpy"),
    "NumPy complex": (lambda: ef.gemm(A, B, epilogue=ADD, C=np.complex64(1)), "not a complex"),
    "nested A": (lambda: ef.gemm(nested(), B), "A is not a plain dense tensor: it is nested"),
    "nested operand": (lambda: ef.gemm(A, B, epilogue=ADD, C=nested()), "operand 'C' is not a plain dense .* nested"),
    "nested x": (lambda: ef.linear(nested(), B), "x is not a plain dense tensor: it is nested"),
    "sparse weight": (
        lambda: ef.linear(A, B.to_sparse()),
        "weight is not a plain dense tensor: it is torch.sparse_coo",
    ),
    "sparse weight by rows": (
        lambda: ef.linear(A, B.to_sparse_csr()),
        "weight is not a plain dense tensor: it is torch.sparse_csr",
    ),
    "quantised weight": (lambda: ef.linear(A, quantised_by_rows()), "weight is not a plain dense tensor: .* quantised"),
    "sparse operand": (
        lambda: ef.linear(torch.ones(2, 4, 4), B, epilogue=ADD, C=C.to_sparse()),
        "operand 'C' is not a plain dense tensor",
    ),
    "quantised A": (lambda: ef.gemm(quantised(), B), "(?s)A is not a plain dense tensor: it is quantised.*dequantize"),
    "negated view": (lambda: ef.gemm((A + 1j).conj().imag, B), "(?s)negated view.*resolve_neg"),
    "reference of a number": (lambda: ef.reference(3), "reference takes a Python function, not an int"),
    "reference of a string": (lambda: ef.reference(ADD), "reference takes a Python function, not a str"),
    "reference of a module": (lambda: ef.reference(torch.nn.ReLU()), "reference takes a Python function, not a ReLU"),
    "EpilogueArguments as the epilogue": (
        lambda: ef.gemm(A, B, epilogue=ef.EpilogueArguments("lambda accum: accum", accum=A)),
        "not an EpilogueArguments",
    ),
}


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_:UserWarning",
    "ignore:.*nested tensors:UserWarning",
    "ignore:.*Sparse:UserWarning",
)
@pytest.mark.parametrize(("call", "match"), CALLS.values(), ids=CALLS)
def test_a_wrong_kind_is_refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ef.errors.EpifuseError, match=match):
        call()


def test_the_default_device_and_dtype_are_not_the_kernels() -> None:
    def epilogue(accum: Any, s: float) -> Any:
        D = accum * s + 1.0 + ef.index_m(accum)
        total, top = D.sum(), D.amax()
        level = accum.logsumexp(dim=(0, 1)) + D.mean()
        return D, total, top, level

    want = ef.gemm(A, B, epilogue=epilogue, s=2.0)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        got = ef.gemm(A, B, epilogue=epilogue, s=2.0)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert [(x.device.type, x.dtype) for x in got] == [(x.device.type, x.dtype) for x in want]
    assert all(map(torch.equal, got, want))


def test_a_negated_view_is_refused_after_an_equal_plain_tensor() -> None:
    plain, negated = torch.ones(4, 4, 2)[..., 0], (A + 1j).conj().imag
    assert (plain.shape, plain.stride(), plain.dtype) == (negated.shape, negated.stride(), negated.dtype)
    for _ in range(2):
        assert torch.equal(ef.gemm(plain, B), plain @ B)
    with pytest.raises(ef.errors.ArgumentError, match="negated view"):
        ef.gemm(negated, B)
