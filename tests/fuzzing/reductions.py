"""Statements that reduce over some dims, or compute a softmax along one."""

from __future__ import annotations

import math

from epifuse.fusion.reduction import REDUCTIONS
from fuzzing.rules import DOMAIN, SELECTING
from fuzzing.spelling import METHOD_NAMES, tight, wrapped
from fuzzing.values import Facts, Kind, Val, exact_limit
from fuzzing.writer import Writer


def reduction(writer: Writer, name: str = "") -> Val | None:
    """A reduction over some dims: `name`, or a random one. None if no value fits."""
    name = name or writer.rng.choice(tuple(REDUCTIONS))
    rule = REDUCTIONS[name].rule
    value = writer.pick(lambda v: bool(v.dims) and (rule in ("sum", "mask") or v.kind != "mask"))
    if value is None or (writer.empty and not REDUCTIONS[name].has_identity):
        return None
    if rule == "float" or (rule == "squares" and value.kind == "mask"):
        value = writer.as_kind(value, "float")
    if value is None:
        return None
    value = writer.tame(value)
    if name in DOMAIN and not writer.frame.exact:
        value = wrapped(value, DOMAIN[name][0])
    chosen = _chosen_dims(writer, value)
    count = math.prod(writer.frame.sizes[value.dims[d]] for d in chosen)
    kind: Kind = (
        "mask" if rule == "mask" else "long" if rule in ("sum", "squares") and value.kind != "float" else value.kind
    )
    facts = _reduced(writer, name, value, count, kind)
    if facts is None:
        return None
    keepdim = writer.rng.random() < 0.6
    dims = tuple("1" if d in chosen else letter for d, letter in enumerate(value.dims) if keepdim or d not in chosen)
    text = _spell_reduction(writer, name, value, chosen, keepdim)
    return Val(text, kind, dims, facts, narrow=value.narrow if kind == "float" else None)


def _chosen_dims(writer: Writer, value: Val) -> tuple[int, ...]:
    ranks = range(len(value.dims))
    if writer.rng.random() < 0.25:
        return tuple(ranks)
    return tuple(
        sorted(writer.rng.sample(ranks, 1 if writer.rng.random() < 0.8 else writer.rng.randint(1, len(ranks))))
    )


def _reduced(writer: Writer, name: str, value: Val, count: int, kind: Kind) -> Facts | None:
    facts = value.facts
    if name in SELECTING:
        return facts if kind != "mask" else Facts(1.0)
    if name == "prod":
        bound, step = facts.bound ** min(count, 64), facts.step ** min(count, 64)
        if not writer.frame.exact:
            return Facts(math.exp(count / 32), rounded=True) if count <= 1024 else None
        return Facts(bound, step) if count <= 4 and bound / step <= exact_limit(kind) else None
    if name not in ("sum", "mean", "sum_of_squares", "norm"):
        return None if writer.frame.exact else Facts(facts.bound + math.log(count + 1.0), rounded=True)
    squares = name in ("sum_of_squares", "norm")
    total = Facts(facts.bound ** (1 + squares) * max(count, 1), facts.step ** (1 + squares))
    if writer.frame.exact and (facts.rounded or value.narrow or total.bound / total.step > exact_limit(kind)):
        return None
    if name == "norm" and writer.frame.exact and writer.frame.wide:
        return None  # torch rounds intermediate values of a float64 norm
    if name in ("sum", "sum_of_squares"):
        return total if writer.frame.exact else total._replace(rounded=True)
    writer.special |= count == 0
    return Facts(facts.bound * (math.sqrt(max(count, 1)) if name == "norm" else 1.0), 2.0**-20, True)


def _spell_reduction(writer: Writer, name: str, value: Val, chosen: tuple[int, ...], keepdim: bool) -> str:
    rank = len(value.dims)
    signed = [d - rank if writer.rng.random() < 0.5 else d for d in chosen]
    parts = []
    # torch's logsumexp requires `dim`.
    if len(chosen) < rank or name == "logsumexp" or writer.rng.random() < 0.3:
        parts.append(f"dim={signed[0]}" if len(signed) == 1 else f"dim=({', '.join(map(str, signed))})")
    if keepdim or writer.rng.random() < 0.2:
        parts.append(f"keepdim={keepdim}")
    forms = [f"{name}({', '.join([value.text, *parts])})"]
    # torch accepts keepdim only together with dim.
    is_method = name in METHOD_NAMES and name != "norm" and not (name == "prod" and parts and parts[0][:5] == "dim=(")
    if is_method and not writer.empty and (not parts or parts[0][:4] == "dim="):
        forms.append(f"{tight(value.text)}.{name}({', '.join(parts)})")
    if name in ("amax", "amin"):
        forms.append(f"{name[1:]}({', '.join([value.text, *parts])})")
    return writer.rng.choice(forms)


def softmax(writer: Writer) -> Val | None:
    """A softmax or log_softmax along one dim, or None."""
    value = writer.pick(lambda v: v.kind == "float" and len(v.dims) > 0)
    if value is None or writer.frame.exact or writer.empty:
        return None
    name = writer.rng.choice(("softmax", "log_softmax"))
    value = wrapped(writer.tame(value), "clip({}, -30.0, 30.0)")
    dim = writer.rng.randrange(-len(value.dims), len(value.dims))
    form = writer.rng.choice((f"{name}({value.text}, {dim})", f"{tight(value.text)}.{name}(dim={dim})"))
    return Val(form, "float", value.dims, Facts(60.0, rounded=True), narrow=value.narrow)
