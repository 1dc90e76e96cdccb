"""Writes the body of a random epilogue, statement by statement, from the registries of the vocabulary."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.fusion.vocabulary import METHODS, VOCABULARY, torchs
from fuzzing.rules import DOMAIN, EXACT, GUARDED_ALWAYS, SELECTING, smooth
from fuzzing.values import RANK, Dims, Facts, Kind, Val, broadcast, exact_limit, promote

ACTIVATIONS = {name: len(e.signature.parameters) for name, e in VOCABULARY.items() if e.group == "activation"}
RARE = frozenset({"floor_divide", "remainder", "pow", "logical_and", "logical_or", "logsumexp"})
DERIVATIVES = frozenset({"dsilu", "dgelu_erf", "dgelu_tanh"})
ELEMENTWISE = (*PRIMITIVES, *ACTIVATIONS)
_METHOD_NAMES = frozenset(METHODS)
_LARGEST = 60.0  # smooth values beyond this are scaled down before they are used again


class Frame(NamedTuple):
    """What holds for a whole epilogue. `sizes` gives each letter's extent; `special` data holds NaN and infinities."""

    sizes: Mapping[str, int]
    batched: bool
    exact: bool
    wide: bool
    special: bool
    helpers: bool


@dataclass
class Statement:
    """`name = text`, or a call for its effect where `name` is empty."""

    name: str
    text: str
    value: Val | None = None

    def __str__(self) -> str:
        return f"{self.name} = {self.text}" if self.name else self.text


