"""The benchmark programs without a GPU: what they conclude from measurements; pages show the committed ones."""

import copy
import importlib
import json
import re
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import compare_trees
import eight_bit_mlp
import gemm_cases
import gemm_epilogue
import gemm_report
import gemm_variants
import gpu_timing
import host_time
import model_time
import pytest
import small_products
import timing
import torch
import unaligned
import weight_only
from gemm_cases import CASES, Case, Operands, Peer
from processes import run_python

import epifuse as ef
from epifuse.base import cache
from epifuse.providers import cutedsl
from epifuse.runtime import arguments

ROOT = Path(__file__).parents[1]


def row(case: str, shape: tuple[int, int, int], own: float, **peers: float) -> dict[str, Any]:
    """A row whose ratios are exact, with an interval of one percent either way."""
    times = {"epifuse": own, **{name.replace("_", " "): time for name, time in peers.items()}}
    ratios = {name: [own / time, own / time - 0.01, own / time + 0.01] for name, time in times.items()}
    del ratios["epifuse"]
    return {
        "case": case,
        "shape": list(shape),
        "kernel": {"name": "sm90_gemm", "tile": [128, 192], "compile_seconds": 1.5},
        "peers": [name for name in times if not name.endswith(("epifuse", "plain"))],
        "microseconds": times,
        "ratios": ratios,
        "errors": {},
        "skipped": {},
    }


def results() -> dict[str, Any]:
    """A run in which every figure holds."""
    large, small, wave = (4096, 14336, 4096), (64, 14336, 4096), (1024, 2048, 4096)
    fused = {"eager": 120.0, "cuBLASLt": 102.0, "epifuse_plain": 99.0, "cuBLAS_plain": 103.0}
    return {
        "device": "NVIDIA H200",
        "multiprocessors": 132,
        "date": "2026-11-21",
        "rounds": 21,
        "rows": [
            row("plain", large, 95.0, cuBLAS=100.0, QuACK=97.0),
            row("plain", wave, 97.0, cuBLAS=100.0),
            row("plain", small, 110.0, cuBLAS=100.0),
            row("gelu", large, 100.0, **fused),
            row("gelu", wave, 102.5, **fused),
            row("gelu", small, 300.0, **fused),
            row("bce", large, 101.0, epifuse_plain=99.0, **{"torch.compile": 120.0}),
            row("softmax", (16384, 512, 4096), 95.0, **{"torch.compile": 103.0}),
        ],
        "host": {
            "microseconds": {"kernel.run": 11.0, "ef.gemm": 20.0, "bound": 9.0},
            "ratios": {"kernel.run": [1.2, 1.1, 1.3], "ef.gemm": [2.2, 2.1, 2.3], "bound": [0.95, 0.9, 1.0]},
        },
    }


def test_a_run_in_which_every_figure_holds() -> None:
    verdicts = gemm_report.verdicts(results())
    assert [str(verdict) for verdict in verdicts if not verdict.holds] == []
    assert len(verdicts) == 12


def failing(change: Any) -> list[str]:
    run = copy.deepcopy(results())
    change(run)
    return [verdict.claim for verdict in gemm_report.verdicts(run) if verdict.holds is False]


@pytest.mark.parametrize(
    ("position", "peer", "ratio", "claim"),
    [
        (0, "cuBLAS", 1.05, "geometric mean"),
        (1, "cuBLAS", 1.05, "none below 0.96"),
        (2, "cuBLAS", 1.12, "64 rows"),
        (3, "cuBLASLt", 1.02, "best peer"),
        (3, "epifuse plain", 1.04, "epifuse's plain time"),
        (4, "cuBLASLt", 1.02, "single wave"),
        (6, "torch.compile", 1.01, "reduced, M >= 1024"),
        (6, "epifuse plain", 1.04, "reduced, K >= 4096"),
        (7, "torch.compile", 1.02, "whole rows"),
    ],
)
def test_a_figure_that_fails_is_named(position: int, peer: str, ratio: float, claim: str) -> None:
    def change(run: dict[str, Any]) -> None:
        run["rows"][position]["ratios"][peer] = [ratio, ratio, ratio]

    assert any(claim in text for text in failing(change))


