"""CUDA graphs for PyG models: :func:`graphed` for a model, :func:`graphed_step` for a step."""

from pyg_accel.cuda_graphs.model import Graphed, graphed
from pyg_accel.cuda_graphs.step import GraphedStep, graphed_step

__all__ = ["Graphed", "GraphedStep", "graphed", "graphed_step"]
