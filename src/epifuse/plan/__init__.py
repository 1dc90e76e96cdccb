"""Planning: which kernel runs a graph, how, and why the others do not."""

from epifuse.plan.plan import Allocation, Answer, Details, Offer, Plan, Reason, Refusal, accepted
from epifuse.plan.select import Selection, select
from epifuse.plan.spec import KernelSpec

__all__ = [
    "Allocation",
    "Answer",
    "Details",
    "KernelSpec",
    "Offer",
    "Plan",
    "Reason",
    "Refusal",
    "Selection",
    "accepted",
    "select",
]
