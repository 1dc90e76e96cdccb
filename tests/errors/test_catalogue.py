"""Every sentence of the catalogue, as a person reads it: the smallest mistake that raises it, and its golden text."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from epifuse.base import errors
from epifuse.base.errors import CATALOGUE, EpifuseError
from tests.errors.triggers import CALLS, SOURCES, gemm, run_source
from tests.frontend.sources import function_from

SRC = Path(errors.__file__).parents[1]


@pytest.mark.parametrize("key", CATALOGUE)
def test_sentence(key: str, golden: Callable[[str], None]) -> None:
    assert (key in SOURCES) != (key in CALLS), f"'{key}' has no trigger in tests/errors/triggers.py"
    with pytest.raises(EpifuseError) as caught:
        run_source(SOURCES[key]) if key in SOURCES else CALLS[key]()
    error = caught.value
    assert error.key == key, str(error)
    assert type(error) is CATALOGUE[key].kind
    assert error.loc is not None or key not in SOURCES
    golden(f"{type(error).__name__}: {error}")


def test_every_key_is_raised() -> None:
    """A sentence nobody can read is removed; a key nobody wrote a sentence for would be a KeyError."""
    text = "\n".join(path.read_text() for path in SRC.rglob("*.py") if path.name not in ("errors.py", "sentences.py"))
    assert [key for key in CATALOGUE if f'"{key}"' not in text] == []
    raised = set(re.findall(r'\bfail\(\s*"(\w+)"', text)) | set(re.findall(r'(?:Kind|Dims)Error\(\s*"(\w+)"', text))
    assert sorted(raised - set(CATALOGUE)) == []


def test_triggers_are_of_the_catalogue() -> None:
    assert sorted({*SOURCES, *CALLS} - set(CATALOGUE)) == []


@pytest.mark.parametrize("key", SOURCES)
def test_errors_survive_pickling(key: str) -> None:
    with pytest.raises(EpifuseError) as caught:
        run_source(SOURCES[key])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.key, again.loc, str(again)) == (
        type(caught.value),
        caught.value.key,
        caught.value.loc,
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("source", "caret"),
    [
        ("def epi(accum):\n\treturn accum\t+ 'x'\n", "    return accum\t+ 'x'\n    " + " " * 12 + "\t" + "  ^^^"),
        ("def epi(accum, größe):\n    return größe + 'x'\n", "    return größe + 'x'\n                   ^^^"),
        ("def epi(accum, 変):\n    return 変 + 'x'\n", "    return 変 + 'x'\n                ^^^"),
    ],
    ids=["tabs", "two bytes", "wide"],
)
def test_the_caret_stands_under_the_fault(source: str, caret: str) -> None:
    with pytest.raises(EpifuseError) as caught:
        run_source(source)
    assert caret in str(caught.value)


def test_a_long_chain_of_helpers_is_cut() -> None:
    chain = "".join(f"def h{i}(x):\n    return h{i + 1}(x)\n" for i in range(1500))
    with pytest.raises(EpifuseError) as caught:
        gemm(function_from(chain + "def h1500(x):\n    return x + 'a'\n\ndef epi(accum):\n    return h0(accum)\n"))
    assert caught.value.key == "not_a_value"
    assert str(caught.value).count("called from") == 4
