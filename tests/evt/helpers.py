"""A product that knows its own rounding."""

import torch

from epifuse.tools.testing import Bounded, bounded


def product(a: torch.Tensor, b: torch.Tensor) -> Bounded:
    """A @ B in float64, with the error a float32 sum in any order may make."""
    eps = torch.finfo(torch.float32).eps
    wide = a.double(), b.double()
    room = a.shape[-1] * eps * (wide[0].abs() @ wide[1].abs())
    made: Bounded = bounded(wide[0] @ wide[1], eps, room)
    return made
