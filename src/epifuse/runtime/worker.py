"""What runs in a process that compiles kernels into the store for another one.

A line on standard input is a number, the name of a provider and a kernel's text, or null for none, as a JSON list. Each
is answered by one line on standard output, in whichever order they are done: the number, and null once the kernel is
stored or the error. Every kernel has a forked child of its own, which has what compiles imported, and which no other
kernel can bring down. All ends with the input, or when the parent is gone.
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

_LOOK_AFTER = 1.0  # seconds: a forked child of the parent may hold our input open, so its end is not enough


class Child(NamedTuple):
    """A process that compiles one kernel: the number of the request, the process, and the part of its answer so far."""

    number: int
    process: int
    answer: bytearray


def main(parent: int, folder: str) -> None:
    """Answer until the input ends. Temporary files are in `folder`, removed then: who is killed removes none."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a server may ignore it: nobody could wait for a child
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # of linkers too
    answers = os.dup(1)
    os.dup2(2, 1)  # what a compiler prints is no answer
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
                    _tell(answers, *_ended(source, children.pop(source)))
    except BrokenPipeError:
        return  # the parent is gone
    finally:
        for child in children.values():
            os.kill(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _ready(sources: list[int], parent: int) -> list[int]:
    """Wait for file descriptors that can be read. The list is empty if the parent process has ended."""
    while not (ready := select.select(sources, [], [], _LOOK_AFTER)[0]):
        if os.getppid() != parent:
            return []
    return ready


def _begun(answers: int, number: int, provider: str, text: str | None) -> tuple[int, Child] | None:
    """The child that compiles a text, and what its answer is read from; without a text the answer is given here."""
    error = _error(lambda: providers.load(provider).prepare())
    if text is not None:  # where nothing can be imported, the child tells why
        return _forked(number, provider, text)
    _tell(answers, number, error)
    return None


def _forked(number: int, provider: str, text: str) -> tuple[int, Child]:
    """A child that compiles, and what its answer is read from."""
    source, sink = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: what is imported starts none that we need
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
    """The number and the answer of a child that has ended."""
    os.close(source)
    _, status = os.waitpid(child.process, 0)
    if not child.answer:
        return child.number, f"its process ended with status {os.waitstatus_to_exitcode(status)}"
    return child.number, json.loads(child.answer)


def _tell(answers: int, number: int, error: str | None) -> None:
    os.write(answers, json.dumps([number, error]).encode() + b"\n")


def _error(work: Callable[[], None]) -> str | None:
    """What it raises, or None."""
    try:
        work()
    except Exception as error:  # whatever it is, the parent is told
        return f"{type(error).__name__}: {error}"
    return None
