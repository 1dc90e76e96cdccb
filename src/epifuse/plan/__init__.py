"""Planning: which kernel runs a graph, how, and why the others do not."""

from epifuse.plan.plan import Allocation, Answers, Details, Plan, Reason, Refusal
from epifuse.plan.select import Selection, select
from epifuse.plan.spec import KernelSpec

__all__ = [
    "Allocation",
    "Answers",
    "Details",
    "KernelSpec",
    "Plan",
    "Reason",
    "Refusal",
    "Selection",
    "select",
]
