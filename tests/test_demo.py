"""The demo, the command line and the picture: what they say is so."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python

import epifuse as ef
from epifuse.__main__ import main
from epifuse.tools import demo
from epifuse.tools.debug import STAGE_COLOURS, interleaved, peak_bytes, to_dot, to_svg

SRC = Path(__file__).parents[1] / "src"
Completed = subprocess.CompletedProcess[str]


BARE = """
import sys
sys.modules.update(dict.fromkeys(("sklearn", "pygraphviz", "matplotlib")))  # None: importing them fails
from epifuse.__main__ import main
raise SystemExit(main())
"""
"""`python -m epifuse` where no optional package is installed."""


def command(*arguments: str, program: Sequence[str] = ("-m", "epifuse"), **environment: str) -> Completed:
    path = os.pathsep.join(filter(None, (str(SRC), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    return run_python(*program, *arguments, options=("error",), env=variables)


# --- the demo ----------------------------------------------------------------------------------------------------


def told(done: Completed, problem: str, tolerance: float) -> None:
    """What every run of the demo must show."""
    assert (done.returncode, done.stderr) == (0, "")
    assert "%13 = reduce (sum, (m, n)) %12 : float[]  @finish" in done.stdout  # the graph
    assert problem in done.stdout
    assert "median of 1 paired rounds" in done.stdout
    right = [float(percent) for percent in re.findall(r"([\d.]+)% of the digits right", done.stdout)]
    assert right[0] < 20 < 90 < right[-1], "it learns"
    allocated = [float(size) for size in re.findall(r"([\d.]+) MB allocated", done.stdout)]
    assert allocated[1] < allocated[0] / 10, "nothing of full size is allocated"
    ours = [float(error) for error in re.findall(r"loss, epifuse .* relative error (\S+)", done.stdout)]
    assert len(ours) == 2
    assert max(ours) < tolerance


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    picture = tmp_path / "graph.svg"
    done = command("demo", "--svg", str(picture), "--rounds", "1", CUDA_VISIBLE_DEVICES="")
    told(done, "8960 x 256 features, 16 million logits", torch.finfo(torch.float32).eps * 16)
    for shown in (
        "this machine has no GPU.",
        "cpu_panel (torch's GEMM by panels, epilogue in cache)",  # the plan
        "runs on compute capability 90, and the target is cpu",  # a refusal
        "float32 in full: three tf32 products of the parts of A and B",  # the plan for a Hopper GPU
        f"The graph as a picture: {picture}",
    ):
        assert shown in done.stdout
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.slow
def test_the_demo_without_optional_packages(tmp_path: Path) -> None:
    picture = tmp_path / "graph.svg"
    run = ("demo", "--svg", str(picture), "--rounds", "1")
    done = command(*run, program=("-c", BARE), CUDA_VISIBLE_DEVICES="")
    told(done, "8960 x 256 features, 16 million logits", torch.finfo(torch.float32).eps * 16)
    left_out = [line for line in done.stdout.splitlines() if line.startswith("Left out:")]
    install, instead = (
        "hint: in a checkout of epifuse: pip install '.[demo]'; from a wheel: pip install 'FILE.whl[demo]'.",
        "Ten random patterns with noise take their place.",
    )
    assert left_out == [
        f"Left out: reading digits needs the package scikit-learn; {install} {instead}",
        f"Left out: the picture needs the package pygraphviz; {install}",
    ]
    assert not picture.exists()


@pytest.mark.gpu
def test_the_demo_on_a_gpu(tmp_path: Path) -> None:
    done = command("demo", "--svg", str(tmp_path / "graph.svg"), "--rounds", "1", program=("-c", BARE))
    told(done, "44800 x 1024 features, 80 million logits", 1e-4)
    assert f"Device: {torch.cuda.get_device_name()}." in done.stdout
    assert re.search(r"sm90_gemm.*\n  problem .* on sm_90a", done.stdout)
    eager, ours = (float(ms) for ms in re.findall(r"([\d.]+) ms  ", done.stdout))
    assert ours < eager


def test_hopper_carries_each_product_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The acts as on a GPU, computed here."""

    def planned(a: torch.Tensor, b: torch.Tensor, *, epilogue: Any, out: Any = None, **operands: Any) -> Any:
        given = ef.EpilogueArguments.partial(epilogue, operands if out is None else {**operands, "w": out})
        args = ef.GemmArguments(a, b, epilogue=given)
        assert ef.get_kernels(args, cc=90), ef.explain(args, cc=90)
        return ef.gemm(a, b, epilogue=epilogue, out=out, **operands)

    torch.manual_seed(0)
    setting = demo.GPU._replace(device=torch.device("cpu"), features=32, reach=1)
    pixels, digits = demo._patterns(397)
    monkeypatch.setattr(demo, "gemm", planned)
    demo._measure(demo._which_picture(pixels, setting), setting, 1)
    layer = demo._layer(pixels, digits, demo.LABELS)
    assert demo._learn(layer, digits) > 0.9


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
    a_gpu(monkeypatch, capability)
    assert demo._setting() == demo.CPU
    said = capsys.readouterr().out
    assert "Device: the CPU. There is a new GPU, but no kernel for this epilogue on it:" in said
    assert reason in said


def test_a_gpu_with_a_kernel_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a_gpu(monkeypatch, (9, 0))
    assert demo._setting() == demo.GPU
    assert capsys.readouterr().out == "Device: a new GPU.\n"


def a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a new GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    with pytest.raises(ef.errors.UnsupportedError, match=r"pip install '.\[demo\]'"):
        to_svg(small().arguments.graph, tmp_path / "x.svg")


# --- the command line --------------------------------------------------------------------------------------------


def test_docs_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    assert capsys.readouterr().out == (SRC.parent / "docs" / "language.md").read_text(encoding="utf-8")


def test_version() -> None:
    done = command("version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{ef.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--rounds", "many"], ["demo", "--rounds", "0"]])
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


def test_rounds_alternate_and_a_slow_run_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, order = [0.0], []

    def run(name: str, seconds: float) -> None:
        now[0] += seconds
        order.append(name)

    monkeypatch.setattr("epifuse.tools.debug.time.perf_counter", lambda: now[0])
    runs = {"slow": lambda: run("slow", 0.5), "quick": lambda: run("quick", 0.25)}
    seconds = interleaved(runs, torch.device("cpu"), 3)
    assert order == ["slow", "quick"] * 4
    assert seconds == {"slow": [0.5] * 3, "quick": [0.25] * 3}
    assert capsys.readouterr().out == "  1 of 3 rounds\n"


@pytest.mark.gpu
def test_time_and_memory_on_a_gpu() -> None:
    """A fill of 1 GB takes hundreds of microseconds of the device; the host that queues it takes ten."""
    device = torch.device("cuda")
    size = 1 << 30
    filled = torch.empty(size, dtype=torch.uint8, device=device)
    runs = {"whole": filled.zero_, "half": filled[: size // 2].zero_}
    whole, half = (min(times) for times in interleaved(runs, device, 9).values())
    assert 1.5 < whole / half < 2.5
    assert peak_bytes(lambda: torch.empty(size, dtype=torch.uint8, device=device), device) == size
