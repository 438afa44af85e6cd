"""Lifting rules, one file a family of layers."""

from pyg_accel.rewrite.rules import (  # noqa: F401 - they register themselves
    attention,
    convolution,
    neural,
    powers,
    relations,
)
from pyg_accel.rewrite.rules.written import written

__all__ = ["written"]
