"""Lifting rules, one file a family of layers."""

from pyg_accel.rewrite.rules import convolution  # noqa: F401 - they register themselves