@dataclass
class Writer:
    """The epilogue so far. A production gives an expression, or None where it has nothing to work on."""

    rng: random.Random
    frame: Frame
    values: list[Val]
    numbers: list[Val]
    statements: list[Statement] = field(default_factory=list)
    special: bool = False
    counter: int = 0
    rich: Val | None = None

    def __post_init__(self) -> None:
        self.special = self.frame.special
        self.empty = 0 in self.frame.sizes.values()

    # --- choosing ------------------------------------------------------------------------------------------------

    def assign(self, value: Val) -> Val:
        """The value under a name of its own."""
        name = f"t{self.counter}"
        self.counter += 1
        named = value._replace(text=name)
        self.statements.append(Statement(name, value.text, named))
        self.values.append(named)
        return named

    def pick(self, wanted: Callable[[Val], bool] = lambda value: True) -> Val | None:
        """A value, more often a recent one, or the one that all operands flowed into."""
        if self.rich is not None and self.rng.random() < 0.35 and wanted(self.rich):
            return self.rich
        found = [value for value in self.values if wanted(value)]
        if not found:
            return None
        return found[-1 - min(int(self.rng.expovariate(0.5)), len(found) - 1)]

    def literal(self, kind: Kind = "float") -> Val:
        """A small number: whole for integers, a multiple of a quarter where data is exact."""
        if kind == "int":
            number: float | int = self.rng.choice((-3, -2, -1, 0, 1, 2, 3, 5))
            return Val(
                f"({number})" if number < 0 else str(number), "int", (), Facts(abs(number)), True, literal=number
            )
        choices = (0.5, -0.5, 1.0, 2.0, -2.0, 0.25, 3.0, 4.0, 0.0)
        number = self.rng.choice(choices) if self.frame.exact else self.rng.randint(-128, 128) / 64
        step = abs(number) if number and math.log2(abs(number)).is_integer() else 0.25 if self.frame.exact else 1.0
        text = f"({number})" if number < 0 else str(number)
        return Val(text, "float", (), Facts(abs(number), step), True, literal=number)

    def number(self, kind: Kind = "float") -> Val:
        """A literal, a number operand, a captured number, or Python's arithmetic on them."""
        fitting = [number for number in self.numbers if number.kind == kind]
        if not fitting or self.rng.random() < 0.5:
            return self.literal(kind)
        found = self.rng.choice(fitting)
        if self.rng.random() < 0.5:
            return found
        other = self.literal(kind)
        op, rule = self.rng.choice((("+", "add"), ("*", "mul"), ("-", "sub")))
        return Val(f"({found.text} {op} {other.text})", kind, (), EXACT[rule](found.facts, other.facts), True)

    def as_kind(self, value: Val, kind: Kind) -> Val | None:
        """`value`, converted where it is of another kind."""
        if value.kind == kind:
            return value
        if kind == "mask":
            limit = self.literal("int" if value.kind in ("int", "long") else "float")
            return value._replace(
                text=f"({value.text} {self.rng.choice(('>', '<=', '!='))} {limit.text})", kind="mask", facts=Facts(1)
            )
        if kind == "float":
            return self._as_float(value)
        if kind == "int" and value.kind in ("float", "mask") and not self.special and value.facts.bound < 2.0**30:
            whole = Facts(value.facts.bound, 1.0, value.facts.rounded and not self.frame.exact)
            return value._replace(
                text=f"{_tight(value.text)}.to(torch.int32)", kind="int", facts=whole, narrow=None, raw=False
            )
        return None

    def _as_float(self, value: Val) -> Val:
        facts = value.facts._replace(rounded=value.facts.rounded or value.facts.bound >= 2.0**24)
        if value.kind == "mask" and self.rng.random() < 0.5:
            return value._replace(text=f"where({value.text}, 1.0, 0.0)", kind="float", facts=facts)
        return value._replace(text=f"{_tight(value.text)}.to(FLOAT)", kind="float", facts=facts)

    def tame(self, value: Val) -> Val:
        """`value` cut down where arithmetic on it would no longer be exact, or a smooth one would grow too large."""
        facts = value.facts
        if not self.frame.exact:
            if value.kind != "float" or facts.bound <= _LARGEST:
                return value
            scale = 2.0 ** -math.ceil(math.log2(facts.bound / 4))
            return value._replace(text=f"({value.text} * {scale})", facts=Facts(facts.bound * scale, rounded=True))
        if facts.bound / facts.step <= 2.0**9 or value.host or value.kind == "mask":
            return value
        if value.kind == "float" and not facts.rounded:
            low = max(-8.0, -facts.bound)
            return value._replace(text=f"clip({value.text}, {low}, 8.0)", facts=Facts(8.0, facts.step))
        return value

    # --- elementwise ---------------------------------------------------------------------------------------------

    def elementwise(self) -> Val | None:
        """A primitive or an activation, each as often as any other."""
        return self.apply(self.rng.choice(ELEMENTWISE))

    def mix(self) -> None:
        """All values flow together, two by two in random order, into one rich value."""
        pool = list(self.values)
        self.rng.shuffle(pool)
        while len(pool) > 1:
            joined = self._joined(pool[-1], pool[-2])
            if joined is not None:
                del pool[-2:]
                pool.insert(self.rng.randrange(len(pool) + 1), self.assign(joined))
            else:
                pool.pop(self.rng.choice((-1, -2)))
        self.rich = pool[0]

    def _joined(self, first: Val, second: Val) -> Val | None:
        if broadcast([first.dims, second.dims]) is None:
            return None
        if first.kind == second.kind == "mask":
            return self.apply(self.rng.choice(("logical_and", "logical_or", "eq")), [first, second])
        if "mask" in (first.kind, second.kind):
            mask, other = (first, second) if first.kind == "mask" else (second, first)
            other = self.tame(other)
            if self.rng.random() < 0.5:
                return self.apply("mul", [mask, other])
            return self.apply("where", [mask, other, self.number("int" if other.kind == "int" else "float")])
        name = self.rng.choice(("add", "add", "sub", "mul", "maximum", "minimum"))
        return self.apply(name, [self.tame(first), self.tame(second)])

    def apply(self, name: str, args: list[Val] | None = None) -> Val | None:
        """`name` of these values, or of some that fit it."""
        args = args or self._arguments(name)
        if args is None:
            return None
        kind = _kind(name, [arg.kind for arg in args])
        args = self._guarded(name, args)
        dims = broadcast([arg.dims for arg in args])
        if dims is None or kind is None or all(arg.host for arg in args):
            return None
        narrow = _narrow(args) if kind == "float" else None
        facts = self._facts(name, args, kind, narrow)
        if facts is None:
            return None
        return Val(self._spell(name, args), kind, dims, facts, narrow=narrow)

    def _arguments(self, name: str) -> list[Val] | None:
        kinds = self._wanted_kinds(name)
        first = self.rng.randrange(len(kinds)) if name in PRIMITIVES and len(kinds) > 1 else 0
        found: dict[int, Val] = {}
        for position in (first, *(i for i in range(len(kinds)) if i != first)):
            kind = kinds[position]
            # The bodies of derivatives cancel: with a number the reference would fold them in double precision.
            needs_tensor = (
                position == first
                or name in DERIVATIVES
                or kind == "mask"
                or (self.rng.random() < 0.6 and _may_be_tensor(name, position))
            )
            value = (
                self._tensor(kind, [arg.dims for arg in found.values()]) if needs_tensor else self.number(_plain(kind))
            )
            if value is None:
                return None
            found[position] = self.tame(value)
        return [found[i] for i in range(len(kinds))]

    def _tensor(self, kind: Kind, others: list[Dims]) -> Val | None:
        def fits(value: Val) -> bool:
            return broadcast([value.dims, *others]) is not None

        wanted = self.pick(lambda value: value.kind == kind and fits(value)) if self.rng.random() < 0.7 else None
        value = wanted or self.pick(fits)
        return None if value is None else self.as_kind(value, kind)

    def _wanted_kinds(self, name: str) -> list[Kind]:
        if name not in PRIMITIVES:
            return ["float"] * ACTIVATIONS[name]
        row = PRIMITIVES[name]
        any_kind: tuple[Kind, ...] = ("float", "float", "float", "int")
        if row.rule == "integer":
            return ["int"] * row.arity
        if row.rule == "logic":
            return ["mask"] * row.arity
        if row.rule in ("arithmetic", "compare", "same", "subtract"):
            kinds: list[Kind] = [self.rng.choice(any_kind) for _ in range(row.arity)]
            if row.rule in ("arithmetic", "compare") and row.arity > 1 and self.rng.random() < 0.15:
                kinds[self.rng.randrange(row.arity)] = "mask"
            return kinds
        if row.rule == "select":
            return ["mask", self.rng.choice(any_kind), self.rng.choice(any_kind)]
        return ["float"] * row.arity

    def _guarded(self, name: str, args: list[Val]) -> list[Val]:
        if name in GUARDED_ALWAYS:
            divisor = args[1]
            safe = f"clip({divisor.text}, 1, 7)" if not divisor.host else str(self.rng.choice((1, 2, 3, 7, -3)))
            return [args[0], divisor._replace(text=safe, facts=Facts(7.0))]
        if name == "pow" and (self.frame.exact or self.rng.random() < 0.5):
            power = self.rng.choice((1, 2, 3, 3))
            return [args[0], Val(str(power), "int", (), Facts(power), True, literal=power)]
        # In exact data the sign of a zero is open, and with it that of its inverse.
        if name not in DOMAIN or (self.rng.random() < 0.1 and not self.frame.exact):
            self.special |= name in DOMAIN
            return args
        patterns = DOMAIN[name]
        if self.frame.exact:
            patterns = tuple(pattern.replace("0.25", "1.0").replace("0.5", "1.0") for pattern in patterns)
        return [_wrapped(arg, pattern) for arg, pattern in zip(args, patterns, strict=True)]

    def _facts(self, name: str, args: list[Val], kind: Kind, narrow: str | None) -> Facts | None:
        given = [arg.facts for arg in args]
        if not self.frame.exact:
            facts = smooth(name, given) if kind == "float" else EXACT[name](*given)
            return facts if facts.bound < (1e30 if kind == "float" else 2.0**30) else None
        if name not in EXACT or (narrow and name not in PRIMITIVES and name not in SELECTING):
            return None
        if narrow and name in ("div", "pow"):
            return None
        if name == "div" and args[0].host:
            return None  # torch's number / tensor is reciprocal(tensor) * number
        floats = [facts for arg, facts in zip(args, given, strict=True) if arg.kind != "mask"]
        if name not in SELECTING and any(facts.rounded for facts in floats):
            return None
        facts = EXACT[name](*given)
        limit = exact_limit(kind)
        if not facts.rounded and kind != "mask" and (facts.bound / facts.step > limit or facts.bound > 2.0**30):
            return None
        return facts if narrow is None else facts._replace(bound=2.0 ** math.ceil(math.log2(max(facts.bound, 1.0))))

    def _spell(self, name: str, args: Sequence[Val]) -> str:
        texts = [arg.text for arg in args]
        forms = [f"{name}({', '.join(texts)})"]
        row = PRIMITIVES.get(name)
        if row is not None and row.symbol:
            forms += [f"({texts[0]} {row.symbol} {texts[1]})"] * 2
        if name == "neg":
            forms.append(f"(-{_tight(texts[0])})")
        if name == "logical_not":
            forms.append(f"(~{_tight(texts[0])})")
        if not any(arg.host for arg in args) and not self.empty:
            forms += _torch_forms(name, texts)
        return self.rng.choice(forms)

    # --- the other forms -----------------------------------------------------------------------------------------

    def operation(self, name: str) -> Val | None:
        """This primitive, activation or reduction."""
        return self.reduction(name) if name in REDUCTIONS else self.apply(name)

    def reduction(self, name: str = "") -> Val | None:
        """A reduction over some dims."""
        name = name or self.rng.choice(tuple(REDUCTIONS))
        rule = REDUCTIONS[name].rule
        value = self.pick(lambda v: bool(v.dims) and (rule in ("sum", "mask") or v.kind != "mask"))
        if value is None or (self.empty and not REDUCTIONS[name].has_identity):
            return None
        if rule == "float" or (name == "sum_of_squares" and value.kind == "mask"):
            value = self.as_kind(value, "float")
        if value is None:
            return None
        value = self.tame(value)
        if name in DOMAIN and not self.frame.exact:
            value = _wrapped(value, DOMAIN[name][0])
        chosen = self._chosen_dims(value)
        count = math.prod(self.frame.sizes[value.dims[d]] for d in chosen)
        kind: Kind = "mask" if rule == "mask" else "long" if rule == "sum" and value.kind != "float" else value.kind
        facts = self._reduced(name, value, count, kind)
        if facts is None:
            return None
        keepdim = self.rng.random() < 0.6
        dims = tuple(
            "1" if d in chosen else letter for d, letter in enumerate(value.dims) if keepdim or d not in chosen
        )
        text = self._spell_reduction(name, value, chosen, keepdim)
        return Val(text, kind, dims, facts, narrow=value.narrow if kind == "float" else None)

    def _chosen_dims(self, value: Val) -> tuple[int, ...]:
        ranks = range(len(value.dims))
        if self.rng.random() < 0.25:
            return tuple(ranks)
        return tuple(sorted(self.rng.sample(ranks, 1 if self.rng.random() < 0.8 else self.rng.randint(1, len(ranks)))))

    def _reduced(self, name: str, value: Val, count: int, kind: Kind) -> Facts | None:
        facts = value.facts
        if name in SELECTING:
            return facts if kind != "mask" else Facts(1.0)
        if name not in ("sum", "mean", "sum_of_squares", "norm"):
            return None if self.frame.exact else Facts(facts.bound + math.log(count + 1.0), rounded=True)
        squares = name in ("sum_of_squares", "norm")
        total = Facts(facts.bound ** (1 + squares) * max(count, 1), facts.step ** (1 + squares))
        if self.frame.exact and (facts.rounded or value.narrow or total.bound / total.step > exact_limit(kind)):
            return None
        if name == "norm" and self.frame.exact and self.frame.wide:
            return None  # torch's float64 norm rounds on its way
        if name in ("sum", "sum_of_squares"):
            return total if self.frame.exact else total._replace(rounded=True)
        self.special |= count == 0
        return Facts(facts.bound * (math.sqrt(max(count, 1)) if name == "norm" else 1.0), 2.0**-20, True)

    def _spell_reduction(self, name: str, value: Val, chosen: tuple[int, ...], keepdim: bool) -> str:
        rank = len(value.dims)
        signed = [d - rank if self.rng.random() < 0.5 else d for d in chosen]
        parts = []
        # torch's logsumexp wants its dim.
        if len(chosen) < rank or name == "logsumexp" or self.rng.random() < 0.3:
            parts.append(f"dim={signed[0]}" if len(signed) == 1 else f"dim=({', '.join(map(str, signed))})")
        if keepdim or self.rng.random() < 0.2:
            parts.append(f"keepdim={keepdim}")
        forms = [f"{name}({', '.join([value.text, *parts])})"]
        # torch takes keepdim only beside dim.
        if name in _METHOD_NAMES and name != "norm" and not self.empty and (not parts or parts[0][:4] == "dim="):
            forms.append(f"{_tight(value.text)}.{name}({', '.join(parts)})")
        if name in ("amax", "amin"):
            forms.append(f"{name[1:]}({', '.join([value.text, *parts])})")
        return self.rng.choice(forms)

    def softmax(self) -> Val | None:
        """softmax or log_softmax along one dim."""
        value = self.pick(lambda v: v.kind == "float" and len(v.dims) > 0)
        if value is None or self.frame.exact or self.empty:
            return None
        name = self.rng.choice(("softmax", "log_softmax"))
        value = _wrapped(self.tame(value), "clip({}, -30.0, 30.0)")
        dim = self.rng.randrange(-len(value.dims), len(value.dims))
        form = self.rng.choice((f"{name}({value.text}, {dim})", f"{_tight(value.text)}.{name}(dim={dim})"))
        return Val(form, "float", value.dims, Facts(60.0, rounded=True), narrow=value.narrow)

    def cast(self) -> Val | None:
        """To a narrow float and on from there, or there and back."""
        value = self.pick(lambda v: v.kind in ("float", "int"))
        if value is None:
            return None
        if value.kind == "float" and self.rng.random() < 0.4 and value.narrow is None:
            target = self.rng.choice(("float16", "bfloat16"))
            facts = value.facts
            bound = 2.0 ** math.ceil(math.log2(max(facts.bound, 1.0)))
            if bound > 2.0**14:
                return None
            method = {"float16": "half", "bfloat16": "bfloat16"}[target]
            text = self.rng.choice((f"{_tight(value.text)}.to(torch.{target})", f"{_tight(value.text)}.{method}()"))
            return value._replace(text=text, facts=facts._replace(bound=bound), narrow=target)
        limits = {"float8_e4m3fn": 440.0, "float8_e5m2": 5e4, "int8": 127.0, "int16": 3e4, "int32": 2.0**30}
        target = self.rng.choice(tuple(limits))
        if value.facts.bound > limits[target] or (self.special and target.startswith("int")):
            return None
        rough = value.facts._replace(bound=value.facts.bound * 1.5, rounded=not self.frame.exact)
        if target.startswith("int"):
            rough = value.facts._replace(step=1.0 if self.frame.exact else value.facts.step, rounded=False)
        return value._replace(
            text=f"{_tight(value.text)}.to(torch.{target}).to(FLOAT)", kind="float", facts=rough, narrow=None
        )

    def conditional(self) -> Val | None:
        """Python's own `a if flag else b` on a host number."""
        first = self.pick()
        second = self.pick(
            lambda v: first is not None and (v.kind, v.dims, v.narrow) == (first.kind, first.dims, first.narrow)
        )
        if first is None or second is None or not self.numbers:
            return None
        flag = f"{self.rng.choice(self.numbers).text} > {self.literal().text}"
        return first._replace(
            text=f"({first.text} if {flag} else {second.text})", facts=EXACT["maximum"](first.facts, second.facts)
        )

    def clamp(self) -> Val | None:
        """`clamp` with one bound or two."""
        value = self.pick(lambda v: v.kind == "float")
        if value is None:
            return None
        low, high = sorted((self.literal(), self.literal()), key=lambda v: v.literal or 0.0)
        bounds = [f"min={low.text}", f"max={high.text}"]
        del bounds[self.rng.choice((0, 1, 2)) : self.rng.choice((1, 2))]
        if not bounds:
            return None
        facts = EXACT["clip"](value.facts, low.facts, high.facts)
        form = self.rng.choice((f"clamp({value.text}, {{}})", f"{_tight(value.text)}.clamp({{}})"))
        return value._replace(text=form.format(", ".join(bounds)), facts=facts)

    def index(self) -> Val | None:
        """A coordinate."""
        value = self.pick(lambda v: v.dims[-2:] == ("m", "n"))
        if value is None:
            return None
        axis = self.rng.choice("mnl")
        dims = {"m": ("m", "1"), "n": ("n",), "l": (value.dims[-3], "1", "1") if len(value.dims) > 2 else ("1", "1")}[
            axis
        ]
        return Val(f"index_{axis}({value.text})", "int", dims, Facts(self.frame.sizes.get(axis, 1)))

    def unsqueeze(self) -> Val | None:
        """A reduced vector made to broadcast again."""
        value = self.pick(lambda v: v.dims in (("m",), ("l", "m"), ("n",)))
        if value is None:
            return None
        if value.dims == ("n",):
            return value._replace(text=f"{_tight(value.text)}[None, :]", dims=("1", "n"))
        text = self.rng.choice((f"{_tight(value.text)}[..., None]", f"{_tight(value.text)}.unsqueeze(-1)"))
        return value._replace(text=text, dims=(*value.dims, "1"))

    def split(self) -> Val | None:
        """An axis split in two, or the pieces joined again."""
        sizes = self.frame.sizes
        value = self.pick(lambda v: not v.raw and any(letter in v.dims for letter in ("m", "n", "h", "g")))
        if value is None or self.empty:
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
            form = self.rng.choice((f"reshape({value.text}, ({shape},))", f"{_tight(value.text)}.reshape({shape})"))
            return value._replace(text=form, dims=dims)
        return None

    def permute(self) -> Val | None:
        """The dims in another order."""
        value = self.pick(lambda v: len(v.dims) > 1 and not v.raw)
        if value is None:
            return None
        order = self.rng.sample(range(len(value.dims)), len(value.dims))
        form = self.rng.choice(
            (
                f"permute({value.text}, ({', '.join(map(str, order))}))",
                f"{_tight(value.text)}.permute({', '.join(map(str, order))})",
            )
        )
        return value._replace(text=form, dims=tuple(value.dims[d] for d in order))

    def helper(self) -> Val | None:
        """A call of the user's own function."""
        first = self.pick(lambda v: v.kind == "float" and v.narrow is None)
        second = self.pick(
            lambda v: (
                v.kind == "float"
                and v.narrow is None
                and first is not None
                and broadcast([v.dims, first.dims]) is not None
            )
        )
        if first is None or second is None or not self.frame.helpers:
            return None
        first, second = self.tame(first), self.tame(second)
        dims = broadcast([first.dims, second.dims])
        facts = self._facts("multiply_add", [first, second, second], "float", None)
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

