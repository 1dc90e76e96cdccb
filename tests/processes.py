"""Several processes that run tests/distributed_checks.py together, and what failed in any of them. Programs that each
run in a process of their own, with PyTorch imported once for all."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

SERVER = """
import atexit, json, os, runpy, sys, threading, traceback, types, warnings
import torch, torch._inductor
{imports}

def become(cwd, environment, options, words, files):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, file in enumerate([os.devnull, *files]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    for option in options:
        sys.warnoptions.append(option)
        warnings._setoption(option)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.path.dirname(words[0]) if os.path.isfile(words[0]) else "", *paths, *sys.path[1:]]

def run(words):
    if words[0] == "-c":
        sys.argv, main = ["-c", *words[2:]], types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[1], "<string>", "exec"), vars(main))
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

def leave(status):
    # All that Python does at its end but for taking apart what is imported, which takes a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: NumPy has threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            asked = json.loads(line)
            become(*asked)
            run(asked[3])
            status = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            else:
                status = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            leave(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server(imports: str) -> subprocess.Popen[str]:
    """A process that has imported PyTorch with its compiler, and forks for each program that it is told of."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", SERVER.replace("{imports}", imports)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(lambda: (server.communicate(), None)[1])
    return server


def run_python(
    *words: str,
    options: Sequence[str] = (),
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    imports: str = "",
) -> subprocess.CompletedProcess[str]:
    """`python -W option ... word ...` in a process of its own, which finds PyTorch imported, and nothing of epifuse.

    That import and its end are 4 of 5 seconds of a small program. One that is about imports, or about what differs from
    process to process, as hashes of strings do, is run by `subprocess`.
    """
    command = [sys.executable, *(word for option in options for word in ("-W", option)), *words]
    if not hasattr(os, "fork"):
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    server = _server(imports)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("out", "err")]
        asked = str(cwd or Path.cwd()), dict(env or os.environ), list(options), list(words), files
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        out, err = (Path(file).read_text(encoding="utf-8") for file in files)
    return subprocess.CompletedProcess(command, status, out, err)


def run_each(lines: list[list[str]]) -> dict[str, str]:
    """What each program prints, by its path: a line is the path and the arguments. None may fail or warn."""
    found = {}
    for line in lines:
        done = run_python(*line, imports="import epifuse")
        assert (done.stderr, done.returncode) == ("", 0), done.stdout
        found[line[0]] = done.stdout
    return found


def failures(device: str, folder: Path, count: int = 2, seconds: float = 300) -> dict[str, str]:
    """By name of the check, what each process says that failed; nothing where all is well."""
    # Gloo would else ask for the address of the host's name, which a container may not have.
    here = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**here, **os.environ, "PYTHONPATH": path, "EPIFUSE_CACHE_DIR": str(folder / "store")}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "distributed_checks.py")]
    started = [
        subprocess.Popen([*command, str(rank), str(count), device, str(folder)], env=environment, cwd=folder)
        for rank in range(count)
    ]
    try:
        codes = [each.wait(seconds) for each in started]
    except subprocess.TimeoutExpired:
        codes = []
    finally:
        for each in started:
            each.kill()
            each.wait()
    found = {} if codes == [0] * count else {"they end": f"with {codes}"}
    for rank in range(count):
        for name, text in json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")).items():
            if text:
                found[name] = found.get(name, "") + text
    return found