@pytest.mark.parametrize(("way", "ratio"), [("kernel.run", 1.31), ("ef.gemm", 2.51), ("bound", 1.01)])
def test_a_launch_that_costs_the_host_too_much_is_named(way: str, ratio: float) -> None:
    assert failing(lambda run: run["host"]["ratios"].update({way: [ratio, 0, 9]})) == [
        f"host time of {way} <= {gemm_report.HOST_LIMITS[way]} x torch.mm(out=)"
    ]


def test_a_slow_compilation_is_named() -> None:
    assert failing(lambda run: run["rows"][0]["kernel"].update(compile_seconds=3.5)) == [
        "cold compile of one kernel <= 3 s"
    ]


def test_a_shape_that_epifuse_does_not_run_fails() -> None:
    def change(run: dict[str, Any]) -> None:
        del run["rows"][3]["microseconds"]["epifuse"]
        run["rows"][3]["skipped"]["epifuse"] = "RuntimeError: no kernel"

    assert "epifuse runs" in failing(change)


def test_what_was_not_measured_is_neither_right_nor_wrong() -> None:
    assert {verdict.holds for verdict in gemm_report.verdicts({"rows": []})} == {None}


def test_the_best_peer_is_the_fastest_that_computes_the_same() -> None:
    assert gemm_report.best_peer(results()["rows"][3]) == "cuBLASLt", "the plain products are quicker, but no peers"
    assert gemm_report.best_peer(row("gelu", (1, 1, 1), 1.0)) is None


def test_shapes_with_more_than_one_wave_are_no_single_wave() -> None:
    rows = results()["rows"]
    assert [gemm_report.tiles(rows[3]), gemm_report.tiles(rows[4])] == [32 * 75, 8 * 11]


def test_speed_is_two_operations_an_element_and_step() -> None:
    assert gemm_report.speeds(row("plain", (1000, 1000, 1000), 2.0)) == {"epifuse": 1000.0}


