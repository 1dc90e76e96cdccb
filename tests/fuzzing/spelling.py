"""Ways to write an expression: as a call, as a method, or as torch's function."""

from __future__ import annotations

import torch

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import METHODS, torchs
from fuzzing.values import Val

METHOD_NAMES = frozenset(METHODS)


def tight(text: str) -> str:
    """The text, in parentheses if needed, as the operand of a method call or of a unary operator."""
    return text if text.isidentifier() or (text[0] == "(" and _closes_at_end(text)) else f"({text})"


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position == len(text) - 1
    return False


def wrapped(value: Val, pattern: str) -> Val:
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


def torch_forms(name: str, texts: list[str]) -> list[str]:
    forms = []
    for module, spelled in ((torch, "torch"), (torch.nn.functional, "F")):
        entry = torchs(getattr(module, name, None))
        known = entry is not None and entry.name == name and name not in ("norm", "logsigmoid")
        # Parameters of torch's activations are numbers; epifuse's may be tensors too.
        if known and (name in PRIMITIVES or len(texts) == 1):
            forms.append(f"{spelled}.{name}({', '.join(texts)})")
    if name in METHOD_NAMES and len(texts) < 3 and (name in PRIMITIVES or len(texts) == 1):
        forms.append(f"{tight(texts[0])}.{name}({', '.join(texts[1:])})")
    return forms
