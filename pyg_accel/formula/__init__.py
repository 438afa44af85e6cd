"""The language of messages: formulas, the functions in them, and their derivatives."""

from pyg_accel.formula.language import *  # noqa: F403
from pyg_accel.formula.language import __all__ as __all__
