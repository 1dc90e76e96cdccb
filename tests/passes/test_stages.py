"""When values are computed, where tiles hold a part of what they need."""

import pytest
import torch

import epifuse as ef
from epifuse.passes.assign_stages import sweeps


@pytest.mark.parametrize("body", ["sum(best.reshape(2, 4, 12), dim=1)", "amax(best.reshape(8, 3, 4), dim=-1)"])
def test_a_reduction_of_what_is_finished_waits_for_every_tile(body: str) -> None:
    """Rows of one batch fill a tile, but the largest over the batches is known after the last."""
    a, b = (torch.randint(-8, 9, shape).float() for shape in ((3, 8, 5), (3, 5, 12)))
    source = f"def epi(accum): best = accum.amax(dim=0); s = {body}; return s"
    args = ef.GemmArguments(
        a, b, epilogue=ef.EpilogueArguments.partial(source, {}), constraints=ef.Constraints(tile=(4, 12))
    )
    best = (a @ b).amax(dim=0)
    want = eval(body, {"best": best, "sum": torch.sum, "amax": torch.amax})
    assert torch.equal(ef.get_kernels(args)[0].run(args)["s"], want)
    assert sweeps(args.graph) == 1
