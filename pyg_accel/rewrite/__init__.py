"""Rewrites a model: the cheapest order of its matrix products, for this graph and machine."""

from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.explanation import explain
from pyg_accel.rewrite.lift import associations
from pyg_accel.rewrite.model import optimize
from pyg_accel.rewrite.plans import LayerPlan, ModelPlan, TreePlan, plan
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.recorded import record

__all__ = [
    "Algebra",
    "Call",
    "LayerPlan",
    "ModelPlan",
    "NotLifted",
    "TreePlan",
    "associations",
    "explain",
    "lifts",
    "optimize",
    "plan",
    "record",
]
