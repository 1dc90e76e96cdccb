"""Elementwise statements: a primitive or an activation, applied to values that fit it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import VOCABULARY
from fuzzing.rules import DOMAIN, EXACT, GUARDED_ALWAYS, SELECTING, smooth
from fuzzing.spelling import tight, torch_forms, wrapped
from fuzzing.values import RANK, Dims, Facts, Kind, Val, broadcast, exact_limit, promote
from fuzzing.writer import Writer

ACTIVATIONS = {name: len(e.signature.parameters) for name, e in VOCABULARY.items() if e.group == "activation"}
DERIVATIVES = frozenset({"dsilu", "dgelu_erf", "dgelu_tanh"})
ELEMENTWISE = (*(name for name, row in PRIMITIVES.items() if row.rule != "random"), *ACTIVATIONS)


def elementwise(writer: Writer) -> Val | None:
    """A primitive or an activation. All have the same probability."""
    return apply(writer, writer.rng.choice(ELEMENTWISE))


def mix(writer: Writer) -> None:
    """Join all values, two by two in random order, into one value that depends on all of them: `writer.rich`."""
    pool = list(writer.values)
    writer.rng.shuffle(pool)
    while len(pool) > 1:
        joined = _joined(writer, pool[-1], pool[-2])
        if joined is not None:
            del pool[-2:]
            pool.insert(writer.rng.randrange(len(pool) + 1), writer.assign(joined))
        else:
            pool.pop(writer.rng.choice((-1, -2)))
    writer.rich = pool[0]


def _joined(writer: Writer, first: Val, second: Val) -> Val | None:
    if broadcast([first.dims, second.dims]) is None:
        return None
    if first.kind == second.kind == "mask":
        return apply(writer, writer.rng.choice(("logical_and", "logical_or", "eq")), [first, second])
    if "mask" in (first.kind, second.kind):
        mask, other = (first, second) if first.kind == "mask" else (second, first)
        other = writer.tame(other)
        if writer.rng.random() < 0.5:
            return apply(writer, "mul", [mask, other])
        return apply(writer, "where", [mask, other, writer.number("int" if other.kind == "int" else "float")])
    name = writer.rng.choice(("add", "add", "sub", "mul", "maximum", "minimum"))
    return apply(writer, name, [writer.tame(first), writer.tame(second)])


def apply(writer: Writer, name: str, args: list[Val] | None = None) -> Val | None:
    """The operation `name` of these values, or of chosen values that fit it. None if it cannot be applied."""
    args = args or _arguments(writer, name)
    if args is None:
        return None
    kind = _kind(name, [arg.kind for arg in args])
    args = _guarded(writer, name, args)
    dims = broadcast([arg.dims for arg in args])
    if dims is None or kind is None or all(arg.host for arg in args):
        return None
    narrow = _narrow(args) if kind == "float" else None
    facts = result_facts(writer, name, args, kind, narrow)
    if facts is None:
        return None
    return Val(_spell(writer, name, args), kind, dims, facts, narrow=narrow)


def _arguments(writer: Writer, name: str) -> list[Val] | None:
    kinds = _wanted_kinds(writer, name)
    first = writer.rng.randrange(len(kinds)) if name in PRIMITIVES and len(kinds) > 1 else 0
    found: dict[int, Val] = {}
    for position in (first, *(i for i in range(len(kinds)) if i != first)):
        kind = kinds[position]
        # The bodies of derivatives cancel digits. With a number the reference would compute parts of them in double
        # precision.
        needs_tensor = (
            position == first
            or name in DERIVATIVES
            or kind == "mask"
            or (writer.rng.random() < 0.6 and _may_be_tensor(name, position))
        )
        value = (
            _tensor(writer, kind, [arg.dims for arg in found.values()]) if needs_tensor else writer.number(_plain(kind))
        )
        if value is None:
            return None
        found[position] = writer.tame(value)
    return [found[i] for i in range(len(kinds))]


def _tensor(writer: Writer, kind: Kind, others: list[Dims]) -> Val | None:
    def fits(value: Val) -> bool:
        return broadcast([value.dims, *others]) is not None

    wanted = writer.pick(lambda value: value.kind == kind and fits(value)) if writer.rng.random() < 0.7 else None
    value = wanted or writer.pick(fits)
    return None if value is None else writer.as_kind(value, kind)


def _wanted_kinds(writer: Writer, name: str) -> list[Kind]:
    if name not in PRIMITIVES:
        return ["float"] * ACTIVATIONS[name]
    row = PRIMITIVES[name]
    any_kind: tuple[Kind, ...] = ("float", "float", "float", "int")
    if name == "multiply_add":  # beside a float, PyTorch's product of integers wraps, and epifuse's is of floats
        return [writer.rng.choice(("float", "int"))] * row.arity
    if row.rule in ("integer", "bits"):
        return ["int"] * row.arity
    if row.rule == "logic":
        return ["mask"] * row.arity
    if row.rule in ("arithmetic", "compare", "same", "subtract"):
        kinds: list[Kind] = [writer.rng.choice(any_kind) for _ in range(row.arity)]
        if row.rule in ("arithmetic", "compare") and row.arity > 1 and writer.rng.random() < 0.15:
            kinds[writer.rng.randrange(row.arity)] = "mask"
        return kinds
    if row.rule == "select":
        return ["mask", writer.rng.choice(any_kind), writer.rng.choice(any_kind)]
    return ["float"] * row.arity


def _guarded(writer: Writer, name: str, args: list[Val]) -> list[Val]:
    if name in GUARDED_ALWAYS:
        divisor, places = args[1], (1, 2, 3, 7) if "shift" in name else (1, 2, 3, 7, -3)
        safe = f"clip({divisor.text}, 1, 7)" if not divisor.host else str(writer.rng.choice(places))
        return [args[0], divisor._replace(text=safe, facts=Facts(7.0))]
    if name == "pow" and (writer.frame.exact or writer.rng.random() < 0.5):
        power = writer.rng.choice((1, 2, 3, 3))
        return [args[0], Val(str(power), "int", (), Facts(power), True, literal=power)]
    # With exact data the sign of a zero is not defined, and so neither is the sign of its inverse.
    if name not in DOMAIN or (writer.rng.random() < 0.1 and not writer.frame.exact):
        writer.special |= name in DOMAIN
        return args
    patterns = DOMAIN[name]
    if writer.frame.exact:
        patterns = tuple(pattern.replace("0.25", "1.0").replace("0.5", "1.0") for pattern in patterns)
    return [wrapped(arg, pattern) for arg, pattern in zip(args, patterns, strict=True)]


def result_facts(writer: Writer, name: str, args: list[Val], kind: Kind, narrow: str | None) -> Facts | None:
    given = [arg.facts for arg in args]
    if not writer.frame.exact:
        facts = smooth(name, given) if kind == "float" else EXACT[name](*given)
        return facts if facts.bound < (1e30 if kind == "float" else 2.0**30) else None
    if name not in EXACT or (narrow and name not in PRIMITIVES and name not in SELECTING):
        return None
    if narrow and name in ("div", "pow"):
        return None
    if name == "div" and args[0].host:
        return None  # torch computes number / tensor as reciprocal(tensor) * number, which rounds differently
    floats = [facts for arg, facts in zip(args, given, strict=True) if arg.kind != "mask"]
    if name not in SELECTING and any(facts.rounded for facts in floats):
        return None
    facts = EXACT[name](*given)
    limit = exact_limit(kind)
    if not facts.rounded and kind != "mask" and (facts.bound / facts.step > limit or facts.bound > 2.0**30):
        return None
    return facts if narrow is None else facts._replace(bound=2.0 ** math.ceil(math.log2(max(facts.bound, 1.0))))


def _spell(writer: Writer, name: str, args: Sequence[Val]) -> str:
    texts = [arg.text for arg in args]
    forms = [f"{name}({', '.join(texts)})"]
    row = PRIMITIVES.get(name)
    if row is not None and row.symbol:
        forms += [f"({texts[0]} {row.symbol} {texts[1]})"] * 2
    if name == "neg":
        forms.append(f"(-{tight(texts[0])})")
    if name == "logical_not":
        forms.append(f"(~{tight(texts[0])})")
    if not any(arg.host for arg in args) and not writer.empty:
        forms += torch_forms(name, texts)
    return writer.rng.choice(forms)


def _may_be_tensor(name: str, position: int) -> bool:
    return position == 0 or name in PRIMITIVES or name in ("prelu", "drelu") or name.startswith("d")


def _plain(kind: Kind) -> Kind:
    return "int" if kind in ("int", "long") else "float"


def _narrow(args: Sequence[Val]) -> str | None:
    found = {arg.narrow for arg in args if arg.kind == "float" and not arg.host}
    return found.pop() if len(found) == 1 else None


def _kind(name: str, kinds: list[Kind]) -> Kind | None:
    if name not in PRIMITIVES:
        return "float" if RANK[kinds[0]] >= RANK["float"] else None
    rule = PRIMITIVES[name].rule
    if rule == "compare":
        return "mask"
    if rule == "logic":
        return "mask" if set(kinds) == {"mask"} else None
    if rule == "select":
        return promote(kinds[1:]) if kinds[0] == "mask" else None
    if set(kinds) == {"mask"} or (rule == "subtract" and "mask" in kinds):
        return None
    if rule in ("integer", "bits"):
        return promote(kinds) if set(kinds) <= {"int", "long"} else None
    if rule in ("floating", "divide"):
        return "float"
    if rule == "power":
        return "float" if kinds[0] == "float" else None
    return promote(kinds)
