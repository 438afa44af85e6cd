"""A torch.fx graph of a model's calls, with the interface of the model."""

from functools import partial
from typing import Any

import torch
from torch import fx

from pyg_accel.wrapper import ModelWrapper

__all__ = ["Recorded"]


class Recorded(ModelWrapper):
    """Runs a graph on the parameters, buffers and modules of a model.

    Args:
        model: has the attributes that the graph refers to.
        graph: its calls.
    """

    _own = frozenset(("forward", "graph"))

    def __init__(self, model: torch.nn.Module, graph: fx.Graph) -> None:
        """Compile the graph."""
        code = graph.python_code("self")
        names = dict(code.globals)
        exec(code.src, names)
        super().__init__(model, graph=graph, forward=partial(names["forward"], model))

    def _made_of(self) -> tuple[Any, ...]:
        return self._original, self.graph
