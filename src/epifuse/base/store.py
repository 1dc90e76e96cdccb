"""Compiled kernels on disk: found by what they were made from, checked before use, shared by a user's processes.

A file is `<folder>/<first two digits of its key>/<key>.<sha256 of its content><suffix>`. Its name holds its checksum
and is given when the file is complete, so a reader meets a whole file or none. A folder is one of three:

- `EPIFUSE_CACHE_READONLY`, for kernels that an image brings. It is looked at first and never written.
- `EPIFUSE_CACHE_DIR`, by default `epifuse` in the user's cache folder.
- a temporary folder of this process, if the second cannot be used or is full.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from epifuse.base.config import CONFIG
from epifuse.base.errors import fail

if TYPE_CHECKING:
    from filelock import BaseFileLock

_FRESH = 60.0  # seconds in which a file that was made or found is not evicted: its finder has yet to load it
_STALE = 3600.0  # seconds after which a file that is still incomplete was left by a process that was killed
_PATIENCE = 120.0  # seconds to wait for another process that makes the same file; then this one makes it too

_private: tuple[int, Path] | None = None  # the temporary folder and the process that made it
_guard = threading.Lock()  # for `_private`
_warned: dict[Path, str] = {}  # by folder, the warning about it, which is given once


def _renew_guard() -> None:
    global _guard
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may hold the lock while this one forks
    os.register_at_fork(after_in_child=_renew_guard)


def key_of(*parts: str) -> str:
    """The key of a file made from `parts`, as 64 hexadecimal digits.

    epifuse's own source is always a part, so that another version never finds the file. Raises `UnsupportedError` where
    that source cannot be read.
    """
    digest = hashlib.sha256(_own_source().encode())
    for part in parts:
        data = part.encode()
        digest.update(b"%d:" % len(data) + data)  # with its length, so that ("ab", "c") differs from ("a", "bc")
    return digest.hexdigest()


def _raise(error: OSError) -> None:
    raise error


@cache
def _own_source() -> str:
    # Paths are strings and reads have no buffer: each process does this once, and objects took two thirds of the time.
    root = os.path.dirname(os.path.dirname(__file__))
    digest = hashlib.sha256()
    try:
        walked = os.walk(root, onerror=_raise) if os.path.isdir(root) else ()  # not in an archive
        paths = [os.path.join(folder, name) for folder, _, names in walked for name in names if name.endswith(".py")]
        for path in sorted(paths):
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            digest.update(f"{path[len(root) :].replace(os.sep, '/')}:{len(content)}:".encode() + content)
    except OSError as error:
        raise fail("no_fingerprint", what="epifuse's own source", why=error) from error
    if not paths:
        raise fail("no_fingerprint", what="epifuse's own source", why=f"{root} holds no .py file")
    return digest.hexdigest()


def find(key: str, suffix: str) -> Path | None:
    """The file of `key` that ends in `suffix` ('.so'), or None. Its content was compared with its checksum.

    A file whose content does not match is removed. A file that is returned stays for at least a minute.
    """
    if (path := _find_in(_read_only_folder(), key, suffix)) is not None:
        return path
    for folder in (_user_folder(), _existing_private_folder()):
        if (path := _find_in(folder, key, suffix)) is not None:
            return path
        _remove_corrupted(folder, key, suffix)
    return None


def fetch(key: str, suffix: str, make: Callable[[Path], None], kernel: str = "a kernel") -> Path:
    """The file of `key` that ends in `suffix`, made by `make(path)` if it is not there yet.

    If several threads and processes ask at once, one of them makes the file. `make` writes it at the path that it is
    given, in a folder of its own that is removed afterwards. If `make` raises, the exception is passed on and nothing
    is stored. It must not call `fetch`. `kernel` names the kernel in messages. Raises `UnsupportedError` if the file
    is not there and EPIFUSE_NO_COMPILE is 1.
    """
    if (path := find(key, suffix)) is not None:
        return path
    if CONFIG.no_compile:
        raise fail("no_compile", kernel=kernel)
    with _locked_folder(key) as folder:
        if (path := _find_in(folder, key, suffix)) is not None:  # another process made it during the wait
            return path
        with _scratch() as scratch:
            make(scratch / f"kernel{suffix}")
            content = (scratch / f"kernel{suffix}").read_bytes()
        try:
            return _keep(folder, key, suffix, content)
        except OSError as error:
            _warn_once(folder, str(error))
            return _keep(_private_folder(), key, suffix, content)


def notes(kind: str, key: str) -> list[Path]:
    """The notes of `key`: files `<kind>/<key>.json` of all folders, the one that `rewrite` writes last. A note is
    readable text without a checksum."""
    folders = [_read_only_folder(), _user_folder(), _existing_private_folder()]
    found = [folder / kind / f"{key}.json" for folder in folders if folder is not None]
    return [path for path in found if os.path.isfile(path)]  # also False for a file that this user may not see


def rewrite(kind: str, key: str, change: Callable[[Path], str]) -> Path:
    """Replace the text of `<kind>/<key>.json` with `change(path)`, which may read the old file if there is one.

    No other process changes the file meanwhile, and a reader finds either the old text or the new one.
    """
    with _locked_folder(key) as folder:
        try:
            return _rewritten(folder / kind / f"{key}.json", change)
        except OSError as error:
            _warn_once(folder, str(error))
            return _rewritten(_private_folder() / kind / f"{key}.json", change)


def folders() -> tuple[Path | None, Path | None]:
    """The user's folder, and the read-only folder; None for one that does not exist or cannot be used."""
    return _user_folder(), _read_only_folder()


