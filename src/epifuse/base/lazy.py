"""`cached_property` as in Python 3.12, without a lock.

In Python 3.10 and 3.11, each cached property of `functools` has a lock, which all objects share. If a thread computes
the property of one object while another thread forks, the child waits for that lock forever.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801 - the name of the class that it replaces
        """A property that is computed at its first use. Two threads may both compute it; one result is kept."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.attrname, self.func(instance))  # later uses find it there
