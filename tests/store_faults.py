"""Processes that the tests of the store start, kill and limit: `python store_faults.py <case> [arguments]`.

Each case prints what it saw, and exits with 0 where that was right.
"""

import importlib.util
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import filelock

if __name__ == "__main__":
    # The package without its `__init__`, which imports PyTorch: the store does not need it, and a case takes a tenth of
    # a second in place of four.
    (folder,) = importlib.util.find_spec("epifuse").submodule_search_locations
    sys.modules["epifuse"] = ModuleType("epifuse")
    sys.modules["epifuse"].__path__ = [folder]

from epifuse.base import store

SIZE = 200_000


def content(name: str) -> bytes:
    """What is made for `name`: as long as a small kernel, and no two the same."""
    return (name.encode() * SIZE)[:SIZE]


def maker(name: str, log: Path, seconds: float = 0.0) -> Callable[[Path], None]:
    """Writes the file in two halves, with a pause; each call is a line of `log`."""

    def make(path: Path) -> None:
        with log.open("a") as file:
            file.write(f"{name}\n")
        with path.open("wb") as file:
            file.write(content(name)[: SIZE // 2])
            file.flush()
            time.sleep(seconds)
            file.write(content(name)[SIZE // 2 :])

    return make


def fetch_all(names: list[str], log: Path, seconds: float) -> None:
    """Each file is whole and the right one, at the time it is handed out."""
    for name in random.sample(names, len(names)):
        path = store.fetch(store.key_of(name), ".so", maker(name, log, seconds))
        assert path.read_bytes() == content(name), path


def fork(work: Callable[[], None]) -> int:
    """The process that does `work`; its status is 0 where that did not raise."""
    if (process := os.fork()) != 0:
        return process
    status = 1
    try:
        work()
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def statuses(processes: list[int]) -> list[int]:
    return [os.waitpid(process, 0)[1] for process in processes]


def at_once(folder: Path, count: int, names: list[str]) -> None:
    """`count` processes fetch the same files: each is made once."""
    log = folder.with_suffix(".log")
    start = time.time() + 0.5

    def work() -> None:
        time.sleep(max(start - time.time(), 0))
        fetch_all(names, log, 0.02)

    assert statuses([fork(work) for _ in range(count)]) == [0] * count
    assert sorted(log.read_text().split()) == sorted(names), log.read_text()


def chaos(folder: Path, count: int, names: list[str], rounds: int) -> None:
    """Processes are killed and files are damaged while others fetch: those that live see only whole files."""
    log = folder.with_suffix(".log")
    for number in range(rounds):
        random.seed(number)
        processes = [fork(lambda: fetch_all(names, log, 0.02)) for _ in range(count)]
        for process in processes[: count // 2]:
            time.sleep(random.random() * 0.05)
            os.kill(process, signal.SIGKILL)
        assert statuses(processes)[count // 2 :] == [0] * (count - count // 2)
        for path in folder.glob("??/*.so"):
            damage(path, random.choice(list(DAMAGES)))
        assert list(folder.glob("??/*.so"))


def _flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "head": lambda data: _flipped(data, 0),
    "middle": lambda data: _flipped(data, len(data) // 2),
    "tail": lambda data: _flipped(data, len(data) - 1),
    "truncated": lambda data: data[: len(data) // 3],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
}


def damage(path: Path, how: str) -> None:
    """As a failing disk would: in place, under the same name."""
    path.write_bytes(DAMAGES[how](path.read_bytes()))


def killed_while_making(folder: Path) -> None:
    """Whoever comes next waits for nobody, and meets no half of a file."""
    _next_after_a_kill(folder, lambda reached: fetch_all(["x"], reached, 60))


def killed_while_storing(folder: Path) -> None:
    """The same, where the file stands in the store and does not have its name yet."""

    def work(reached: Path) -> None:
        def replace(*_: object) -> None:
            reached.write_text("storing")
            time.sleep(60)

        os.replace = replace
        fetch_all(["x"], folder.with_suffix(".log"), 0)

    _next_after_a_kill(folder, work)


def _next_after_a_kill(folder: Path, work: Callable[[Path], None]) -> None:
    """`work` writes the file that it is given when it has come to the place where it is killed."""
    reached = folder.with_suffix(".reached")
    process = fork(lambda: work(reached))
    while not reached.exists():
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert store.find(store.key_of("x"), ".so") is None
    begin = time.time()
    fetch_all(["x"], folder.with_suffix(".log"), 0)
    assert time.time() - begin < 5
    assert store.find(store.key_of("x"), ".so") is not None


def forked(folder: Path) -> None:
    """A child that exits removes nothing of its parent's: not its private folder, and not what a thread makes in."""
    warnings.simplefilter("ignore")  # that the folder is none
    log = folder.with_suffix(".log")
    path = store.fetch(store.key_of("x"), ".so", maker("x", log))
    assert folder not in path.parents, path
    thread = threading.Thread(target=fetch_all, args=(["y"], log, 0.5))
    thread.start()
    while "y" not in log.read_text():
        time.sleep(0.01)
    if (child := os.fork()) == 0:
        theirs = store.fetch(store.key_of("z"), ".so", maker("z", log))
        assert path.parents[1] not in theirs.parents, theirs
        log.with_suffix(".child").write_text(str(theirs))
        sys.exit(0)  # runs what was registered for the exit, as a program would
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert path.exists()
    assert store.find(store.key_of("y"), ".so") is not None
    assert not Path(log.with_suffix(".child").read_text()).exists(), "the child left its own folder"
    print(path.parents[1])


def unprivileged(folder: Path) -> None:
    """What a person without root's rights meets: prints what was made, where it is, and each warning."""
    store.key_of("")
    with filelock.FileLock(folder.with_suffix(".lock")):
        pass  # its modules are loaded: a process that gives up its rights may not be able to read them
    log = folder.with_suffix(".log")
    log.touch(mode=0o666)
    log.chmod(0o666)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(12345)
        os.setuid(12345)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            fetch_all(["x", "y"], log, 0)
    path = store.find(store.key_of("x"), ".so")
    assert path is not None
    print(f"made {len(log.read_text().split())}, warned {len(caught)}, {path.parents[1]}")
    for warning in caught:
        print(warning.message)


def main(case: str, *words: str) -> None:
    """Run one case in the folder that EPIFUSE_CACHE_DIR names."""
    folder = store.CONFIG.cache_readonly or store.CONFIG.cache_dir
    assert folder is not None
    names = [f"kernel{number}" for number in range(6)]
    match case:
        case "at_once":
            at_once(folder, 16, names)
        case "chaos":
            chaos(folder, 12, names, int(words[0]))
        case "killed_while_making":
            killed_while_making(folder)
        case "killed_while_storing":
            killed_while_storing(folder)
        case "forked":
            forked(folder)
        case "unprivileged":
            unprivileged(folder)
        case _:
            raise SystemExit(f"there is no case {case}")


if __name__ == "__main__":
    main(*sys.argv[1:])
