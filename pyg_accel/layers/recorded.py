"""A torch.fx graph of a model's calls, with the interface of the model."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

__all__ = ["MODEL", "Recorded"]

MODEL = "_model"
# What a module and its graph have together: names and their order are the same for both.
_TABLES = (
    "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules",
    "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class Recorded(fx.GraphModule):
    """Runs a graph on the parameters, buffers and modules of a model.

    They have the names that they have there, also those that no call refers to. Other attributes
    and the methods of the model are there too.
    """

    _mine: frozenset[str]

    def __init__(self, model: torch.nn.Module, graph: fx.Graph, name: str) -> None:
        """Share what the model holds.

        Args:
            model: holds what the graph refers to.
            graph: its calls.
            name: of the class that the result seems to be of.
        """
        super().__init__(torch.nn.Module(), fx.Graph(), name)
        own = vars(self)
        own.update({table: vars(model)[table] for table in _TABLES})
        own["training"] = model.training
        own[MODEL] = model
        self.graph = graph
        own["_mine"] = frozenset(own) | {"_mine"}

    def __getattr__(self, name: str) -> Any:
        """Return what the model has under a name."""
        model = vars(self).get(MODEL)
        if model is None or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign to the model what is the model's."""
        model = vars(self).get(MODEL)
        if model is not None and name in vars(model) and name not in vars(self):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> "Recorded":
        """Set the mode, the way the model does it."""
        model = vars(self)[MODEL]
        model.train(mode)
        self.training = model.training
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        vars(self)[MODEL]._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        vars(self)[MODEL]._load_from_state_dict(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Save the model, the calls, and what was assigned later."""
        own = vars(self)
        more = {name: value for name, value in own.items() if name not in self._mine}
        cls = type(self).__mro__[1]  # torch.fx makes a class for every instance
        return _loaded, (cls, own[MODEL], _written(self.graph), type(self).__name__, more)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorded":
        """Copy the model with the graph."""
        make, given = self.__reduce__()
        made: Recorded = make(*copy.deepcopy(given, memo))
        memo[id(self)] = made
        return made

    def __copy__(self) -> "Recorded":
        """Return another graph of the same model."""
        make, given = self.__reduce__()
        made: Recorded = make(*given)
        return made


@dataclass(frozen=True)
class _Result:
    """Stands for the result of a call in the arguments of another."""

    name: str


_Line = tuple[str, str, Any, Any, Any]


def _written(graph: fx.Graph) -> list[_Line]:
    """The calls of a graph as data."""

    def named(value: Any) -> Any:
        return _Result(value.name) if isinstance(value, fx.Node) else value

    return [
        (n.op, n.name, n.target, *fx.node.map_aggregate((n.args, n.kwargs), named))
        for n in graph.nodes
    ]


def _read(lines: list[_Line]) -> fx.Graph:
    """Undo :func:`_written`."""
    graph, known = fx.Graph(), dict[str, fx.Node]()

    def node_of(value: Any) -> Any:
        return known[value.name] if isinstance(value, _Result) else value

    for op, name, target, args, kwargs in lines:
        given = fx.node.map_aggregate((args, kwargs), node_of)
        known[name] = graph.create_node(op, target, *given, name=name)
    return graph


def _loaded(
    cls: type[Recorded],
    model: torch.nn.Module,
    lines: list[_Line],
    name: str,
    more: dict[str, Any],
) -> Recorded:
    made = cls(model, _read(lines), name)
    vars(made).update(more)
    return made
