"""An epilogue as a picture, and the time and memory that a call takes."""

from __future__ import annotations

import contextlib
import inspect
import os
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from epifuse.base.dtypes import short
from epifuse.base.errors import fail
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Graph, Load, Node
from epifuse.ir.graph import expression
from epifuse.ir.types import show_dims
from epifuse.passes.accesses import access_class
from epifuse.pytorch.report import Report, Row, counted

STAGE_COLOURS = {
    "tile": ("#dbeafe", "#2563eb", "in registers, tile by tile"),
    "row": ("#fef3c7", "#d97706", "once the row is complete"),
    "finish": ("#ede9fe", "#7c3aed", "a reduction, or after all tiles"),
    "again": ("#fee2e2", "#dc2626", "in a second sweep over the product"),
}
"""The fill colour, the border colour and the words of the legend, by stage."""

_OPERAND, _ACCUM, _OUTPUT = ("#dcfce7", "#16a34a"), ("#1e3a8a", "#1e3a8a"), ("#111827", "#111827")
_LEFT = ("#f3f4f6", "#6b7280")
_QUIET = "#6b7280"
_WIDE = 60
"""The most letters of a line below a title."""
_DEFAULTS = (
    'graph [bgcolor=white, fontname="Helvetica", fontsize=10, nodesep=0.3, ranksep=0.4, pad=0.2]',
    'node [fontname="Helvetica", fontsize=12, shape=box, style="rounded,filled", margin="0.14,0.07", height=0.3]',
    f'edge [fontname="Helvetica", fontsize=8, fontcolor="{_QUIET}", color="{_QUIET}", arrowsize=0.6]',
)


