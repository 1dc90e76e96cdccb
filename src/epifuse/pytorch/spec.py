"""A call without its values as text, which is what an operator of PyTorch is given and what its caches keep on disk.

The text is base32 of a compressed value of JSON: code that Inductor generates escapes nothing.
"""

from __future__ import annotations

import base64
import json
import secrets
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from epifuse.base import store
from epifuse.base.errors import Loc, UnsupportedError, fail
from epifuse.frontend import Parsed
from epifuse.frontend.apply import placed
from epifuse.frontend.names import NOTHING
from epifuse.frontend.remembered import remembered
from epifuse.ir.text import packed, unpacked
from epifuse.request.options import Options


class Spec(NamedTuple):
    """An epilogue that captures nothing, the names of the tensors and the numbers handed to it, in order, and options.

    `names` are what errors call A and B. `cast` are the operands that autocast casts as it casts A and B. Outputs that
    `options` accumulates are among the tensors. `form` says how more dims than a product has are seen as fewer:
    "gemm" or "linear"; they were already where it is empty.
    """

    parsed: Parsed
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    options: Options
    names: tuple[str, str] = ("A", "B")
    cast: tuple[str, ...] = ()
    form: str = ""


def closed(parsed: Parsed) -> Parsed:
    """The epilogue with what it captures as operands, so that it depends on nothing else."""
    return parsed.changed(
        parameters=tuple(parsed.graph.inputs),
        defaults={},
        readers={},
        guards=(),
        prepare=None,
        fixed={},
        root=NOTHING,
        key=f"closed {parsed.key}",
    )


def encoded(spec: Spec) -> str:
    """Letters and digits that `decoded` makes `spec` of; equal specs give equal texts."""
    options = spec.options
    out_dtypes = options.out_dtypes
    value = {
        "made by": _version(),  # what PyTorch keeps on disk of another version is not found again
        "graph": packed(spec.parsed.graph),
        "name": spec.parsed.name,
        "dtypes": _named(spec.parsed.dtypes),
        "tensors": spec.tensors,
        "numbers": spec.numbers,
        "names": spec.names,
        "cast": spec.cast,
        "form": spec.form,
        "options": {
            "accumulator_type": _name(options.accumulator_type),
            "precision": options.precision,
            "fast_math": options.fast_math,
            "allow_recompute": options.allow_recompute,
            "tune": options.tune,
            "fast_accum": options.fast_accum,
            "fallback": options.fallback,
            "out_dtypes": _named(out_dtypes) if isinstance(out_dtypes, Mapping) else _name(out_dtypes),
            "accumulate": options.accumulated,
        },
    }
    text = json.dumps(value, separators=(",", ":"))
    encoded = base64.b32encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")
    # In this process errors show the lines that the person wrote.
    return remembered("operator", encoded, lambda: (encoded, spec._replace(parsed=closed(spec.parsed))))[0]


def decoded(text: str) -> Spec:
    """What `encoded` made `text` of, in whichever process. Raises `ArgumentError` for any other text."""
    return remembered("operator", text, lambda: (text, _decoded(text)))[1]


def _decoded(text: str) -> Spec:
    try:
        value = json.loads(zlib.decompress(base64.b32decode(text + "=" * (-len(text) % 8))))
        graph, options = unpacked(value["graph"]), value["options"]
        parsed = Parsed(
            value["name"], graph, tuple(graph.inputs), {}, {}, (), placed(_PLACE), dtypes=_dtypes(value["dtypes"])
        )
        options |= {
            "accumulator_type": _dtype(options["accumulator_type"]),
            "out_dtypes": _dtypes(given) if isinstance(given := options["out_dtypes"], Mapping) else _dtype(given),
            "accumulate": tuple(options["accumulate"]),
        }
        tensors, numbers, names, cast = (tuple(value[key]) for key in ("tensors", "numbers", "names", "cast"))
        return Spec(parsed, tensors, numbers, Options(**options), names, cast, value["form"])
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise fail("operator_spec", None, detail=error) from None


@cache
def _version() -> str:
    try:
        return store.key_of()[:16]
    except UnsupportedError:  # there is no source to read
        return secrets.token_hex(8)


_PLACE = Loc("<epifuse::gemm>", 1, 0, 1, "")


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str | None) -> torch.dtype | None:
    found = None if name is None else getattr(torch, name)
    assert found is None or isinstance(found, torch.dtype)
    return found


def _named(dtypes: Mapping[str, torch.dtype]) -> dict[str, str | None]:
    return {name: _name(dtype) for name, dtype in dtypes.items()}


def _dtypes(names: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {name: dtype for name, given in names.items() if (dtype := _dtype(given)) is not None}
