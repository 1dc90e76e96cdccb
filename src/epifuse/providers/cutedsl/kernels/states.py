"""States of pipelines: how to advance one by several steps at once."""

from typing import Any

from cutlass import pipeline


def after(state: Any, steps: Any) -> Any:
    """Return the pipeline's state `steps` steps later. In CuTe DSL 4.7 its own `advance` takes only one step."""
    at = state.index + steps
    phase = state.phase ^ (at // state.stages % 2)
    return pipeline.PipelineState(state.stages, state.count + steps, at % state.stages, phase)