PRODUCTIONS: tuple[tuple[float, Callable[[Writer], Val | None]], ...] = (
    (12.0, Writer.elementwise),
    (2.5, Writer.reduction),
    (0.4, Writer.softmax),
    (0.8, Writer.cast),
    (0.4, Writer.conditional),
    (0.5, Writer.clamp),
    (0.4, Writer.index),
    (0.6, Writer.unsqueeze),
    (1.0, Writer.split),
    (0.2, Writer.permute),
    (0.4, Writer.helper),
)


def write(writer: Writer, length: int) -> None:
    """`length` more statements, each of a production drawn anew."""
    weights, productions = zip(*PRODUCTIONS, strict=True)
    for _ in range(length):
        attempt(writer, lambda: writer.rng.choices(productions, weights)[0](writer))


def write_all(writer: Writer, length: int) -> None:
    """`length` statements of different operations, after all operands flowed together."""
    writer.mix()
    names = [
        name for name in (*ELEMENTWISE, *REDUCTIONS) if not writer.frame.exact or name in EXACT or name in REDUCTIONS
    ]
    # A weighted order without repeats: the name with the most weight is likely to come first.
    deck = sorted(names, key=lambda name: writer.rng.random() ** (1 / _weight(name)), reverse=True)
    for name in deck[:length]:
        attempt(writer, lambda name=name: writer.operation(name))  # type: ignore[misc]


