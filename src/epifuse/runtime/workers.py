"""The worker: a process that compiles kernels into the store while this process goes on.

The worker imports the compiler once and forks for each kernel, at most `MOST` kernels at the same time. On an H100's
host a new process took 8.5 to 9 s until its first kernel was compiled, and 0.6 s for the next. The worker is started
when there is work, sees no GPU, and ends with this process, however that ends. A forked child of this process starts a
worker of its own. Scripts need no `if __name__ == "__main__"`, because the worker runs a module of epifuse, not the
script.
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
"""The line on a worker's standard output that precedes its answers. A `sitecustomize` may print something before it."""

# The worker gets this process's `sys.path` only after Python has started. PYTHONPATH would also apply to the start, and
# the folder of a script may have a file named like a module that the start needs.
_START = """
import sys
parent, folder, *sys.path[:] = sys.argv[1:]
from epifuse.runtime.worker import main
main(int(parent), folder)
"""


class _Process:
    """A worker process. `asked` are the futures of the requests that it has not answered, by number."""

    def __init__(self, command: Sequence[str]) -> None:
        self.asked: dict[int, Future[None]] = {}
        self.has_ended = False
        self.folder = tempfile.mkdtemp(prefix="epifuse-")  # for the processes it forks, which may be killed
        try:
            self.popen = _started(command, self.folder)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def kill(self) -> None:
        """Kill the process and its children, unless it has ended: its id may belong to another process then."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class Workers:
    """A queue of kernels for a worker process. One thread sends requests to the process, another receives answers."""

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
        """Have the kernel of this text compiled by the provider of this name. The future is done once it is stored.

        Without a text, only the compiler is imported, for later kernels. If the work fails, the future raises
        `InternalError` with the worker's error. Work that has not begun can be cancelled.
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
        """End the process. Work that has not begun is cancelled, and work that has not finished fails."""
        with self._lock:
            self._closed = True
            while not self._tasks.empty():
                with suppress(Empty):  # the sending thread may have taken it
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
            with suppress(BrokenPipeError, ValueError):  # it has ended, and the receiving thread reports that
                _write(process.popen.stdin, json.dumps((number, provider, text)).encode() + b"\n")

    def _asked(self, future: Future[None]) -> tuple[int, _Process]:
        """A number for a new request, and the process, which is started if there is none that runs."""
        number = next(self._numbers)
        with self._lock:
            if (process := self._process) is not None and not process.has_ended:
                process.asked[number] = future
                return number, process
        # The lock is not held here, because `submit` would wait for it.
        process = _Process(self._command or [sys.executable, "-P", "-c", _START])
        process.asked[number] = future
        threading.Thread(target=self._receive, args=(process,), name="epifuse-compiled", daemon=True).start()
        with self._lock:
            self._process = process
            if self._closed:
                process.kill()
        return number, process

    def _receive(self, process: _Process) -> None:
        """Pass the answers on to the futures. When the process ends, the requests it has not answered fail."""
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
        """Start afresh in a forked child: the worker process belongs to the parent."""
        if self._process is not None:
            popen = self._process.popen
            popen.returncode = 0  # the child cannot wait for a process of its parent
            for pipe in (popen.stdin, popen.stdout):
                if pipe is not None:
                    pipe.close()
        self._begin()


def failure(future: Future[None]) -> str | None:
    """Wait for a submitted kernel. Returns the reason why it was not compiled, or None if it was."""
    try:
        error = future.exception()
    except CancelledError:
        return "it was given up, because this process ends"
    return None if error is None else str(error)


def _started(command: Sequence[str], folder: str) -> subprocess.Popen[bytes]:
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the folder was removed, and MKL needs one
        here = folder
    return subprocess.Popen(
        [*command, str(os.getpid()), folder, *(os.path.join(here, path) for path in sys.path)],
        cwd=here,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if sys.__stderr__ else subprocess.DEVNULL,  # a daemon has closed it: a pipe would get its number
        bufsize=0,  # a file object without a lock, which a forked child can close
        env=_environment(),
        start_new_session=True,  # so that an interrupt from the keyboard does not reach the worker
    )


def _finish(future: Future[None], error: str | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(fail("worker", None, detail=error))


def _environment() -> dict[str, str]:
    """The environment of this process with epifuse's options, but without a GPU, and without threads, which a fork
    would lose."""
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **to_environment(CONFIG), **alone}


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    rest = memoryview(data)
    while rest:
        rest = rest[pipe.write(rest) :]


WORKERS = Workers()
"""The workers of this process. No process is started until there is work."""
