"""A process that compiles kernels into the store while this one goes on.

It imports what compiles once and forks for each kernel, `MOST` of them at once: a new process took 8.5 to 9 s to its
first kernel on an H100's host, and 0.6 s to the next. It is started when there is work, sees no GPU, and ends with this
process, however it ends. A forked child starts its own. Scripts need no `if __name__ == "__main__"`: what runs is a
module of ours.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import IO

from epifuse.base.config import CONFIG, to_environment
from epifuse.base.errors import fail

MOST = min(8, os.cpu_count() or 1)  # a step of BERT has some 14 different kernels
READY = b"epifuse answers\n"
"""What a worker's standard output holds before its answers; a `sitecustomize` may have printed before it."""

# Our path of modules is set once Python has started, as it was here: PYTHONPATH serves the start too, and a script's
# folder may have a file called like a module that the start needs.
_START = """
import sys
parent, folder, *sys.path[:] = sys.argv[1:]
from epifuse.runtime.worker import main
main(int(parent), folder)
"""


class _Process:
    """The process, and the futures of what it was asked and has not answered, by number."""

    def __init__(self, command: Sequence[str]) -> None:
        self.asked: dict[int, Future[None]] = {}
        self.has_ended = False
        self.folder = tempfile.mkdtemp(prefix="epifuse-")  # for what it forks, which may be killed
        try:
            self.popen = _started(command, self.folder)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def kill(self) -> None:
        """With what it has forked, unless it has ended: its number may be another's by now."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class Workers:
    """Work for such a process, and two threads here: one sends, one receives."""

    def __init__(self, most: int = MOST, command: Sequence[str] | None = None) -> None:
        self._most = most
        self._command = command
        self._begin()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[tuple[str, str | None, Future[None]] | None] = SimpleQueue()
        self._room = threading.Semaphore(self._most)
        self._numbers = count()
        self._process: _Process | None = None
        self._sends = False
        self._closed = False

    def submit(self, provider: str, text: str | None) -> Future[None]:
        """Compile the kernel of this text by the provider of this name; the result is there once it is stored.

        Without a text, what compiles is imported, for kernels to come. The future raises `InternalError` with the
        worker's error. Work that has not begun can be cancelled.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            if not self._sends:
                threading.Thread(target=self._send, name="epifuse-compile", daemon=True).start()
                self._sends = True
            self._tasks.put((provider, text, future))
        return future

    def close(self) -> None:
        """End the process; what is not finished is cancelled or fails."""
        with self._lock:
            self._closed = True
            while not self._tasks.empty():
                with suppress(Empty):  # the thread may be faster
                    if (task := self._tasks.get_nowait()) is not None:
                        task[-1].cancel()
            if self._process is not None:
                self._process.kill()
            self._tasks.put(None)

    def _send(self) -> None:
        while (task := self._tasks.get()) is not None:
            provider, text, future = task
            self._room.acquire()
            if not future.set_running_or_notify_cancel():
                self._room.release()
                continue
            try:
                number, process = self._asked(future)
            except Exception as error:  # no process can be started
                future.set_exception(error)
                self._room.release()
                continue
            with suppress(BrokenPipeError, ValueError):  # it has ended, of which the other thread tells
                _write(process.popen.stdin, json.dumps((number, provider, text)).encode() + b"\n")

    def _asked(self, future: Future[None]) -> tuple[int, _Process]:
        """A number for what is asked, and the process: a new one where there is none that goes on."""
        number = next(self._numbers)
        with self._lock:
            if (process := self._process) is not None and not process.has_ended:
                process.asked[number] = future
                return number, process
        # Not under the lock, for which `submit` would wait.
        process = _Process(self._command or [sys.executable, "-P", "-c", _START])
        process.asked[number] = future
        threading.Thread(target=self._receive, args=(process,), name="epifuse-compiled", daemon=True).start()
        with self._lock:
            self._process = process
            if self._closed:
                process.kill()
        return number, process

    def _receive(self, process: _Process) -> None:
        """Hand on the answers; where the process ends, what it has not answered fails."""
        answers = process.popen.stdout
        assert answers is not None
        while (line := answers.readline()) and not line.endswith(READY):
            pass
        while (line := answers.readline()).endswith(b"\n"):
            number, error = json.loads(line)
            with self._lock:
                future = process.asked.pop(number)
            _finish(future, error)
            self._room.release()
        process.kill()
        with process.popen:
            status = process.popen.wait()
        with self._lock:
            process.has_ended = True
            rest = [*process.asked.values()]
        for future in rest:
            _finish(future, f"its process ended with status {status}")
            self._room.release()

    def _after_fork(self) -> None:
        """In a child: its parent's process goes on working for the parent alone."""
        if self._process is not None:
            popen = self._process.popen
            popen.returncode = 0  # not ours to wait for
            for pipe in (popen.stdin, popen.stdout):
                if pipe is not None:
                    pipe.close()
        self._begin()


def failure(future: Future[None]) -> str | None:
    """Why a submitted kernel was not compiled, or None where it was, once that is known."""
    try:
        error = future.exception()
    except CancelledError:
        return "it was given up, because this process ends"
    return None if error is None else str(error)


def _started(command: Sequence[str], folder: str) -> subprocess.Popen[bytes]:
    try:
        here = os.getcwd()
    except FileNotFoundError:  # somebody removed it; MKL needs one
        here = folder
    return subprocess.Popen(
        [*command, str(os.getpid()), folder, *(os.path.join(here, path) for path in sys.path)],
        cwd=here,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if sys.__stderr__ else subprocess.DEVNULL,  # closed in a daemon: a pipe would get its number
        bufsize=0,  # a file without a lock, which a forked child can close
        env=_environment(),
        start_new_session=True,  # an interrupt from the keyboard is for this process
    )


def _finish(future: Future[None], error: str | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(fail("worker", None, detail=error))


def _environment() -> dict[str, str]:
    """This process's, with its options, and without a GPU and threads, which a fork would lose."""
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **to_environment(CONFIG), **alone}


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    rest = memoryview(data)
    while rest:
        rest = rest[pipe.write(rest) :]


WORKERS = Workers()
"""The one of this process; nothing is started until there is work."""
