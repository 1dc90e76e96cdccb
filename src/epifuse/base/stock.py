"""Count and clear what the folders of the store hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from epifuse.base.store import files_in, lock, notes_in


class Held(NamedTuple):
    """What a folder holds: the number of files by suffix, the bytes of all, and the number of notes by kind."""

    files: Counter[str]
    bytes: int
    notes: Counter[str]


def held(folder: Path) -> Held:
    """Count what `folder` holds now."""
    return _counted([*files_in(folder), *notes_in(folder)], lambda path: None)


def clear(folder: Path, *, and_notes: bool = False) -> Held:
    """Remove the stored files in `folder`, and with `and_notes` the notes; return what was removed. Files stay in a
    subfolder in which another process makes one."""
    removed = _counted(notes_in(folder) if and_notes else [], Path.unlink)
    for shard, files in groupby(sorted(files_in(folder)), lambda path: path.parent.name):
        with suppress(OSError), lock(folder, shard, patience=0):
            more = _counted(files, Path.unlink)
            removed = Held(removed.files + more.files, removed.bytes + more.bytes, removed.notes)
    return removed


def _counted(paths: Iterable[Path], act: Callable[[Path], None]) -> Held:
    files, size, notes = Counter[str](), 0, Counter[str]()
    for path in paths:
        with suppress(OSError):  # removed meanwhile
            count = path.stat().st_size
            act(path)
            size += count
            is_note = len(path.parent.name) > 2
            (notes if is_note else files).update([path.parent.name if is_note else path.suffix])
    return Held(files, size, notes)
