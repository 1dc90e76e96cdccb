"""Every environment variable epifuse reads: one row each, typed, read once at import."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from epifuse.base.errors import fail

_PREFIX = "EPIFUSE_"


@dataclass(frozen=True)
class Config:
    """Process-wide options. Each field `x` is set by the environment variable `EPIFUSE_X`."""

    verify: bool = True
    """Check the graph after every pass (a few microseconds a node)."""
    native_elements: int = 1 << 22
    """Elements of a result from which the CPU compiles the epilogue with the system's C++ compiler (half a second)."""
    panel_bytes: int = 1 << 20
    """Size in bytes of one float32 panel of the CPU kernel; 1 MiB is the usual L2 cache of a server core."""
    cache_dir: Path | None = None
    """Folder of the compiled kernels; by default `epifuse` in the user's cache folder."""
    cache_readonly: Path | None = None
    """A folder of compiled kernels that is looked at first and never written, for kernels that an image brings."""
    cache_bytes: int = 2 << 30
    """Size in bytes from which the least recently used compiled kernels are removed from the folder."""
    no_compile: bool = False
    """Raise an error if a kernel is not compiled yet, rather than compile it."""
    background: bool = True
    """If a better kernel is not compiled yet, run one that gives the same bits, while a worker compiles the better."""
    batch_invariant: bool = False
    """Choose only kernels that give a row of a result the same bits whatever the other rows are."""
    untested: bool = False
    """Allow kernels that have never run on a GPU."""


def from_environment(environment: dict[str, str] | None = None) -> Config:
    """Read `Config` from the environment; a value that does not parse is an `ArgumentError` that names the variable."""
    source = os.environ if environment is None else environment
    values: dict[str, bool | int | Path | None] = {}
    for field in fields(Config):
        name = _PREFIX + field.name.upper()
        text = source.get(name)
        if not text:  # people unset a variable in a shell by making it empty
            continue
        if field.type == "bool":
            if text not in ("0", "1"):
                raise fail("option", None, name=name, want="0 or 1", value=text)
            values[field.name] = text == "1"
        elif field.type == "Path | None":
            # Absolute at once: a program may change its folder later.
            try:
                values[field.name] = Path(text).expanduser().absolute()
            except RuntimeError as error:  # for a ~ whose user has no home folder
                raise fail("option", None, name=name, want=f"a folder ({error})", value=text) from error
        else:
            try:
                values[field.name] = int(text if text.isascii() and text.isdigit() else "")
            except ValueError as error:  # also for more digits than Python converts
                raise fail("option", None, name=name, want="a whole number", value=text) from error
    return Config(**values)  # type: ignore[arg-type]  # each value was parsed by its field's own type above


def to_environment(config: Config) -> dict[str, str]:
    """The variables that `from_environment` reads `config` from."""
    values = {field.name: getattr(config, field.name) for field in fields(Config)}
    texts = {name: str(int(value)) if isinstance(value, int) else str(value or "") for name, value in values.items()}
    return {_PREFIX + name.upper(): text for name, text in texts.items()}


CONFIG = from_environment()
