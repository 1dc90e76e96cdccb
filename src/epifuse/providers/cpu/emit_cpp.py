"""The epilogue as one C++ loop over vectors of float32: every operand is read once, every output written once.

Transcendental functions are SLEEF's, with an error of at most one ulp. PyTorch exports them, and uses them itself where
it does not call MKL. All other operations equal PyTorch's to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from epifuse.fusion import philox
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Graph, Node

LANES: Mapping[str, int] = {"AVX512": 16, "AVX2": 8}
"""Elements of a vector by `torch.backends.cpu.get_cpu_capability()`. Other machines have no such kernel yet."""

# The C++ expression of each primitive, on vectors; {0} {1} {2} are the arguments.
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
    "atan2": "atan2f",
}
RANDOM = ("philox_rand", "philox_rand_cpp")
"""The primitives that take a seed and a position. The loop computes with no other integers than these two."""

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

# AVX multiplies 32 by 32 bits in every second lane, so even and odd lanes are multiplied apart: 3.6 ns a number on one
# core, against 5.6 ns lane by lane.
_PHILOX = """
typedef unsigned long d __attribute__((vector_size({bytes}), aligned(4), may_alias));
static inline w above(unsigned long factor, w c) {{
  return (w)((((d)c & 0xffffffff) * factor >> 32) | (((d)c >> 32) * factor & 0xffffffff00000000));
}}
static inline v uniform(m bits) {{ return __builtin_convertvector(bits, v) * {scale}f; }}
static inline w philox(unsigned low, unsigned high, w a) {{
  w b{{}}, c{{}}, e{{}};
  for (int i = 0; i < {rounds}; i++) {{
    w first = above({factors[0]}, a), second = above({factors[1]}, c), last = a * {factors[0]};
    a = second ^ b ^ low; b = c * {factors[1]}; c = first ^ e ^ high; e = last;
    low += {steps[0]}; high += {steps[1]};
  }}
  return a;
}}
static inline v philox_rand(unsigned long seed, w at) {{
  m word = (m)philox(seed, seed >> 32, at);
  return uniform(word < 0 ? ~word : word);
}}
static inline v philox_rand_cpp(unsigned long seed, w at) {{ return uniform((m)philox(seed, 0, at) & 0x7fffffff); }}
static const w lanes = {{{lanes}}};
"""

_FUNCTION = """
static inline void step({pointers}, {vectors}) {{
{body}
}}
extern "C" void epilogue(char** p, const long* strides, const float* numbers, const long* integers, long rows,
                         long columns, int threads) {{
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

_RANDOM_LOOP = """
extern "C" void epilogue(const char* at, char* to, unsigned long seed, long count, int threads) {{
  #pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < count; i += {lanes}) {{
    w places{{}};
    long bytes = 4 * (count - i < {lanes} ? count - i : {lanes});
    __builtin_memcpy(&places, at + 4 * i, bytes);
    v found = {name}(seed, places);
    __builtin_memcpy(to + 4 * i, &found, bytes);
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


class Inputs(NamedTuple):
    """What the loop reads besides its streams: `columns` have one number for each row, `scalars` one number in all,
    `seeds` one integer of 64 bits, and `positions` are the linear positions of elements."""

    columns: Sequence[Node]
    scalars: Sequence[Node]
    seeds: Sequence[Node]
    positions: Sequence[Node]


def emit(graph: Graph, streams: Sequence[Stream], inputs: Inputs, lanes: int) -> str:
    """The C++ source of the loop. `streams` vary along a row.

    Its function takes pointers in the order streams, then columns; `strides` are bytes from row to row in the same
    order. `integers` are the seeds, then three numbers for each position: its start, and its steps from row to row and
    from column to column.
    """
    names: dict[Node, str] = {node: f"n{i}" for i, node in enumerate(inputs.scalars)}
    names |= {node: f"k{i}" for i, node in enumerate(inputs.columns)}
    names |= {node: f"s{i}" for i, node in enumerate(inputs.seeds)}
    names |= {node: f"i{i}" for i, node in enumerate(inputs.positions)}
    body = [f"  v x{i} = read_{NAMES[s.dtype]}(a{i});" for i, s in enumerate(streams) if not s.output]
    names |= {s.node: f"x{i}" for i, s in enumerate(streams) if not s.output}
    for node in graph.nodes:
        if node.op == "const":
            names[node] = _constant(node, is_mask=graph.types[node].kind == "mask")
        elif node not in names:
            names[node] = f"t{len(names)}"
            vector = "m" if graph.types[node].kind == "mask" else "v"
            body.append(f"  {vector} {names[node]} = {_apply(graph, node, names, lanes)};")
    body += [f"  write_{NAMES[s.dtype]}(a{i}, {names[s.node]});" for i, s in enumerate(streams) if s.output]
    return _prelude([node.op for node in graph.nodes], lanes) + _function(streams, inputs, body, lanes)


def _constant(node: Node, *, is_mask: bool) -> str:
    if is_mask:
        return "(m{} - 1)" if node.attr else "m{}"
    value = float(node.attr)
    if value != value or value in (float("inf"), float("-inf")):
        text = '__builtin_nanf("")' if value != value else f"{'-' if value < 0 else ''}__builtin_inff()"
    else:
        text = f"{value.hex()}f"
    return f"(v{{}} + ({text}))" if value or str(value)[0] != "-" else "(-v{})"


def _apply(graph: Graph, node: Node, names: Mapping[Node, str], lanes: int) -> str:
    args = [names[arg] for arg in node.args]
    if node.op in RANDOM:
        seed, position = node.args
        return (
            f"{node.op}({f'{seed.attr & (1 << 64) - 1}ul' if seed.op == 'const' else names[seed]}, {names[position]})"
        )
    if graph.types[node].kind == "float" or PRIMITIVES[node.op].rule == "compare":
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
        f'extern "C" v Sleef_{SLEEF[op]}{lanes}_u10({"v, v" if PRIMITIVES[op].arity == 2 else "v"});'
        for op in dict.fromkeys(used)
        if op in SLEEF
    ]
    text = _PRELUDE.format(bytes=4 * lanes, half=2 * lanes, lanes=lanes, declarations="\n".join(declarations))
    return text + _philox(lanes) if any(op in used for op in RANDOM) else text


def _philox(lanes: int) -> str:
    return _PHILOX.format(
        bytes=4 * lanes,
        lanes=", ".join(map(str, range(lanes))),
        rounds=philox.ROUNDS,
        factors=[f"{factor}u" for factor in philox.MULTIPLIERS],
        steps=[f"{step}u" for step in philox.KEY_STEPS],
        scale=philox.SCALE,
    )


def random_loop(name: str, lanes: int) -> str:
    """The C++ source of a loop that draws random numbers with the primitive `name`, for contiguous positions."""
    return _prelude([name], lanes) + _RANDOM_LOOP.format(name=name, lanes=lanes)


def _function(streams: Sequence[Stream], inputs: Inputs, body: Sequence[str], lanes: int) -> str:
    columns, scalars, seeds, positions = map(len, inputs)
    count = len(streams)
    vectors = [f"v n{i}" for i in range(scalars)] + [f"v k{i}" for i in range(columns)]
    vectors += [f"unsigned long s{i}" for i in range(seeds)] + [f"w i{i}" for i in range(positions)] + ["int = 0"]
    arguments = [f"n{i}" for i in range(scalars)] + [f"k{i}" for i in range(columns)]
    arguments += [f"s{i}" for i in range(seeds)] + [f"i{i} + (unsigned)c * right{i}" for i in range(positions)] + ["0"]
    numbers = [f"  v n{i} = v{{}} + numbers[{i}];" for i in range(scalars)]
    numbers += [f"  unsigned long s{i} = integers[{i}];" for i in range(seeds)]
    numbers += [
        f"  unsigned start{i} = integers[{at}], down{i} = integers[{at + 1}], right{i} = integers[{at + 2}];"
        for i, at in enumerate(range(seeds, seeds + 3 * positions, 3))
    ]
    rows = [f"    char* q{i} = p[{i}] + r * strides[{i}];" for i in range(count)]
    rows += [
        f"    v k{i} = v{{}} + *(const float*)(p[{count + i}] + r * strides[{count + i}]);" for i in range(columns)
    ]
    rows += [f"    w i{i} = lanes * right{i} + (start{i} + (unsigned)r * down{i});" for i in range(positions)]
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
        numbers="\n".join(numbers),
        rows="\n".join(rows),
        lanes=lanes,
        whole=", ".join(f"q{i} + c * {s.size}" for i, s in enumerate(streams)),
        arguments=", ".join(arguments),
        tail="\n".join(tail),
    )
