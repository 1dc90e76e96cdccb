"""The command line: `python -m epifuse`, or `epifuse` if it is installed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from epifuse import __version__
from epifuse.base.errors import EpifuseError
from epifuse.tools import cache, doctor, explain, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: as in a shell, 130 after an interrupt, 141 if its pipe was closed."""
    parser = commands()
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters its encoding lacks, such as a dash in ASCII
    try:
        status = _run(options)
        if sys.stdout is not None:  # it is None in a daemon, which has closed it
            sys.stdout.flush()
    except EpifuseError as error:
        parser.exit(1, f"epifuse: {error}\n")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # for instance, `head` has read all that it wanted
        _discard_output()
        return 141
    except OSError as error:  # a full disk, or a file that may not be written
        _discard_output()
        parser.exit(1, f"epifuse: {error}\n")
    return status


def _discard_output() -> None:
    """Send the rest of standard output to the null device, because Python flushes it once more when it exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def commands() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog="epifuse", description="Fuse your own epilogue into a GEMM.")
    found = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    found.add_parser("doctor", help="what is installed, which kernels run here, and why the others do not")
    explain.add_options(found.add_parser("explain", help="which kernel would run an epilogue, and why no other"))
    demo = found.add_parser("demo", help="a loss on real data, fused: its graph, plan, result, time and memory")
    demo.add_argument("--svg", type=Path, default=Path("epilogue.svg"), help="where the picture of the graph goes")
    demo.add_argument("--rounds", type=_above_zero, default=9, help="timed rounds")
    cache.add_options(found.add_parser("cache", help="the kernels that are kept on disk: how many, or remove them"))
    tune.add_options(found.add_parser("tune", help="which kernel is the fastest for given shapes, kept on disk"))
    found.add_parser("docs", help="the language on one page, in Markdown")
    found.add_parser("gpus", help="which GPUs have kernels for what; EPIFUSE_UNTESTED=1 has those that never ran")
    found.add_parser("version", help="the version")
    return parser


def _above_zero(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    if options.command == "demo":
        from epifuse.tools.demo import run  # the other commands do not need it

        run(options.svg, options.rounds)
    elif options.command == "docs":
        from epifuse.tools.language import page

        print(page(), end="")
    elif options.command == "gpus":
        from epifuse.providers.cutedsl.untested import are_allowed
        from epifuse.tools.gpus import table

        print(table(), end="")
        if not are_allowed():
            print(
                "EPIFUSE_UNTESTED=1, set before Python starts, allows kernels for GPUs on which none has run",
                file=sys.stderr,
            )
    elif options.command == "version":
        print(__version__)
    else:
        return {"cache": cache.run, "doctor": doctor.run, "explain": explain.run, "tune": tune.run}[options.command](
            options
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
