"""Rewrites a model: the cheapest order of its matrix products, for this graph and machine."""

from pyg_accel.rewrite.explanation import explain
from pyg_accel.rewrite.lift import NotLifted
from pyg_accel.rewrite.model import associations, optimize
from pyg_accel.rewrite.plans import LayerPlan, ModelPlan, TreePlan, plan

__all__ = [
    "LayerPlan",
    "ModelPlan",
    "NotLifted",
    "TreePlan",
    "associations",
    "explain",
    "optimize",
    "plan",
]
