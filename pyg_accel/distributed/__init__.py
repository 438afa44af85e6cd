"""Full-graph training over several processes, each with its own GPU or cores."""

from pyg_accel.distributed.folder import load, save
from pyg_accel.distributed.metrics import mean, report, total
from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.spread import distribute

__all__ = ["Distributed", "distribute", "load", "mean", "report", "save", "total"]