def to_dot(graph: Graph | Report) -> str:
    """Return `graph` in Graphviz's DOT language: operands green, operations coloured by stage, outputs black.

    A thick line carries a whole tile; a thin line carries a row, a column or a number. For the report of a compiled
    model the picture shows its products in their order, forward and backward, and equal products once. Those with an
    epilogue are blue, and say what the epilogue took in.
    """
    if isinstance(graph, Report):
        return "\n".join(("digraph report {", *_DEFAULTS, *_products(graph), "}\n"))
    names = {node: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = [line for node in graph.nodes for line in _node(node, graph, names)]
    for output in graph.outputs:
        dims = show_dims(output.dims) if output.dims is not None else ""
        lines.append(_box(f"out_{output.name}", output.name, dims, _OUTPUT, light=True))
        lines.append(f'{names[output.node]} -> "out_{output.name}" [{_width(output.node, graph)}]')
    body = "\n".join(f"  {line}" for line in (*_DEFAULTS, *_legend(graph), *lines))
    return f"digraph epilogue {{\n{body}\n}}\n"


def to_svg(graph: Graph | Report, path: str | os.PathLike[str]) -> Path:
    """Write `to_dot(graph)` as an SVG picture to `path`. Needs the package pygraphviz, which contains Graphviz itself.

    Raises `UnsupportedError` if it is not installed.
    """
    return draw(to_dot(graph), path)


def draw(dot: str, path: str | os.PathLike[str]) -> Path:
    """Write a picture of `dot` as SVG to `path`. Raises `UnsupportedError` if pygraphviz is not installed."""
    try:
        import pygraphviz
    except ImportError:
        raise fail("missing_package", None, what="the picture", package="pygraphviz", extra="demo") from None
    with _silent_stderr():
        drawn: bytes = pygraphviz.AGraph(string=dot).draw(format="svg", prog="dot")
    written = Path(path)
    written.write_bytes(drawn)
    return written


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what C code prints to stderr: Fontconfig's complaints about newer settings, the profiler's announcement."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


# --- nodes and edges ---------------------------------------------------------------------------------------------


def _node(node: Node, graph: Graph, names: Mapping[Node, str]) -> Iterator[str]:
    if node.op == "const":  # drawn below, once for each user
        return
    yield _box(
        names[node], _title(node, graph), _subtitle(node, graph), _colours(node, graph), light=node.op == "accum"
    )
    for position, (arg, role) in enumerate(zip(node.args, _roles(node), strict=True)):
        source = names[arg]
        if arg.op == "const":
            source = f"{names[node]}_{position}"
            yield f'{source} [label="{arg.attr}", shape=plaintext, style="", fontsize=11, fontcolor="{_QUIET}"]'
        yield f'{source} -> {names[node]} [label="{role}", {_width(arg, graph)}]'


def _box(name: str, title: str, subtitle: str, colours: tuple[str, str], *, light: bool = False) -> str:
    ink, quiet = ("white", "#d1d5db") if light else ("#111827", _QUIET)
    lines = "<BR/>".join(map(escape, textwrap.wrap(subtitle, _WIDE)))
    under = f'<BR/><FONT POINT-SIZE="9" COLOR="{quiet}">{lines}</FONT>' if lines else ""
    label = f'<FONT COLOR="{ink}"><B>{escape(title)}</B></FONT>{under}'
    return f'"{name}" [label=<{label}>, fillcolor="{colours[0]}", color="{colours[1]}"]'


def _title(node: Node, graph: Graph) -> str:
    match node.op:
        case "accum":
            return "accum = A @ B"
        case "load":
            name = str(node.attr.name)
            return (expression(graph.hosts[name]) if name in graph.hosts else name).replace("@", "")
        case "reduce" | "reduce_dims" | "reduce_axes":
            return str(node.attr[0])
        case "call" | "cast":
            return str(node.attr)
    row = PRIMITIVES.get(node.op)
    return row.symbol if row is not None and row.symbol else node.op


def _subtitle(node: Node, graph: Graph) -> str:
    type_ = graph.types.get(node)
    if type_ is None:
        return ""
    if node.op == "load" and isinstance(node.attr, Load):
        return f"{access_class(type_)}, {type_}"
    return str(type_)


def _colours(node: Node, graph: Graph) -> tuple[str, str]:
    if node.op == "accum":
        return _ACCUM
    return _OPERAND if node.op == "load" else STAGE_COLOURS[_stage(node, graph)][:2]


def _stage(node: Node, graph: Graph) -> str:
    """The key of `STAGE_COLOURS`. In a graph that no pass has seen each node is "tile"."""
    stage = graph.stages.get(node)
    if stage is None:
        return "tile"
    return "again" if stage.sweep > 0 else str(stage.kind)


def _width(source: Node, graph: Graph) -> str:
    type_ = graph.types.get(source)
    return "penwidth=1.8" if type_ is None or {"m", "n"} <= type_.axes else "penwidth=0.7"


def _roles(node: Node) -> tuple[str, ...]:
    """The label of each incoming line: the parameter's name if the order of the arguments matters, else nothing."""
    row = PRIMITIVES.get(node.op)
    if len(node.args) < 2 or (row is not None and row.commutative):
        return ("",) * len(node.args)
    function = VOCABULARY[str(node.attr) if node.op == "call" else node.op].function
    return tuple(inspect.signature(function).parameters)


def _legend(graph: Graph) -> Iterator[str]:
    used = {_stage(node, graph) for node in graph.nodes if node.op not in ("accum", "load", "const")}
    cells = [
        f'<TD BGCOLOR="{fill}" COLOR="{border}" BORDER="1" WIDTH="14"></TD><TD ALIGN="LEFT">{words}</TD>'
        for stage, (fill, border, words) in STAGE_COLOURS.items()
        if stage in used
    ]
    if cells:
        yield f'label=<<TABLE BORDER="0" CELLSPACING="6"><TR>{"".join(cells)}</TR></TABLE>>'


# --- the products of a model -----------------------------------------------------------------------------------------


def _products(report: Report) -> Iterator[str]:
    counts = Counter(replace(row, name="", measured=None) for row in report.rows)
    names = {row: f"p{index}" for index, row in enumerate(counts)}
    for where in dict.fromkeys(row.graph for row in counts):
        here = [row for row in counts if row.graph == where]
        yield f'subgraph cluster_{where} {{ label="{where}"; color="{_QUIET}"'
        for row in here:
            yield from _product(row, counts[row], names[row])
        yield from (f"{names[one]} -> {names[other]}" for one, other in pairwise(here))
        yield "}"


def _product(row: Row, count: int, name: str) -> Iterator[str]:
    shape = " × ".join(map(str, (*row.shape, row.k)))
    title = f"{f'{count} of ' if count > 1 else ''}{row.operation} {shape} {short(row.dtype)}"
    if row.fused:
        yield _box(
            name, title, f"{counted(row.taken)}; {row.bytes_saved / 1e6:.3g} MB saved", STAGE_COLOURS["tile"][:2]
        )
    else:
        yield _box(name, title, row.reason, _LEFT)
    for index, (operation, reason) in enumerate(row.left):
        yield _box(f"{name}_{index}", operation, reason, _LEFT)
        yield f"{{ rank=same; {name} -> {name}_{index} [style=dashed] }}"


# --- time and memory -----------------------------------------------------------------------------------------------

_FLUSH_BYTES = 1 << 30
_CPU = torch.device("cpu")


def interleaved(
    runs: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round, after `warmup` rounds that do not count. Prints its progress.

    On a GPU these are seconds of the device, measured by CUDA events, from an empty L2 cache. On the CPU they are
    wall-clock seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    said = time.perf_counter()
    for round_ in range(1 - warmup, rounds + 1):
        for name, run in runs.items():
            taken = _device_seconds(run, device) if device.type == "cuda" else _clock_seconds(run)
            if round_ > 0:
                seconds[name].append(taken)
        if 0 < round_ < rounds and time.perf_counter() - said > 1.0:
            said = time.perf_counter()
            print(f"  {round_} of {rounds} rounds", flush=True)
    return seconds


def _clock_seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _device_seconds(run: Callable[[], Any], device: torch.device) -> float:
    event: Any = torch.cuda.Event  # untyped
    with torch.cuda.device(device):
        start, stop = event(enable_timing=True), event(enable_timing=True)
        # Fills the L2 cache with data that no run reads. Meanwhile the host queues the run: its time is not measured.
        torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device).zero_()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def peak_bytes(run: Callable[[], Any], device: torch.device = _CPU) -> int:
    """Return the peak of the bytes that torch allocates on `device` while `run` runs, including its result."""
    return _peak_on_gpu(run, device) if device.type == "cuda" else _peak_on_cpu(run)


def _peak_on_gpu(run: Callable[[], Any], device: torch.device) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(run: Callable[[], Any]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _silent_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
    del result
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