def is_lost() -> bool:
    """Whether `rewrite` wrote into the temporary folder, which is removed when this process ends."""
    folder = _existing_private_folder()
    return folder is not None and bool(notes_in(folder))


def files_in(folder: Path) -> list[Path]:
    """The files that `fetch` has stored in a folder. The folder may hold other files, which must not be removed."""
    return [path for path in folder.glob("[0-9a-f][0-9a-f]/*.*") if _FILE.fullmatch(path.name)]


def notes_in(folder: Path) -> list[Path]:
    """The files that `rewrite` has stored in a folder."""
    return [path for path in folder.glob("*/*.json") if _NOTE.fullmatch(path.name)]


_FILE = re.compile(r"([0-9a-f]{64}\.){2}\w+|[0-9a-f]{16}\.part")
_NOTE = re.compile(r"[0-9a-f]{64}\.json")


# --- files -----------------------------------------------------------------------------------------------------------


def _files(folder: Path, key: str, suffix: str) -> list[Path]:
    """The files of `key`, before any check. There are several only if two processes made one without the lock."""
    shard = _shard(folder, key)
    try:
        names = sorted(os.listdir(shard))
    except OSError:
        return []  # nothing is stored there, or the folder cannot be read, which storing will report
    return [shard / name for name in names if name.startswith(f"{key}.") and name.endswith(suffix)]


def _shard(folder: Path, key: str) -> Path:
    return folder / key[:2]  # keeps listings short; all keys with the same first two digits share a lock


def _is_sound(path: Path) -> bool:
    """Whether nobody else could write the file, and its content has the checksum in its name."""
    try:
        if not (_is_ours(path.parent.stat()) and _is_ours(path.stat())):
            return False
        return hashlib.sha256(path.read_bytes()).hexdigest() == path.name.split(".")[1]
    except OSError:
        return False  # it was evicted after the listing, or the disk fails


def _find_in(folder: Path | None, key: str, suffix: str) -> Path | None:
    for path in _files(folder, key, suffix) if folder else ():
        if folder != CONFIG.cache_readonly:  # from this one nothing is evicted, and nobody writes there
            with suppress(OSError):
                os.utime(path)  # before the check, so that the file is not evicted after it
        if _is_sound(path):
            return path
    return None


def _remove_corrupted(folder: Path | None, key: str, suffix: str) -> None:
    if folder is None or not (files := _files(folder, key, suffix)):
        return
    # Without the lock this could remove a file that another process has just made under the same name. If another
    # process holds the lock, that one makes the file, and the corrupted file is found again next time.
    with suppress(OSError), lock(folder, key, patience=0):
        for path in files:
            if not _is_sound(path):
                path.unlink(missing_ok=True)


def _keep(folder: Path, key: str, suffix: str, content: bytes) -> Path:
    """Store `content` and return its path. Raises `OSError` if the folder cannot store it."""
    shard = _shard(folder, key)
    shard.mkdir(mode=0o755, exist_ok=True)  # the parent folder is private, or was opened to readers on purpose
    path = shard / f"{key}.{hashlib.sha256(content).hexdigest()}{suffix}"
    _write(path, content)
    _evict(folder)
    return path