def _weight(name: str) -> float:
    """Operations that only smooth data can have come more often there; activations are made of the others."""
    if name in ACTIVATIONS:
        return 0.4
    if name in RARE:
        return 4.0
    return 1.0 if name in EXACT or name in REDUCTIONS else 4.0


def attempt(writer: Writer, production: Callable[[], Val | None]) -> None:
    """One more statement, if the production gives a value within twenty tries."""
    for _ in range(20):
        value = production()
        if value is not None:
            writer.assign(value)
            return


# --- spelling ------------------------------------------------------------------------------------------------------


def _tight(text: str) -> str:
    """An operand of a method call or a unary operator."""
    return text if text.isidentifier() or (text[0] == "(" and _closes_at_end(text)) else f"({text})"


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position == len(text) - 1
    return False


def _wrapped(value: Val, pattern: str) -> Val:
    if pattern == "{}" or (value.host and "clip" in pattern):
        return value
    bound = value.facts.bound
    if pattern.startswith("clip"):
        low = float(pattern.split(",")[1])
        return (
            value
            if bound <= -low
            else value._replace(text=pattern.format(value.text), facts=value.facts._replace(bound=-low))
        )
    more = 0.0 if pattern == "abs({})" else 1.0
    facts = value.facts._replace(bound=bound + more, step=min(value.facts.step, 1.0))
    text = f"({pattern.format(value.text)})" if "+" in pattern else pattern.format(value.text)
    return value._replace(text=text, facts=facts)


def _torch_forms(name: str, texts: list[str]) -> list[str]:
    forms = []
    for module, spelled in ((torch, "torch"), (torch.nn.functional, "F")):
        entry = torchs(getattr(module, name, None))
        known = entry is not None and entry.name == name and name not in ("norm", "logsigmoid")
        # torch's own activations take numbers where ours take tensors too.
        if known and (name in PRIMITIVES or len(texts) == 1):
            forms.append(f"{spelled}.{name}({', '.join(texts)})")
    if name in _METHOD_NAMES and len(texts) < 3 and (name in PRIMITIVES or len(texts) == 1):
        forms.append(f"{_tight(texts[0])}.{name}({', '.join(texts[1:])})")
    return forms


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
    if rule == "integer":
        return promote(kinds) if set(kinds) <= {"int", "long"} else None
    if rule in ("floating", "divide"):
        return "float"
    if rule == "power":
        return "float" if kinds[0] == "float" else None
    return promote(kinds)
