"""The language of messages: formulas, the functions in them, their derivatives, and calls."""

from pyg_accel.formula import computation, language
from pyg_accel.formula.computation import *  # noqa: F403
from pyg_accel.formula.language import *  # noqa: F403

__all__ = []
__all__ += computation.__all__
__all__ += language.__all__
