"""`python -m epifuse.runtime.worker PARENT`: compiles kernels into the store for another process.

A line on standard input is the name of a provider and a kernel's text, as a JSON list. Each is answered by one line on
standard output: null once the kernel is stored, or a JSON string with the error. It ends with its input, or when the
process PARENT is gone.
"""

from __future__ import annotations

import json
import os
import select
import sys

_LOOK_AFTER = 1.0  # seconds: a forked child of the parent may hold our input open, so its end is not enough


def main(parent: int) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a compiler prints is no answer
    lines = os.fdopen(os.dup(0), "rb", buffering=0)
    while line := _next_line(lines.fileno(), parent):
        print(json.dumps(_compile(*json.loads(line))), file=answers)


def _next_line(source: int, parent: int) -> bytes:
    """A line with its end; empty where there is none to come. The parent sends one line and waits for its answer."""
    line = b""
    while not line.endswith(b"\n"):
        while not select.select([source], [], [], _LOOK_AFTER)[0]:
            if os.getppid() != parent:
                return b""
        if not (piece := os.read(source, 1 << 16)):
            return b""
        line += piece
    return line


def _compile(provider: str, text: str) -> str | None:
    """The error, or None where the kernel is stored."""
    from epifuse import providers

    try:
        providers.load(provider).compile(text)
    except Exception as error:  # whatever it is, the parent is told
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