def test_the_table() -> None:
    lines = gemm_report.table(results()).splitlines()
    assert lines[0] == (
        "NVIDIA H200, 2026-11-21, bfloat16, microseconds (medians of 21 rounds): epifuse, and the best peer."
    )
    column = lines[2].split(" | ").index("4096 x 14336 x 4096")
    assert lines[4].startswith("| `A @ B` | ")
    assert lines[4].rstrip(" |").split(" | ")[column] == "**95**, 97 QuACK"
    gelu = next(line for line in lines if line.startswith("| `gelu_tanh(A @ B + bias)` |"))
    assert gelu.rstrip(" |").split(" | ")[column] == "**100**, 102 cuBLASLt"


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "new" / "chart.png"
    gemm_report.chart(results(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("start", "end", "made"),
    [
        (gemm_report.START, gemm_report.END, gemm_report.section),
        (gemm_report.FIGURES_START, gemm_report.FIGURES_END, gemm_report.figures),
    ],
    ids=["table", "figures"],
)
def test_a_section_is_replaced_whole(start: str, end: str, made: Callable[[dict[str, Any]], str]) -> None:
    once = gemm_report.inserted(f"before\n{start}\nold\n{end}\nafter\n", results())
    assert once == f"before\n{made(results())}\nafter\n"
    assert gemm_report.inserted(once, results()) == once


def test_figures_have_their_conditions() -> None:
    run = results()
    run["rows"].append(row("plain", (4096, 4096, 4096), 181.4, cuBLAS=180.2))
    said = "On one NVIDIA H200, bfloat16, M x N x K: `A @ B` of 4096 x 4096 x 4096 takes 181 us, cuBLAS 180 us."
    assert " ".join(gemm_report.figures(run).partition("\n\n")[0].splitlines()[1:]) == said


def test_the_first_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = results()
    run["rows"].append(row("gelu", (16384, 4096, 1024), 187.0, eager=272.0))
    gemm_report.first_chart(run, tmp_path / "first.png")
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", gemm_report.PAGES)
def test_pages_show_the_committed_results(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert (gemm_report.START in page) != (gemm_report.FIGURES_START in page)
    committed = json.loads(gemm_epilogue.RESULTS.read_text())
    assert gemm_report.inserted(page, committed) == page, "run: python benchmarks/gemm_epilogue.py --publish"
    assert gemm_epilogue.RESULTS.with_suffix(".png").exists()


# --- the program -------------------------------------------------------------------------------------------------


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(str(ROOT / "benchmarks" / "gemm_epilogue.py"), *arguments)


def test_check_says_what_fails_and_exits_so(tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    saved.write_text(json.dumps(results()))
    good = program("--check", str(saved))
    assert (good.returncode, good.stdout.count("holds  ")) == (0, 12), good.stdout + good.stderr
    broken = results()
    broken["host"]["ratios"]["bound"] = [1.5, 1.4, 1.6]
    saved.write_text(json.dumps(broken))
    bad = program("--check", str(saved))
    assert bad.returncode == 1
    assert "FAILS  host time of bound <= 1.0 x torch.mm(out=): 1.500" in bad.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert gemm_epilogue.main([]) == 2


@pytest.mark.parametrize("arguments", [["--shapes", "1x2"], ["--shapes", "axbxc"], ["--peers", "cuDNN"]])
def test_options_are_checked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gemm_epilogue.main(arguments)
    assert "error: argument" in capsys.readouterr().err


def test_a_sample_lasts_but_not_for_ever() -> None:
    assert [gpu_timing.repeats_for(seconds) for seconds in (1.0, 1e-3, 0.5e-3, 1e-6, 0.0)] == [2, 2, 4, 20, 20]


def test_a_round_times_each_variant_once_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def sample(calls: gpu_timing.Calls, repeats: int, backlog: object, host_seconds: float) -> float:
        timed.append(calls[0]())
        return 1e-3

    monkeypatch.setattr(gpu_timing, "sample", sample)
    monkeypatch.setattr(gpu_timing, "host_seconds_of", lambda calls, backlog: 0.0)
    variants = {name: [lambda name=name: name] for name in "abc"}
    found = gpu_timing.interleave(variants, rounds=30, backlog=None, warmup=2)
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys("abc", 30)
    rounds = [tuple(timed[first : first + 3]) for first in range(3, len(timed), 3)]
    assert len(rounds) == 32
    assert all(sorted(order) == list("abc") for order in rounds)
    assert len(set(rounds)) == 6


# --- the variants, on the CPU ------------------------------------------------------------------------------------


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def everything(name: str) -> bool:
    return True


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_each_case_means_the_same_to_epifuse_and_pytorch(case: Case) -> None:
    sets = [Operands.random(64, 96, 32, "cpu") for _ in range(2)]
    direct = [name for name in case.peers if "QuACK" not in name]
    made = gemm_variants.build(case, sets, direct, everything)
    plain = [] if case.epilogue is None else ["epifuse plain", "cuBLAS plain"]
    assert made.skipped == {}
    assert list(made.calls) == ["epifuse", *direct, *plain]
    assert made.peers == direct
    assert [len(calls) for calls in made.calls.values()] == [2] * len(made.calls)


@pytest.mark.usefixtures("no_device")
def test_a_peer_that_computes_something_else_is_left_out() -> None:
    wrong = Peer(lambda x: (x.D.copy_(x.a @ x.b).mul_(1.02),))
    unwritten = Peer(lambda x: (x.D,))
    absent = Peer(lambda x: __import__("no_such_package"))
    case = Case("plain", "", gemm_cases._plain, peers={"wrong": wrong, "unwritten": unwritten, "absent": absent})
    made = gemm_variants.build(case, [Operands.random(64, 96, 32, "cpu")], None, lambda name: False)
    assert list(made.calls) == ["epifuse"]
    assert [reason.split(":")[0] for reason in made.skipped.values()] == [
        "WrongResultError",
        "WrongResultError",
        "ModuleNotFoundError",
        *["no time left to compile it"] * 2,
    ]


def test_the_host_time_of_every_way_to_launch() -> None:
    measured = host_time.measure("cpu", rounds=2, calls=1)
    assert gemm_report.HOST_LIMITS.keys() <= measured["ratios"].keys() < measured["microseconds"].keys()
    assert all(time > 0 for time in measured["microseconds"].values())


def test_the_host_time_of_a_layer() -> None:
    measured = host_time.measure_layers("cpu", rounds=2, calls=1)
    assert measured["ratios"].keys() < measured["microseconds"].keys()
    assert all(time > 0 for time in measured["microseconds"].values())


# --- what each pass gains, and what each front end costs ------------------------------------------------------------

passes = importlib.import_module("passes")
front_ends = importlib.import_module("front_ends")


def test_each_pass_has_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    passes.main(["--rounds", "2", "--size", "16", "--depth", "4", "--save", str(tmp_path / "passes.json")])
    on_cpu = [name for name, case in passes.CASES.items() if "cpu" in case.devices]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == on_cpu
    saved = json.loads((tmp_path / "passes.json").read_text())
    assert list(saved["passes"]) == on_cpu
    assert saved["refused"] == {}


def on_hopper(epilogue: Any) -> Any:
    """The graph that Hopper's kernel walks, planned as the benchmark does."""
    cache.forget()
    shapes = {"C": (64, 64), "onehot": (64, 64), "scale": (64, 1)}
    given = {
        name: torch.empty(shapes[name], dtype=torch.bfloat16, device="meta")
        for name in arguments.parsed(epilogue).parameters
    }
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 32), (32, 64)))
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, given))
    plan = passes.kernel_of(args, "cuda").plan
    return cutedsl.lower(plan.graph, plan.problem).walked


