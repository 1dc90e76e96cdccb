"""Several processes that run tests/distributed_checks.py together, and what failed in any of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def failures(device: str, folder: Path, count: int = 2, seconds: float = 300) -> dict[str, str]:
    """By name of the check, what each process says that failed; nothing where all is well."""
    # Gloo would else ask for the address of the host's name, which a container may not have.
    here = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    environment = {**here, **os.environ, "PYTHONPATH": str(ROOT / "src"), "EPIFUSE_CACHE_DIR": str(folder / "store")}
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
