"""The epilogue as one C++ loop over vectors of float32: every operand is read once, every output written once.

Transcendental functions are SLEEF's, which PyTorch exports and uses itself where it does not call MKL: good to one ulp.
Everything else is PyTorch's to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from epifuse.ir import Graph, Node

LANES: Mapping[str, int] = {"AVX512": 16, "AVX2": 8}
"""Vector width by `torch.backends.cpu.get_cpu_capability()`; other machines have no such kernel yet."""

# One row a primitive, over vectors; {0} {1} {2} are the arguments.
ROWS: Mapping[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "abs": "magnitude({0})",
    "sign": "sign({0})",
    "multiply_add": "{0} * {1} + {2}",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "clip": "smaller(larger({0}, {1}), {2})",
    "sqrt": "root({0})",
    "rsqrt": "one / root({0})",
    "reciprocal": "one / {0}",
    "floor": "down({0})",
    "ceil": "up({0})",
    "round": "nearest({0})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "~{0}",
    "where": "{0} ? {1} : {2}",
}
SLEEF: Mapping[str, str] = {
    name: f"{name}f" for name in ("exp", "exp2", "log", "log2", "log1p", "sin", "cos", "tan")
} | {
    "tanh": "tanhf",
    "erf": "erff",
    "pow": "powf",
}

_PRELUDE = """
typedef float v __attribute__((vector_size({bytes}), aligned(4), may_alias));
typedef int m __attribute__((vector_size({bytes}), aligned(4), may_alias));
typedef unsigned short h __attribute__((vector_size({half}), aligned(2), may_alias));
typedef unsigned w __attribute__((vector_size({bytes}), aligned(4), may_alias));
{declarations}
static const v one = v{{}} + 1.0f;
static inline v larger(v a, v b) {{ v r = a < b ? b : a; return b != b ? b : r; }}
static inline v smaller(v a, v b) {{ v r = a > b ? b : a; return b != b ? b : r; }}
static inline v magnitude(v a) {{ return (v)((m)a & 0x7fffffff); }}
static inline v sign(v a) {{ return (a > 0.0f ? one : v{{}}) - (a < 0.0f ? one : v{{}}); }}
static inline v root(v a) {{ v r; for (int i = 0; i < {lanes}; i++) r[i] = __builtin_sqrtf(a[i]); return r; }}
static inline v down(v a) {{ v r; for (int i = 0; i < {lanes}; i++) r[i] = __builtin_floorf(a[i]); return r; }}
static inline v up(v a) {{ v r; for (int i = 0; i < {lanes}; i++) r[i] = __builtin_ceilf(a[i]); return r; }}
static inline v nearest(v a) {{ v r; for (int i = 0; i < {lanes}; i++) r[i] = __builtin_rintf(a[i]); return r; }}
static inline v read_f32(const char* p) {{ return *(const v*)p; }}
static inline v read_bf16(const char* p) {{ return (v)(__builtin_convertvector(*(const h*)p, w) << 16); }}
static inline void write_f32(char* p, v x) {{ *(v*)p = x; }}
static inline void write_bf16(char* p, v x) {{
  w bits = (w)x;
  w rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *(h*)p = __builtin_convertvector(x != x ? (m)((bits >> 16) | 0x40) : (m)rounded, h);
}}
"""

_FUNCTION = """
static inline void step({pointers}, {vectors}) {{
{body}
}}
extern "C" void epilogue(char** p, const long* strides, const float* numbers, long rows, long columns, int threads) {{
{numbers}
  #pragma omp parallel for num_threads(threads) schedule(static)
  for (long r = 0; r < rows; r++) {{
{rows}
    long c = 0;
    for (; c + {lanes} <= columns; c += {lanes}) step({whole}, {arguments});
    if (c < columns) {{
      long left = columns - c;
{tail}
    }}
  }}
}}
"""

NAMES: Mapping[torch.dtype, str] = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Stream:
    """One tensor the loop walks along a row: the accumulator, an operand or an output."""

    node: Node
    dtype: torch.dtype
    output: bool

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


def emit(graph: Graph, streams: Sequence[Stream], columns: Sequence[Node], scalars: Sequence[Node], lanes: int) -> str:
    """C++ source. `streams` vary along a row, `columns` are one number a row, `scalars` one number in all.

    Pointers come in the order streams, then columns; `strides` are bytes from row to row in the same order.
    """
    names: dict[Node, str] = {node: f"n{i}" for i, node in enumerate(scalars)}
    names |= {node: f"k{i}" for i, node in enumerate(columns)}
    body = [f"  v x{i} = read_{NAMES[s.dtype]}(a{i});" for i, s in enumerate(streams) if not s.output]
    names |= {s.node: f"x{i}" for i, s in enumerate(streams) if not s.output}
    for node in graph.nodes:
        if node.op == "const":
            names[node] = _constant(node)
        elif node not in names:
            names[node] = f"t{len(names)}"
            vector = "m" if graph.types[node].kind == "mask" else "v"
            body.append(f"  {vector} {names[node]} = {_apply(graph, node, names, lanes)};")
    body += [f"  write_{NAMES[s.dtype]}(a{i}, {names[s.node]});" for i, s in enumerate(streams) if s.output]
    used = [node.op for node in graph.nodes if node.op in SLEEF]
    return _prelude(used, lanes) + _function(streams, columns, scalars, body, lanes)


def _constant(node: Node) -> str:
    value = float(node.attr)
    if value != value or value in (float("inf"), float("-inf")):
        text = '__builtin_nanf("")' if value != value else f"{'-' if value < 0 else ''}__builtin_inff()"
    else:
        text = f"{value.hex()}f"
    return f"(v{{}} + ({text}))" if value or str(value)[0] != "-" else "(-v{})"


def _apply(graph: Graph, node: Node, names: Mapping[Node, str], lanes: int) -> str:
    args = [names[arg] for arg in node.args]
    if graph.types[node].kind == "float" or node.op in ("eq", "ne", "lt", "le", "gt", "ge"):
        start = 1 if node.op == "where" else 0
        args = [
            f"({a} ? one : v{{}})" if i >= start and graph.types[arg].kind == "mask" else a
            for i, (a, arg) in enumerate(zip(args, node.args, strict=True))
        ]
    if node.op in SLEEF:
        return f"Sleef_{SLEEF[node.op]}{lanes}_u10({', '.join(args)})"
    return ROWS[node.op].format(*args)


def _prelude(used: Sequence[str], lanes: int) -> str:
    declarations = [
        f'extern "C" v Sleef_{SLEEF[op]}{lanes}_u10({"v, v" if op == "pow" else "v"});' for op in dict.fromkeys(used)
    ]
    return _PRELUDE.format(bytes=4 * lanes, half=2 * lanes, lanes=lanes, declarations="\n".join(declarations))


def _function(
    streams: Sequence[Stream], columns: Sequence[Node], scalars: Sequence[Node], body: Sequence[str], lanes: int
) -> str:
    count = len(streams)
    vectors = [f"v n{i}" for i in range(len(scalars))] + [f"v k{i}" for i in range(len(columns))] + ["int = 0"]
    arguments = [f"n{i}" for i in range(len(scalars))] + [f"k{i}" for i in range(len(columns))] + ["0"]
    rows = [f"    char* q{i} = p[{i}] + r * strides[{i}];" for i in range(count)]
    rows += [
        f"    v k{i} = v{{}} + *(const float*)(p[{count + i}] + r * strides[{count + i}]);" for i in range(len(columns))
    ]
    tail = [f"      char b{i}[{s.size * lanes}] = {{0}};" for i, s in enumerate(streams)]
    tail += [
        f"      __builtin_memcpy(b{i}, q{i} + c * {s.size}, left * {s.size});"
        for i, s in enumerate(streams)
        if not s.output
    ]
    tail.append(f"      step({', '.join(f'b{i}' for i in range(count))}, {', '.join(arguments)});")
    tail += [
        f"      __builtin_memcpy(q{i} + c * {s.size}, b{i}, left * {s.size});"
        for i, s in enumerate(streams)
        if s.output
    ]
    return _FUNCTION.format(
        pointers=", ".join(f"char* a{i}" for i in range(count)),
        vectors=", ".join(vectors),
        body="\n".join(body),
        numbers="\n".join(f"  v n{i} = v{{}} + numbers[{i}];" for i in range(len(scalars))),
        rows="\n".join(rows),
        lanes=lanes,
        whole=", ".join(f"q{i} + c * {s.size}" for i, s in enumerate(streams)),
        arguments=", ".join(arguments),
        tail="\n".join(tail),
    )
