"""Questions about the machine."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from epifuse.base.errors import fail, kind_of
from epifuse.kernel import Status


def is_device_cc_supported(ccs: Iterable[int]) -> Status:
    """Whether the current device has one of these compute capabilities, times ten (90 is Hopper, 0 is the CPU).

    A machine without a GPU counts as a CPU: `is_device_cc_supported({0, 90})` holds on it. Raises `ArgumentTypeError`
    if `ccs` are not whole numbers.
    """
    wanted = tuple(ccs) if isinstance(ccs, Iterable) else (None,)
    if not all(isinstance(cc, int) for cc in wanted):
        want = "compute capabilities, as in {90, 100}"
        raise fail("wrong_arguments", None, function="is_device_cc_supported", want=want, type=kind_of(ccs))
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        current = major * 10 + minor
    else:
        current = 0
    if current in wanted:
        return Status()
    return Status(fail("device_cc", None, current=current, wanted=sorted(wanted)))
