"""The command `cache`: print what is kept on disk and where, or remove it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from epifuse.base import store
from epifuse.base.config import CONFIG
from epifuse.base.stock import Held, clear, held
from epifuse.tools.lines import rows, size

_KERNELS = (".so", ".o")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to `parser`."""
    parser.add_argument("what", nargs="?", choices=("info", "clear"), default="info", help="info unless given")
    parser.add_argument("--tuned", action="store_true", help="clear: remove the results of tuning, too")


def run(options: argparse.Namespace) -> int:
    """Print what is kept; `clear` removes it first. Return 1 if `clear` has no folder or leaves files in it, else 0."""
    own, read_only = store.folders()
    if options.what == "clear" and own is not None:
        print(f"removed {_described(clear(own, and_notes=options.tuned))}")
    print(*rows(_folders(own, read_only)), sep="\n")
    return 1 if options.what == "clear" and (own is None or held(own).files) else 0


def _folders(own: Path | None, read_only: Path | None) -> Iterator[tuple[str, str]]:
    if own is None:
        yield "folder", "none that can be used: each process keeps its kernels in a temporary folder of its own"
    else:
        yield "folder", f"{own}\n({'EPIFUSE_CACHE_DIR' if CONFIG.cache_dir else 'the default of this user'})"
        yield "holds", f"{describe(own)}, of {size(CONFIG.cache_bytes)} at most (EPIFUSE_CACHE_BYTES)"
    if read_only is not None:
        yield "only read", f"{read_only}\n(EPIFUSE_CACHE_READONLY)"
        yield "holds", describe(read_only)


def describe(folder: Path) -> str:
    """Describe in words what a folder holds."""
    return _described(held(folder))


def _described(stock: Held) -> str:
    kernels, times = sum(stock.files[suffix] for suffix in _KERNELS), stock.files[".json"]
    parts = [f"{kernels} kernel{'' if kernels == 1 else 's'}"]
    parts += [f"times of {times} site{'' if times == 1 else 's'}"] if times else []
    parts += [f"{kind}: {count} file{'' if count == 1 else 's'}" for kind, count in sorted(stock.notes.items())]
    return ", ".join((*parts, size(stock.bytes)))
