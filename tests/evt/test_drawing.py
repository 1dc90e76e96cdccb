"""A tree as a picture."""

import re
import sys
from pathlib import Path
from unittest import mock

import pytest

import epifuse as ef
from epifuse.forms.evt import EVT, AccFetch, AuxStore, Compute, ScalarBroadcast, SplitTreeVisitor
from tests.evt.test_article import EDGES, article


def boxes(dot: str) -> dict[str, str]:
    """Titles by name."""
    return dict(re.findall(r'^  "(\w+)" \[label=<<FONT[^>]*>(.*?)</FONT>', dot, re.MULTILINE))


def arrows(dot: str, *, dashed: bool) -> list[tuple[str, str]]:
    found = re.findall(r"^  (\w+) -> (\w+)(.*)$", dot, re.MULTILINE)
    return [(one, other) for one, other, rest in found if ("dashed" in rest) == dashed]


def test_every_node_is_a_box_under_its_visitor() -> None:
    dot = article().to_dot()
    titles, parents = boxes(dot), {other: one for one, other in arrows(dot, dashed=False)}
    lines = str(article()).splitlines()
    assert sorted(title for title in titles.values() if title != "EVT") == sorted(
        re.sub(r" <- .*", "", line.rpartition("─ ")[2]).split(": ")[-1] for line in lines
    )
    assert len(parents) == len(titles) - 1  # a tree: all but the root have one
    assert all(titles[parents[name]] == "EVT" for name in titles if name.endswith("_op"))


def test_the_edges_of_the_dag_are_dashed() -> None:
    assert len(arrows(article().to_dot(), dashed=True)) == sum(map(len, EDGES))


def test_colours_tell_kinds_apart() -> None:
    dot = EVT(AuxStore("x"), EVT(Compute(ef.mul), ScalarBroadcast("alpha"), AccFetch())).to_dot()
    fills = dict(re.findall(r'<FONT[^>]*>(.*?)</FONT>>, fillcolor="(#\w+)"', dot))
    assert sorted(fills) == ["AccFetch()", "AuxStore(x)", "Compute(mul)", "EVT", "ScalarBroadcast(alpha)"]
    assert len(set(fills.values())) == 5


def test_titles_are_escaped() -> None:
    dot = EVT(Compute(lambda x: x * 2), AccFetch()).to_dot()
    assert "Compute(&lt;lambda&gt;)" in dot


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("pygraphviz")
    tree = SplitTreeVisitor(article(), AccFetch())
    text = tree.to_svg(tmp_path / "tree.svg").read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "SplitTreeVisitor" in text
    assert ">output<" in text


def test_a_picture_without_the_package_is_refused(tmp_path: Path) -> None:
    with (
        mock.patch.dict(sys.modules, {"pygraphviz": None}),
        pytest.raises(ef.errors.UnsupportedError, match="pygraphviz"),
    ):
        article().to_svg(tmp_path / "tree.svg")
