"""Processes that compile: into the store, ended with their parent, replaced when they die, not shared by a fork."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from epifuse.base import store
from epifuse.base.errors import InternalError
from epifuse.providers.cutedsl import load
from epifuse.runtime import worker, workers
from epifuse.runtime.workers import Workers


def test_a_worker_compiles_into_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    from tests.test_stored_kernels import COMPILED, text_of

    config = replace(store.CONFIG, cache_dir=tmp_path / "store")
    monkeypatch.setattr(store, "CONFIG", config)
    monkeypatch.setattr(workers, "CONFIG", config)
    text = text_of(COMPILED["gelu"])
    pool = Workers(1)
    try:
        wrong = pool.submit("cutedsl", "no kernel")
        right = pool.submit("cutedsl", text)
        with pytest.raises(InternalError, match="JSONDecodeError"):
            wrong.result(timeout=60)
        assert load.find(text) is None or right.done()
        right.result(timeout=60)
        assert load.find(text) is not None
        process = pool._process.popen
    finally:
        pool.close()
    assert process.wait(timeout=10) != 0
    assert pool.submit("cutedsl", text).cancelled()


ANSWERS = """
import json, os, sys
print("epifuse answers", flush=True)
for line in sys.stdin:
    os._exit(3) if "die" in line else print(json.dumps([json.loads(line)[0], None]), flush=True)
"""


def test_a_worker_that_dies_is_replaced() -> None:
    pool = Workers(1, [sys.executable, "-c", ANSWERS])
    try:
        with pytest.raises(InternalError, match="status 3"):
            pool.submit("cutedsl", "die").result(timeout=30)
        assert pool.submit("cutedsl", "live").result(timeout=30) is None
    finally:
        pool.close()


class Crashes:
    def compile(self, text: str) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_kernel_that_brings_its_process_down_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.providers, "load", lambda name: Crashes())
    source, child = worker._forked(7, "cutedsl", "")
    assert os.read(source, 1) == b""
    assert worker._ended(source, child) == (7, f"its process ended with status {-signal.SIGSEGV}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own() -> None:
    pool = Workers(1, [sys.executable, "-c", ANSWERS])
    try:
        pool.submit("cutedsl", "parent").result(timeout=30)
        parents = pool._process.popen
        if (child := os.fork()) == 0:
            status = 1
            try:
                pool.submit("cutedsl", "child").result(timeout=30)
                own = pool._process.popen
                status = 2 if own.pid == parents.pid else 0
                pool.close()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert pool.submit("cutedsl", "parent").result(timeout=30) is None
        assert parents.poll() is None
    finally:
        pool.close()


PARENT = """
import os, time
from epifuse.runtime import worker
from epifuse.runtime.workers import Workers
pool = Workers(1)
assert pool.submit("cutedsl", "no kernel").exception() is not None
worker = pool._process.popen
child = os.fork()
if child == 0:
    time.sleep(60)
print(worker.pid, child, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc to look for the worker in")
def test_a_worker_ends_when_its_parent_is_killed() -> None:
    """Though a forked child of the parent lives on."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker, child = map(int, parent.stdout.readline().split())
        try:
            ends = time.monotonic() + 20
            while Path(f"/proc/{worker}").exists() and not is_zombie(worker) and time.monotonic() < ends:
                time.sleep(0.1)
            assert not Path(f"/proc/{worker}").exists() or is_zombie(worker)
        finally:
            os.kill(child, 9)


HOSTILE = """
import os, signal, sys, tempfile
import epifuse
from epifuse.runtime.workers import Workers
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.environ["EPIFUSE_BACKGROUND"] = "neither 0 nor 1"
sys.path.insert(0, os.getcwd())
os.chdir(tempfile.mkdtemp(dir="."))
os.rmdir(os.getcwd())
why = str(Workers(1).submit("cutedsl", "no kernel").exception(timeout=60))
print(why)
"""


def test_a_worker_serves_where_its_parent_was_made_unkind(tmp_path: Path) -> None:
    """SIGCHLD ignored, its folder removed, variables changed after the import, `encodings.py` beside the script, a
    `sitecustomize` that prints, closed standard files: the worker tells of the text, which is none, and leaves nothing.
    """
    (tmp_path / "encodings.py").write_text("raise SystemExit('the encodings of a script')")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hello'); print('[0, null]', end='', flush=True)")
    (tmp_path / "hostile.py").write_text(HOSTILE)
    (tmp_path / "temporary").mkdir()
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "temporary")}
    command = ["sh", "-c", '"$0" -W ignore hostile.py <&- 2>&-', sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert "JSONDecodeError" in done.stdout, done.stdout + done.stderr
    assert not [*(tmp_path / "temporary").glob("epifuse-*")]


def test_a_worker_that_ends_while_it_is_asked_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that receives closes the pipe that the other one is about to write to."""
    pool = Workers(1, [sys.executable, "-c", ANSWERS])
    write = workers._write

    def late(pipe: IO[bytes], data: bytes) -> None:
        if b"late" in data:
            pool._process.popen.kill()
            while not pipe.closed:
                time.sleep(0.01)
        write(pipe, data)

    monkeypatch.setattr(workers, "_write", late)
    try:
        with pytest.raises(InternalError, match="status -9"):
            pool.submit("cutedsl", "late").result(timeout=30)
        assert pool.submit("cutedsl", "live").result(timeout=30) is None
    finally:
        pool.close()


def test_a_worker_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = Workers(1, [str(tmp_path / "no program")])
    with pytest.raises(FileNotFoundError):
        pool.submit("cutedsl", "").result(timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_nobody_is_killed_by_the_number_of_a_worker_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Workers(1, [sys.executable, "-c", ANSWERS])
    with pytest.raises(InternalError, match="status 3"):
        pool.submit("cutedsl", "die").result(timeout=30)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda number, _: killed.append(number))
    pool.close()
    assert killed == []


def is_zombie(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
