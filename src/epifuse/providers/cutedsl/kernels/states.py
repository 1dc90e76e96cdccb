"""States of pipelines, further on than one step."""

from typing import Any

from cutlass import pipeline


def after(state: Any, steps: Any) -> Any:
    """A pipeline's state some steps later; its own `advance` takes one step in CuTe DSL 4.7."""
    at = state.index + steps
    phase = state.phase ^ (at // state.stages % 2)
    return pipeline.PipelineState(state.stages, state.count + steps, at % state.stages, phase)
