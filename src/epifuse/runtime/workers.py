"""Processes that compile kernels into the store while this one goes on.

They are started when there is work, at most `MOST` of them, see no GPU, and end with this process, however it ends. A
forked child starts its own. Scripts need no `if __name__ == "__main__"`: a worker runs a module of ours.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO

from epifuse.base.errors import fail

MOST = min(8, os.cpu_count() or 1)  # a step of BERT has some 14 different kernels, each 1 to 3 s of one core
_MODULE = "epifuse.runtime.worker"


class Workers:
    """A pool of worker processes. Each has a thread here, which sends it one text and waits for the answer."""

    def __init__(self, most: int = MOST, command: Sequence[str] | None = None) -> None:
        self._most = most
        self._command = command
        self._begin()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[tuple[str, str, Future[None]] | None] = SimpleQueue()
        self._unfinished = 0  # tasks
        self._threads = 0
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def submit(self, provider: str, text: str) -> Future[None]:
        """Compile the kernel of this text by the provider of this name; the result is there once it is stored.

        The future raises `InternalError` with the worker's error. Work that has not begun can be cancelled.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._tasks.put((provider, text, future))
            self._unfinished += 1
            if self._threads < min(self._unfinished, self._most):
                self._threads += 1
                threading.Thread(target=self._serve, name="epifuse-compile", daemon=True).start()
        return future

    def close(self) -> None:
        """End the workers; what they have not finished is cancelled or fails."""
        with self._lock:
            self._closed = True
            while not self._tasks.empty():
                with suppress(Empty):  # a thread may be faster
                    if (task := self._tasks.get_nowait()) is not None:
                        task[-1].cancel()
            for process in self._processes:
                process.kill()
            for _ in range(self._threads):
                self._tasks.put(None)

    def _serve(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        while (task := self._tasks.get()) is not None:
            provider, text, future = task
            if future.set_running_or_notify_cancel():
                try:
                    process = self._started(process)
                    _ask(process, provider, text)
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
            with self._lock:
                self._unfinished -= 1
        if process is not None:
            _end(process)

    def _started(self, process: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
        """The process, or a new one where it has ended."""
        if process is not None:
            if process.poll() is None:
                return process
            _end(process)
        # Not under the lock, for which `submit` would wait.
        new = subprocess.Popen(
            self._command or [sys.executable, "-m", _MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a file without a lock, which a forked child can close
            env=_environment(),
            start_new_session=True,  # an interrupt from the keyboard is for this process
        )
        with self._lock:
            self._processes = {new, *(one for one in self._processes if one is not process)}
            if self._closed:
                new.kill()
        return new

    def _after_fork(self) -> None:
        """In a child: its parent's workers go on working for the parent alone."""
        for process in self._processes:
            process.returncode = 0  # not ours to wait for
            for pipe in (process.stdin, process.stdout):
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


def _environment() -> dict[str, str]:
    """This process's, with its path of modules, and without a GPU."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}


def _ask(process: subprocess.Popen[bytes], provider: str, text: str) -> None:
    answer = b""
    if process.stdin is not None and process.stdout is not None:
        try:
            _write(process.stdin, json.dumps((provider, text)).encode() + b"\n")
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass  # it has ended, which an empty answer says as well
    if not answer.endswith(b"\n"):
        raise fail("worker", None, detail=f"its process ended with status {_end(process)}")
    if (error := json.loads(answer)) is not None:
        raise fail("worker", None, detail=error)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Its status; the pipes are closed."""
    process.kill()
    with process:
        return process.wait()


def _write(pipe: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[pipe.write(rest) :]


WORKERS = Workers()
"""The one pool of this process; nothing is started until there is work."""
