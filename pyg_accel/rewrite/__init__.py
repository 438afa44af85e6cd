"""Rewrites a model: the cheapest order of its matrix products, for this graph and machine."""

from pyg_accel.rewrite.associations import associations
from pyg_accel.rewrite.lift import Algebra, Call, NotLifted, lifts
from pyg_accel.rewrite.model import optimize

__all__ = ["Algebra", "Call", "NotLifted", "associations", "lifts", "optimize"]