@pytest.mark.parametrize("name", passes.CASES)
def test_a_pass_leaves_less_to_do_on_hopper(name: str) -> None:
    """Fewer instructions of the kind that a GPU has few of, or fewer values at all."""
    case = passes.CASES[name]
    graph = on_hopper(case.epilogue)
    with nullcontext() if case.otherwise else passes.left_out(name):
        other = on_hopper(case.otherwise or case.epilogue)
    assert work(graph) < work(other)


def work(graph: Any) -> tuple[int, int]:
    """Functions that are no plain arithmetic, and values."""
    plain = {"accum", "load", "const", "add", "sub", "mul", "neg"}
    return sum(node.op not in plain for node in graph.nodes), len(graph.nodes)


def test_what_no_kernel_carries_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(passes.KERNELS, "cpu", "sm90_gemm")
    passes.main(["--rounds", "2", "--size", "16", "--depth", "4"])
    assert "prune                  not here: " in capsys.readouterr().out


def test_small_products_are_timed_beside_eager(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        small_products.main(["--rounds", "3", "--extent", "8", "--save", str(tmp_path / "saved.json")])
    finally:
        torch.set_num_threads(threads)
    saved = json.loads((tmp_path / "saved.json").read_text())["results"]
    assert [line.partition(" {")[0] for line in capsys.readouterr().out.splitlines()] == list(saved)
    for row in saved.values():
        assert {"eager", *row["ratio to eager"]} == set(row["microseconds"]) == {"eager", "bound", "ef.gemm"}


def test_ways_to_multiply_a_weight_of_8_bits_mean_the_same() -> None:
    inputs = weight_only.Inputs.of(3, 16, 32, "cpu")
    args = weight_only.arguments(inputs, torch.int8)
    found = ef.get_kernels(args)[0].run(args)["D"]
    want = weight_only._mm(inputs)().float() * inputs.scale
    torch.testing.assert_close(found.float(), want, rtol=0.02, atol=0.02)
    assert weight_only.mean_error(inputs) < 1e-6


def test_each_front_end_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        front_ends.main(["--rounds", "3"])
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.count(" us a call, ") == len(front_ends.variants(16, "cpu")) == 5


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_the_front_ends_are_one_kernel(device: str) -> None:
    first, *others = (call() for call in front_ends.variants(64, device).values())
    assert all(torch.equal(first, other) for other in others)


def test_a_run_that_ends_early_leaves_its_rows(tmp_path, monkeypatch, capsys):
    gpu_timing = importlib.import_module("gpu_timing")
    monkeypatch.setattr(gpu_timing, "Backlog", lambda: None)
    monkeypatch.setattr(gpu_timing, "machine", lambda device: {})
    path = tmp_path / "rows.json"
    options = gpu_timing.parser_of("about", "1x2x3,4x5x6").parse_args(["--save", str(path)])
    times, ratios = {"ours": 1.0, "theirs": 2.0}, {"both": [0, 1, 2]}
    row = {"kernels": {"ours": "its kernel"}, "microseconds": times, "ratios": ratios}

    def measure(shape, rounds, backlog):
        if shape != (1, 2, 3):
            raise KeyboardInterrupt
        return {"shape": [*shape], **row}

    with pytest.raises(KeyboardInterrupt):
        gpu_timing.measured(options, zip(options.shapes, strict=True), measure, gpu_timing.timed)
    assert [found["shape"] for found in json.loads(path.read_text())["rows"]] == [[1, 2, 3]]
    printed = capsys.readouterr().out
    assert "1x2x3" in printed
    assert "ours: 1.0 us, its kernel" in printed
    assert "theirs: 2.0 us, PyTorch" in printed


@pytest.mark.gpu
def test_passes_and_front_ends_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    passes.main(["--device", "cuda", "--rounds", "3", "--size", "512"])
    printed = capsys.readouterr().out
    assert "not here" not in printed
    assert [line.split()[0] for line in printed.splitlines()[1:]] == list(passes.CASES)
    front_ends.main(["--device", "cuda", "--rounds", "3"])
    assert capsys.readouterr().out.count(" us a call, ") == 5


# --- operands that TMA cannot address --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", gemm_cases.shapes(unaligned.SHAPES), ids=str)
def test_each_shape_has_the_kernels_it_is_to_time(shape: tuple[int, int, int]) -> None:
    x = Operands.random(*shape, "meta")
    names = [unaligned.chosen(own, x, cc=90)[1].metadata.kernel_name for own in unaligned.variants(shape).values()]
    architectures = [name.partition("_")[0] for name in names]
    assert architectures == (["sm90", "sm80"] if unaligned.is_aligned(shape) else ["sm90", "sm80", "sm90", "sm90"])


def test_each_pair_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleave(calls: Any, rounds: int, backlog: None) -> dict[str, list[float]]:
        return {name: [(1.0 + i) / 1e3] * rounds for i, name in enumerate(calls)}

    monkeypatch.setattr(unaligned, "interleave", interleave)
    monkeypatch.setattr(unaligned, "MULTISTAGE", None)  # the CPU has no such kernel
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    row = unaligned.measure((33, 21, 17), 3, None, "cpu")
    plain, gelu, *others = unaligned.lines(row)
    assert plain.split()[:6] == ["33x21x17", "plain", "torch.mm", "1000.0", "5000.0", "0.200"]
    assert "holds" in plain
    assert "holds" in gelu
    assert len(others) == 3
    row["ratios"]["plain / torch.mm"][1] = 0.91
    assert "FAILS" in next(unaligned.lines(row))


def test_a_wrong_result_is_not_timed() -> None:
    own, x = unaligned.Own(unaligned.PLAIN), Operands.random(33, 21, 17, "cpu")
    call, _ = unaligned.ours(own, x)
    assert unaligned.error(own, call, x) < 1e-2
    with pytest.raises(gemm_variants.WrongResultError):
        unaligned.error(own, lambda: (call(), x.D.mul_(1.02)), x)


# --- source trees beside each other ------------------------------------------------------------------------------


def test_trees_take_turns_and_are_compared_within_a_round() -> None:
    """A GPU that slows down from round to round moves no ratio."""
    asked = []

    def tree(name, factor):
        def sample():
            asked.append(name)
            return factor * (1 + len(asked) // 2)

        return sample

    found = compare_trees.compare({"before": tree("before", 1.0), "after": tree("after", 0.5)}, rounds=5, warmup=1)
    assert asked == ["before", "after"] * 6
    assert found["ratios"]["before"] == [1.0, 1.0, 1.0]
    assert all(0.5 <= ratio < 0.8 for ratio in found["ratios"]["after"])


@pytest.mark.parametrize("trees", [[], ["src"], ["a=src", "a=src"], ["a=docs"]], ids=str)
def test_a_tree_has_a_name_of_its_own_and_holds_the_library(trees, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        compare_trees.main(trees)
    assert "each tree needs its own name and a folder that holds epifuse/" in capsys.readouterr().err


def test_a_tree_without_a_kernel_says_why(capsys) -> None:
    assert compare_trees.main([f"now={ROOT / 'src'}", "--cases", "no such case", "--shapes", "64x64x64"]) == 1
    assert "failed: StopIteration" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_tree_beside_itself(tmp_path) -> None:
    src, saved = ROOT / "src", tmp_path / "found.json"
    options = ["--cases", "gelu", "--shapes", "512x512x128", "--rounds", "5", "--save", str(saved)]
    assert compare_trees.main([f"one={src}", f"other={src}", *options]) == 0
    (row,) = json.loads(saved.read_text())["rows"]
    assert row["kernels"]["one"] == row["kernels"]["other"]
    assert 0.5 < row["ratios"]["other"][0] < 2.0


@pytest.mark.parametrize("words", ["--save /home/x/a.json --host --chart=b.png", "--host --chart b.png --save=c.json"])
def test_a_saved_command_names_no_folder_of_whoever_ran_it(words: str) -> None:
    assert timing.command(["/some/where/x.py", *words.split()]) == "python benchmarks/x.py --host"


def test_no_result_names_a_folder_of_whoever_ran_it() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert re.findall(r"/(?:root|home|tmp|Users)/[^\"]*", path.read_text()) == [], path.name


def test_kernels_that_overlap_count_once():
    assert model_time.covered([]) == 0
    assert model_time.covered([(5, 9), (0, 4), (3, 6), (20, 21), (7, 8)]) == 9 + 1


@pytest.mark.parametrize("activation", eight_bit_mlp.ACTIVATIONS)
@pytest.mark.parametrize("kind", eight_bit_mlp.KINDS)
def test_both_ways_between_the_products_of_an_mlp_agree(kind, activation, capsys):
    """But for the 16 bits in which the separate kernel's input is stored."""
    calls = eight_bit_mlp.calls_of(activation, (96, 256, 128), "cpu", [kind], compiled=False)
    fused, separate = ([*made.values()] for made in (calls[kind](), _named(calls[f"{kind}, separate"]())))
    for one, other in zip(fused, separate, strict=True):
        one, other = (x.float().reshape(-1) for x in (one, other))
        assert (one - other).norm() < 0.05 * one.norm()


def _named(made):
    return dict(enumerate(made if isinstance(made, tuple) else (made,)))


def test_what_an_epilogue_saves_of_a_kernel():
    seconds = {"product": [10.0, 20.0], "static": [11.0, 22.0], "static, separate": [20.0, 40.0]}
    assert eight_bit_mlp.saved(seconds, "static") == pytest.approx((0.9, 0.9, 0.9))
