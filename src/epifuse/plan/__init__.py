"""Planning: which kernel runs a graph, how, and why the others do not."""

from epifuse.plan.plan import Allocation, Answers, Details, Estimate, Plan, Reason, Refusal
from epifuse.plan.select import Selection, select
from epifuse.plan.spec import KernelSpec

__all__ = [
    "Allocation",
    "Answers",
    "Details",
    "Estimate",
    "KernelSpec",
    "Plan",
    "Reason",
    "Refusal",
    "Selection",
    "select",
]
