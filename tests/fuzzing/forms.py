"""Statements other than operations of the vocabulary: casts, layout, coordinates, Python's own expressions."""

from __future__ import annotations

import math

from fuzzing.elementwise import result_facts
from fuzzing.rules import EXACT
from fuzzing.spelling import tight
from fuzzing.values import Facts, Val, broadcast
from fuzzing.writer import Writer


def cast(writer: Writer) -> Val | None:
    """A cast to a narrow float that stays narrow, or a cast to a narrow dtype and back to float."""
    value = writer.pick(lambda v: v.kind in ("float", "int"))
    if value is None:
        return None
    if value.kind == "float" and writer.rng.random() < 0.4 and value.narrow is None:
        target = writer.rng.choice(("float16", "bfloat16"))
        facts = value.facts
        bound = 2.0 ** math.ceil(math.log2(max(facts.bound, 1.0)))
        if bound > 2.0**14:
            return None
        method = {"float16": "half", "bfloat16": "bfloat16"}[target]
        text = writer.rng.choice((f"{tight(value.text)}.to(torch.{target})", f"{tight(value.text)}.{method}()"))
        return value._replace(text=text, facts=facts._replace(bound=bound), narrow=target)
    limits = {"float8_e4m3fn": 440.0, "float8_e5m2": 5e4, "int8": 127.0, "int16": 3e4, "int32": 2.0**30}
    target = writer.rng.choice(tuple(limits))
    if value.facts.bound > limits[target] or (writer.special and target.startswith("int")):
        return None
    rough = value.facts._replace(bound=value.facts.bound * 1.5, rounded=not writer.frame.exact)
    if target.startswith("int"):
        rough = value.facts._replace(step=1.0 if writer.frame.exact else value.facts.step, rounded=False)
    return value._replace(
        text=f"{tight(value.text)}.to(torch.{target}).to(FLOAT)", kind="float", facts=rough, narrow=None
    )


def conditional(writer: Writer) -> Val | None:
    """Python's `a if flag else b`, where the flag compares a number of the host."""
    first = writer.pick()
    second = writer.pick(
        lambda v: first is not None and (v.kind, v.dims, v.narrow) == (first.kind, first.dims, first.narrow)
    )
    if first is None or second is None or not writer.numbers:
        return None
    flag = f"{writer.rng.choice(writer.numbers).text} > {writer.literal().text}"
    return first._replace(
        text=f"({first.text} if {flag} else {second.text})", facts=EXACT["maximum"](first.facts, second.facts)
    )


def clamp(writer: Writer) -> Val | None:
    """`clamp` with one or two bounds."""
    value = writer.pick(lambda v: v.kind == "float")
    if value is None:
        return None
    low, high = sorted((writer.literal(), writer.literal()), key=lambda v: v.literal or 0.0)
    bounds = [f"min={low.text}", f"max={high.text}"]
    del bounds[writer.rng.choice((0, 1, 2)) : writer.rng.choice((1, 2))]
    if not bounds:
        return None
    facts = EXACT["clip"](value.facts, low.facts, high.facts)
    form = writer.rng.choice((f"clamp({value.text}, {{}})", f"{tight(value.text)}.clamp({{}})"))
    return value._replace(text=form.format(", ".join(bounds)), facts=facts)


def index(writer: Writer) -> Val | None:
    """The coordinate of each element along one axis."""
    value = writer.pick(lambda v: v.dims[-2:] == ("m", "n"))
    if value is None:
        return None
    axis = writer.rng.choice("mnl")
    dims = {"m": ("m", "1"), "n": ("n",), "l": (value.dims[-3], "1", "1") if len(value.dims) > 2 else ("1", "1")}[axis]
    return Val(f"index_{axis}({value.text})", "int", dims, Facts(writer.frame.sizes.get(axis, 1)))


def unsqueeze(writer: Writer) -> Val | None:
    """A reduced vector with a dim of one, so that it broadcasts again."""
    value = writer.pick(lambda v: v.dims in (("m",), ("l", "m"), ("n",)))
    if value is None:
        return None
    if value.dims == ("n",):
        return value._replace(text=f"{tight(value.text)}[None, :]", dims=("1", "n"))
    text = writer.rng.choice((f"{tight(value.text)}[..., None]", f"{tight(value.text)}.unsqueeze(-1)"))
    return value._replace(text=text, dims=(*value.dims, "1"))


def split(writer: Writer) -> Val | None:
    """A reshape that splits an axis into two pieces, or joins its pieces again."""
    sizes = writer.frame.sizes
    value = writer.pick(lambda v: not v.raw and any(letter in v.dims for letter in ("m", "n", "h", "g")))
    if value is None or writer.empty:
        return None
    pairs = {"n": ("h", "d"), "m": ("g", "s")}
    for whole, parts in pairs.items():
        joined = "".join(value.dims).find("".join(parts))
        if joined >= 0:
            dims = (*value.dims[:joined], whole, *value.dims[joined + 2 :])
        elif whole in value.dims and all(part in sizes for part in parts):
            at = value.dims.index(whole)
            dims = (*value.dims[:at], *parts, *value.dims[at + 1 :])
        else:
            continue
        shape = ", ".join(str(sizes[letter]) for letter in dims)
        form = writer.rng.choice((f"reshape({value.text}, ({shape},))", f"{tight(value.text)}.reshape({shape})"))
        return value._replace(text=form, dims=dims)
    return None


def permute(writer: Writer) -> Val | None:
    """A permutation of the dims."""
    value = writer.pick(lambda v: len(v.dims) > 1 and not v.raw)
    if value is None:
        return None
    order = writer.rng.sample(range(len(value.dims)), len(value.dims))
    form = writer.rng.choice(
        (
            f"permute({value.text}, ({', '.join(map(str, order))}))",
            f"{tight(value.text)}.permute({', '.join(map(str, order))})",
        )
    )
    return value._replace(text=form, dims=tuple(value.dims[d] for d in order))


def helper(writer: Writer) -> Val | None:
    """A call of a function of the user, see `HELPERS`."""
    first = writer.pick(lambda v: v.kind == "float" and v.narrow is None)
    second = writer.pick(
        lambda v: (
            v.kind == "float" and v.narrow is None and first is not None and broadcast([v.dims, first.dims]) is not None
        )
    )
    if first is None or second is None or not writer.frame.helpers:
        return None
    first, second = writer.tame(first), writer.tame(second)
    dims = broadcast([first.dims, second.dims])
    facts = result_facts(writer, "multiply_add", [first, second, second], "float", None)
    if dims is None or facts is None:
        return None
    return Val(f"helper({first.text}, y={second.text})", "float", dims, facts)


HELPERS = '''
def inner(x, scale=2.0):
    """A helper of a helper."""
    return x * scale, x - scale


def helper(x, y):
    doubled, moved = inner(y)
    halved = doubled * 0.5
    return x * halved + (moved + 2.0)
'''
