"""Several processes that run tests/distributed_checks.py together, and what failed in any of them. Programs that each
run in a process of their own, with PyTorch imported once for all."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

FORKS = """
import json, os, runpy, sys, warnings
import epifuse, torch
for line in json.loads(sys.argv[1]):
    print(*line, flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: NumPy has threads
        child = os.fork()
    if child == 0:
        sys.argv, sys.path[0] = line, os.path.dirname(line[0])
        runpy.run_path(line[0], run_name="__main__")
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, line
"""


def run_each(lines: list[list[str]]) -> dict[str, str]:
    """What each program prints, by its path: a line is the path and the arguments. None may fail or warn."""
    done = subprocess.run([sys.executable, "-c", FORKS, json.dumps(lines)], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    found, printed = {}, done.stdout
    for line in reversed(lines):
        printed, _, found[line[0]] = printed.rpartition(" ".join(line) + "\n")
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