def _rewritten(path: Path, change: Callable[[Path], str]) -> Path:
    path.parent.mkdir(mode=0o755, exist_ok=True)
    _write(path, change(path).encode())
    return path


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or none: readers never find a part."""
    part = path.with_name(f"{secrets.token_hex(8)}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _evict(folder: Path) -> None:
    """Remove the least recently used files until the rest is within the bound, and parts that killed processes left."""
    now, files = time.time(), []
    for path in files_in(folder):
        with suppress(OSError):  # another process evicts too
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for used, size, path in sorted(files):
        if (path.suffix == ".part" and now - used > _STALE) or (total > CONFIG.cache_bytes and now - used > _FRESH):
            with suppress(OSError):
                if path.stat().st_mtime == used:  # no process has found it meanwhile
                    path.unlink()
                    total -= size


# --- folders ---------------------------------------------------------------------------------------------------------


def _read_only_folder() -> Path | None:
    folder = CONFIG.cache_readonly
    return folder if folder is not None and _usable(folder) else None


def _user_folder() -> Path | None:
    folder = CONFIG.cache_dir
    if folder is None:
        from platformdirs import user_cache_path  # not needed if the variable is set

        folder = user_cache_path("epifuse", appauthor=False)
    if not folder.is_absolute():
        _warn_once(folder, "the user has no home folder")
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _warn_once(folder, str(error))
        return None
    return folder if _usable(folder) else None


def _usable(folder: Path) -> bool:
    try:
        why = _fault(folder)
    except OSError as error:
        why = str(error)
    if why is not None:
        _warn_once(folder, why)
    return why is None


def _fault(folder: Path) -> str | None:
    """Why no file of the folder may be executed, or None."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is no folder"
    if not _is_ours(status):
        return "another user owns it or may write there"
    return None if os.access(folder, os.R_OK | os.X_OK) else "it cannot be read"


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user and root can write there."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _private_folder() -> Path:
    """The temporary folder of this process: a new one after a fork, or if somebody removed it."""
    global _private
    with _guard:
        if (folder := _existing_private_folder()) is None:
            folder = Path(tempfile.mkdtemp(prefix="epifuse-"))
            _private = os.getpid(), folder
            atexit.register(_remove_private, *_private)
    return folder


def _existing_private_folder() -> Path | None:
    mine = _private is not None and _private[0] == os.getpid() and _private[1].is_dir()
    return _private[1] if mine and _private else None


def _remove_private(process: int, folder: Path) -> None:
    if process == os.getpid():  # a forked child runs this too
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a folder to compile in. It is outside the store, where processes of a killed compiler must not write.

    It is no `TemporaryDirectory`, because a forked child would remove its parent's folder at exit.
    """
    folder = Path(tempfile.mkdtemp(prefix="epifuse-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lock(folder: Path, key: str, patience: float = _PATIENCE) -> BaseFileLock:
    """The file lock of the subfolder of `key`: all keys with the same first two digits share it."""
    from filelock import FileLock  # here: importing it takes longer than finding a kernel, which needs no lock

    _shard(folder, key).mkdir(mode=0o755, exist_ok=True)
    return FileLock(_shard(folder, key) / "lock", timeout=patience)


@contextmanager
def _locked_folder(key: str) -> Iterator[Path]:
    """The folder to store in, while the lock of `key` is held there."""
    with ExitStack() as held:
        folder = _user_folder() or _private_folder()
        try:
            held.enter_context(lock(folder, key))
        except OSError as error:  # a full disk, a read-only disk, or another process that does not end
            _warn_once(folder, str(error))
            folder = _private_folder()
            held.enter_context(lock(folder, key))
        yield folder


def _warn_once(folder: Path, why: str) -> None:
    is_read = folder == CONFIG.cache_readonly
    what = "found in" if is_read else "shared with other processes through"
    name, owner = ("READONLY", "you or root own") if is_read else ("DIR", "you own")
    text = (
        f"compiled kernels and what was measured are not {what} {folder}: {why}. "
        f"Set EPIFUSE_CACHE_{name} to a folder that {owner} and that nobody else may write"
    )
    if _warned.setdefault(folder, text) is text:
        warnings.warn(text, stacklevel=3)
