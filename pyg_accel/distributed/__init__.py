"""Full-graph training over several processes, each with a GPU or some cores of its own."""

from pyg_accel.distributed.metrics import mean, total
from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.spread import distribute

__all__ = ["Distributed", "distribute", "mean", "total"]
