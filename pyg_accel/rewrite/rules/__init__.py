"""Lifting rules: what is recorded, and the algebras that no record finds."""

from pyg_accel.rewrite.rules import (  # noqa: F401 - they register themselves
    arma,
    chebyshev,
    recorded,
    relations,
)
