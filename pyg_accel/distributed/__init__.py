"""Full-graph training over several processes, each with its own GPU or cores."""

from pyg_accel.distributed.checkpoint import load_checkpoint, save_checkpoint
from pyg_accel.distributed.comparison import check
from pyg_accel.distributed.folder import load, save
from pyg_accel.distributed.metrics import mean, report, total
from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.spread import distribute

__all__ = [
    "Distributed", "check", "distribute", "load", "load_checkpoint", "mean", "report", "save",
    "save_checkpoint", "total",
]  # fmt: skip
