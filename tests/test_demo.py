"""The demo, the command line and the picture: what they say is so."""

import builtins
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import pytest
import torch

import epifuse as ef
from epifuse import demo
from epifuse.cli import main
from epifuse.debug import STAGE_COLOURS, peak_bytes, to_dot, to_svg

SRC = Path(__file__).parents[1] / "src"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(SRC), **environment}
    run = [sys.executable, "-W", "error", "-m", "epifuse", *arguments]
    return subprocess.run(run, capture_output=True, text=True, env=variables)


# --- the demo ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    picture = tmp_path / "graph.svg"
    done = command("demo", "--svg", str(picture), "--rounds", "1", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (0, "")
    for shown in (
        "Device: the CPU; this machine has no GPU.",
        "%13 = reduce (sum, (m, n)) %12 : float[]  @finish",  # the graph
        "cpu_panel (torch's GEMM by panels, epilogue in cache)",  # the plan
        "runs on the CPU, and the target is sm_90a",  # a refusal
        f"The graph as a picture: {picture}",
        "8985 x 256 features, 16 million logits",
        "median of 1 paired rounds",
    ):
        assert shown in done.stdout
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    right = [float(percent) for percent in re.findall(r"([\d.]+)% of the digits right", done.stdout)]
    assert right[0] < 20 < 90 < right[-1], "it learns"
    allocated = [float(size) for size in re.findall(r"([\d.]+) MB allocated", done.stdout)]
    assert allocated[1] < allocated[0] / 10, "nothing of full size is allocated"
    errors = [float(error) for error in re.findall(r"relative error (\S+)", done.stdout)]
    assert len(errors) == 4
    assert max(errors) < torch.finfo(torch.float32).eps * 16


def small() -> demo.Problem:
    labels = torch.nn.functional.one_hot(torch.randint(10, (64,)), 10).double()
    return demo.Problem(torch.randn(64, 16).double(), torch.randn(16, 10).double(), labels, torch.randn(10).double())


def test_the_loss_is_the_articles() -> None:
    x, w, C, bias = problem = small()
    torch.testing.assert_close(ef.gemm(x, w, epilogue=demo.bce, C=C, bias=bias), demo.eager(*problem))


def test_the_gradient_is_autograds() -> None:
    x, w, C, bias = small()
    f = (x @ w + bias).requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(f, C, reduction="sum")
    loss.backward()
    total, G = ef.gemm(x, w, epilogue=demo.bce_and_gradient, C=C, bias=bias)
    torch.testing.assert_close(-total, loss.detach())
    torch.testing.assert_close(-G, f.grad)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((8, 0), "runs on the CPU, and the target is sm_80"), ((1, 2), "capability 12 is none of")],
)
def test_a_gpu_without_a_kernel_leaves_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a new GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert demo._device(torch.empty(64, 16)) == torch.device("cpu")
    said = capsys.readouterr().out
    assert "Device: the CPU. There is a new GPU, but no kernel for this epilogue on it:" in said
    assert reason in said


def test_a_gpu_with_a_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a new GPU")
    monkeypatch.setattr(demo, "_refusals_on_gpu", lambda _: ())
    assert demo._device(torch.empty(64, 16)) == torch.device("cuda")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.split(".")[0] in ("sklearn", "pygraphviz"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: demo.run(tmp_path / "x.svg", 1), lambda: to_svg(small().arguments.graph, tmp_path / "x.svg")):
        with pytest.raises(ef.errors.UnsupportedError, match=r"pip install 'epifuse\[demo\]'"):
            call()


# --- the command line --------------------------------------------------------------------------------------------


def test_docs_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    assert capsys.readouterr().out == (SRC.parent / "docs" / "language.md").read_text(encoding="utf-8")


def test_version() -> None:
    done = command("version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*|unknown: not installed", done.stdout.strip())


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--rounds", "many"]])
def test_a_wrong_command_says_how(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: epifuse" in capsys.readouterr().err


def test_an_error_of_ours_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise ef.errors.fail("missing_package", None, what="the demo", package="scikit-learn", extra="demo")

    monkeypatch.setattr(demo, "run", broken)
    with pytest.raises(SystemExit) as exit_:
        main(["demo"])
    assert exit_.value.code == 1
    assert capsys.readouterr().err.startswith("epifuse: the demo needs the package scikit-learn\n")


# --- the picture -------------------------------------------------------------------------------------------------

SCALE = 3


def everything(accum, C, alpha, column):
    t = accum * (alpha * 2) + C * SCALE
    D = ef.prelu(t, column) - 0.5
    E = D / D.abs().sum(dim=-1, keepdim=True)
    total = E.mean()
    F = ef.where(C < 1, E / total, t.to(torch.float16).float())
    return D, E, total, F


def graph_of_everything() -> ef.GemmArguments:
    operands = {"C": torch.empty(8, 6), "alpha": 2.0, "column": torch.empty(8, 1)}
    arguments = ef.EpilogueArguments.partial(everything, operands)
    return ef.GemmArguments(torch.empty(8, 4), torch.empty(4, 6), epilogue=arguments).graph


def test_dot(golden) -> None:
    golden(to_dot(graph_of_everything()))


def test_dot_shows_every_stage_and_the_roles_of_arguments() -> None:
    dot = to_dot(graph_of_everything())
    assert all(words in dot for _, _, words in STAGE_COLOURS.values())
    assert {"condition", "weight"} <= set(re.findall(r'label="(\w+)"', dot))


def test_dot_takes_a_graph_no_pass_has_seen() -> None:
    parsed = ef.EpilogueArguments.partial("def e(accum, C): return accum + C", {"C": 1.0}).parsed
    assert "<B>accum = A @ B</B>" in to_dot(parsed.graph)


def test_svg_holds_every_title(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    graph = graph_of_everything()
    path = to_svg(graph, tmp_path / "graph.svg")
    drawn = {"".join(text.itertext()) for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    titles = {unescape(title) for title in re.findall(r"<B>(.*?)</B>", to_dot(graph))}
    assert len(titles) > 10
    assert titles <= drawn
    assert capfd.readouterr().err == ""


def test_peak_bytes_counts_what_is_alive_together() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        second = torch.empty(3000, dtype=torch.uint8)
        return torch.empty(2000, dtype=torch.uint8) + second[:2000]

    assert peak_bytes(run) == 7000
