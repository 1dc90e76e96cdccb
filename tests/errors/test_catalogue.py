"""Every sentence of the catalogue, as a person reads it: the smallest mistake that raises it, and its golden text."""

import os
import pickle
import re
from pathlib import Path

import pytest
from filelock import FileLock

from epifuse.base import errors
from epifuse.base.errors import CATALOGUE, EpifuseError, Loc
from tests.errors.triggers import CALLS, SOURCES, gemm, run_source
from tests.frontend.sources import function_from

SRC = Path(errors.__file__).parents[1]
GOLDEN = Path(__file__).parents[1] / "golden" / "errors.txt"
"""What a person reads, in sections `## key` in the order of the catalogue."""


def sections(path: Path = GOLDEN) -> dict[str, str]:
    """The text under each key."""
    if not path.exists():
        return {}
    parts = re.split(r"^## (\w+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert parts[0] == "", "the file begins with a section"
    keys, texts = parts[1::2], parts[2::2]
    assert len(set(keys)) == len(keys), "no key has two sections"
    return dict(zip(keys, (text.rstrip("\n") for text in texts), strict=True))


def written(key: str, text: str, path: Path = GOLDEN) -> None:
    """Replace one section. A lock, because every worker of pytest-xdist does so; sections without a key are dropped."""
    with FileLock(Path(os.environ["EPIFUSE_CACHE_DIR"]) / "errors.lock"):  # a folder that the workers share
        known = {**sections(path), key: text.rstrip("\n")}
        ordered = (f"## {name}\n{known[name]}\n" for name in CATALOGUE if name in known)
        path.write_text("\n".join(ordered), encoding="utf-8")
    assert sections(path)[key] == text.rstrip("\n"), "a line of the message looks like the head of a section"


@pytest.mark.parametrize("key", CATALOGUE)
def test_sentence(key: str, request: pytest.FixtureRequest) -> None:
    assert (key in SOURCES) != (key in CALLS), f"'{key}' has no trigger in tests/errors/triggers.py"
    with pytest.raises(EpifuseError) as caught:
        run_source(SOURCES[key]) if key in SOURCES else CALLS[key]()
    error = caught.value
    assert error.key == key, str(error)
    assert type(error) is CATALOGUE[key].kind
    assert error.loc is not None or key not in SOURCES
    text = f"{type(error).__name__}: {error}"
    if request.config.getoption("--update-golden"):
        written(key, text)
    else:
        assert text == sections().get(key), f"differs from {GOLDEN}; pytest --update-golden writes it"


def test_golden_sections_are_of_the_catalogue(request: pytest.FixtureRequest) -> None:
    """A section that no test compares is stale. While the file is written anew it is in between."""
    if not request.config.getoption("--update-golden"):
        assert sorted(sections().keys() ^ CATALOGUE.keys()) == []
        assert list(sections()) == list(CATALOGUE)


def test_writing_drops_a_stale_section(tmp_path: Path) -> None:
    path = tmp_path / "errors.txt"
    path.write_text("## no_such_key\nold\n\n## too_deep\nold\n", encoding="utf-8")
    written("not_python", "first\n  second", path)
    assert sections(path) == {"not_python": "first\n  second", "too_deep": "old"}


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


@pytest.mark.parametrize("place", [0, 30, 60, 150, 290])
def test_a_long_line_says_where_it_is_cut(place: int) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(300))
    shown, carets = str(Loc("file.py", 1, place, 1, text)).splitlines()[1:]
    assert shown[carets.index("^")] == text[place]
    whole = shown.strip().removeprefix("...").removesuffix("...")
    assert whole in text
    assert shown.strip().startswith("...") != text.startswith(whole)
    assert shown.strip().endswith("...") != text.endswith(whole)


def test_a_long_chain_of_helpers_is_cut() -> None:
    chain = "".join(f"def h{i}(x):\n    return h{i + 1}(x)\n" for i in range(300))
    with pytest.raises(EpifuseError) as caught:
        gemm(function_from(chain + "def h300(x):\n    return x + 'a'\n\ndef epi(accum):\n    return h0(accum)\n"))
    assert caught.value.key == "not_a_value"
    assert str(caught.value).count("called from") == 4
