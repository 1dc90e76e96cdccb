"""The program of a worker: a process that compiles kernels into the store for its parent process.

A request is a line on standard input: a JSON list of a number, the name of a provider, and a kernel's text, or null to
import the compiler only. Its answer is a line on standard output, in the order in which requests are done: the number,
and null once the kernel is stored or else the error. Each kernel is compiled in a forked child of its own, which has
the compiler imported, so that a crash affects one kernel only. The worker ends when its input ends or the parent is
gone.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable
from typing import NamedTuple

from epifuse import providers
from epifuse.runtime.workers import READY

_LOOK_AFTER = 1.0  # seconds; another child of the parent may hold our input open, so waiting for its end is not enough


class Child(NamedTuple):
    """A process that compiles one kernel: the number of its request, its process id, and its answer so far."""

    number: int
    process: int
    answer: bytearray


def main(parent: int, folder: str) -> None:
    """Answer requests until the input ends. `folder` is for temporary files. It is removed in the end, because a
    process that is killed does not remove its own files."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a server may ignore it, and then no child can be waited for
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # for linkers too
    answers = os.dup(1)
    os.dup2(2, 1)  # so that the output of a compiler is not read as an answer
    children: dict[int, Child] = {}
    rest = b""
    try:
        os.write(answers, READY)
        while ready := _ready([0, *children], parent):
            for source in ready:
                piece = os.read(source, 1 << 16)
                if source == 0:
                    if not piece:
                        return
                    *lines, rest = (rest + piece).split(b"\n")
                    children.update(begun for line in lines if (begun := _begun(answers, *json.loads(line))))
                elif piece:
                    children[source].answer.extend(piece)
                else:
                    _answer(answers, *_ended(source, children.pop(source)))
    except BrokenPipeError:
        return  # the parent is gone
    finally:
        for child in children.values():
            os.kill(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _ready(sources: list[int], parent: int) -> list[int]:
    """Wait until some of the file descriptors can be read. Returns these, or nothing if the parent has ended."""
    while not (ready := select.select(sources, [], [], _LOOK_AFTER)[0]):
        if os.getppid() != parent:
            return []
    return ready


def _begun(answers: int, number: int, provider: str, text: str | None) -> tuple[int, Child] | None:
    """Begin a request. Returns the child that compiles, by the file descriptor of its answer.

    Without a text the compiler is imported, the answer is given here, and the result is None.
    """
    error = _error(lambda: providers.load(provider).prepare())
    if text is not None:  # if the import failed, the child reports that
        return _forked(number, provider, text)
    _answer(answers, number, error)
    return None


def _forked(number: int, provider: str, text: str) -> tuple[int, Child]:
    """Start a child that compiles the text. Returns the file descriptor of its answer, and the child."""
    source, sink = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, none of which the child needs
        process = os.fork()
    if process:
        os.close(sink)
        return source, Child(number, process, bytearray())
    try:
        with os.fdopen(sink, "w") as answer:
            json.dump(_error(lambda: providers.load(provider).compile(text)), answer)
    finally:
        os._exit(0)


def _ended(source: int, child: Child) -> tuple[int, str | None]:
    """The number of the request and the answer of a child that has ended."""
    os.close(source)
    _, status = os.waitpid(child.process, 0)
    if not child.answer:
        return child.number, f"its process ended with status {os.waitstatus_to_exitcode(status)}"
    return child.number, json.loads(child.answer)


def _answer(answers: int, number: int, error: str | None) -> None:
    os.write(answers, json.dumps([number, error]).encode() + b"\n")


def _error(work: Callable[[], None]) -> str | None:
    """The error that `work` raises as text, or None."""
    try:
        work()
    except Exception as error:  # every error is reported to the parent
        return f"{type(error).__name__}: {error}"
    return None
