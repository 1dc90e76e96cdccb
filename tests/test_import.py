"""`import epifuse` is cheap and silent: no compiler is loaded, no device is touched."""

import subprocess
import sys

PROBE = """
import epifuse, sys, torch
assert "cutlass" not in sys.modules, "cutlass was imported"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
"""


def test_import_is_silent_and_lazy() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
