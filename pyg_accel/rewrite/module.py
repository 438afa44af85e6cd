"""What ``optimize()`` returns: a GraphModule with the names of the original."""

from collections.abc import Callable, Iterator
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import fx
from torch_geometric.nn import MessagePassing

from pyg_accel.layers.recorded import MODEL, Recorded

__all__ = ["RewrittenModule"]


class RewrittenModule(Recorded):
    """A rewritten model.

    Attributes:
        unread: why the code of modules could not be read, by path: it is run as it is, on
            rewritten layers.
    """

    unread: dict[str, str]

    @classmethod
    def of(
        cls, model: torch.nn.Module, graph: fx.Graph | None, unread: dict[str, str], name: str
    ) -> "RewrittenModule":
        """Make one.

        Args:
            model: a copy of the original with rewritten layers inside.
            graph: its calls; None for one call of its own code.
            unread: see above.
            name: of the original's class.
        """
        made = cls(model, _whole(model) if graph is None else graph, name)
        vars(made)["unread"] = unread  # whatever names the model has for its own
        return made

    @property
    def is_whole(self) -> bool:
        """Its graph is a single call of the model's own code."""
        return any(n.op == "call_module" and n.target == MODEL for n in self.graph.nodes)

    def recompile(self) -> Any:
        """Generate the code of the graph; the model's own is called with what was given."""
        code = super().recompile()
        if self.is_whole:
            type(self).forward = _forward_of(vars(self)[MODEL])
        return code

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield a layer that is the whole model as well: it has no other name."""
        mine = super().named_modules(*args, **kwargs)
        for path, module in mine:
            yield path, module
            layer = vars(self)[MODEL]
            if module is self and isinstance(layer, MessagePassing):
                yield path, layer


def _whole(model: torch.nn.Module) -> fx.Graph:
    """A graph that calls a module; a child of that name is none of the model's."""
    graph = fx.Graph()
    args = []
    for name, parameter in signature(model.forward).parameters.items():
        stars = "*" if parameter.kind is Parameter.VAR_POSITIONAL else ""
        stars = "**" if parameter.kind is Parameter.VAR_KEYWORD else stars
        default = () if parameter.default is Parameter.empty else (parameter.default,)
        if parameter.kind is Parameter.KEYWORD_ONLY:
            default = default or (None,)
        args.append(graph.create_node("placeholder", stars + name, default, name=name))
    graph.output(graph.call_module(MODEL, tuple(args)))
    return graph


def _forward_of(model: torch.nn.Module) -> Callable[..., Any]:
    """A ``forward`` that hands all arguments on, whatever their kinds and defaults."""

    def forward(self: RewrittenModule, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[MODEL](*args, **kwargs)

    given = signature(model.forward)
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    if all(p.name != "self" for p in given.parameters.values()):
        forward.__signature__ = Signature([own, *given.parameters.values()])  # type: ignore[attr-defined]
    return forward
