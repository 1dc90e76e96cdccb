"""Several outputs, by position and by name, whatever the names are."""

import copy
import pickle

import pytest
import torch

import epifuse as ef

A = torch.arange(9.0).reshape(3, 3)
B = torch.eye(3)


@pytest.mark.parametrize("name", ["count", "index", "names", "D", "_positions", "__len__"])
def test_an_output_of_any_name_is_reached(name: str) -> None:
    result = ef.gemm(A, B, epilogue=f"def epi(accum): {name} = accum * 2; E = accum; return E, {name}")
    assert torch.equal(result[name], A * 2)
    assert torch.equal(getattr(result, name), A * 2)
    assert torch.equal(result["E"], A)
    assert len(result) == 2
    assert result[1] is result[name]
    assert result[-1:] == (result[name],)


def test_tuple_methods_exist_unless_an_output_has_the_name() -> None:
    result = ef.gemm(A, B, epilogue="def epi(accum): D = accum; E = accum * 2; return E, D")
    assert result.names == ("E", "D")
    with pytest.raises(ef.errors.ArgumentError, match="there is no output 'F'; the outputs are E, D"):
        result["F"]
    assert not hasattr(result, "F")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_results_are_copied(again: object) -> None:
    result = ef.gemm(A, B, epilogue="def epi(accum): D = accum; count = accum * 2; return D, count")
    made = again(result)  # type: ignore[operator]
    assert type(made) is ef.Results
    assert made.names == ("D", "count")
    assert torch.equal(made.count, A * 2)


def test_results_are_read_as_a_mapping() -> None:
    result = ef.gemm(A, B, epilogue="def epi(accum): D = accum; total = accum.sum(); return D, total")
    assert dict(result.items()) == dict(zip(("D", "total"), result, strict=True))
    assert (tuple(result.keys()), result.values()) == (("D", "total"), result)
    assert "total" in result
    assert "E" not in result
    assert result.D in result
    assert dict(**result).keys() == {"D", "total"}


def test_an_output_may_be_called_items() -> None:
    result = ef.gemm(A, B, epilogue="def epi(accum): items = accum; D = accum * 2; return items, D")
    assert torch.equal(result.items, A)
    assert tuple(result.keys()) == ("items", "D")
