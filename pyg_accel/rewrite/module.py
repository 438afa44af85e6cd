"""What ``optimize()`` returns: a GraphModule with the names of the original."""

import copy
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import fx

from pyg_accel.layers.names import keep_names
from pyg_accel.rewrite.copies import with_embeddings
from pyg_accel.rewrite.layer import Associated

__all__ = ["Rewritten"]

WHOLE = "original_code"  # the only child of a model whose own code is run


class Rewritten(fx.GraphModule):
    """A rewritten model.

    Attributes:
        unread: why the code of modules could not be read, by path: it is run as it is, on
            rewritten layers.
    """

    unread: dict[str, str]
    _name: str

    @property
    def is_whole(self) -> bool:
        """Its graph is a single call of the model's own code."""
        return WHOLE in self._modules

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        root: torch.nn.Module,
        graph: fx.Graph,
        layers: Mapping[str, Associated],
        unread: dict[str, str],
    ) -> "Rewritten":
        """Make one of a graph.

        Args:
            model: the original.
            root: holds what the graph refers to.
            graph: its calls.
            layers: stand in for layers, by path.
            unread: see above.
        """
        made = cls(root, graph, type(model).__name__)
        made._name = type(model).__name__
        for path, layer in layers.items():
            made.set_submodule(path, layer)
        made.unread = unread
        keep_names(made, model, with_embeddings)
        return made.train(model.training) if model.training != made.training else made

    @classmethod
    def whole(
        cls,
        model: torch.nn.Module,
        module: torch.nn.Module,
        unread: dict[str, str],
        given: Mapping[str, Any],
    ) -> "Rewritten":
        """Make one whose graph is a single call of a module.

        Args:
            model: the original.
            module: the same with rewritten layers inside.
            unread: see above.
            given: arguments of its ``forward``, by name.
        """
        graph = fx.Graph()
        args, kwargs = _placeholders(graph, model, given)
        graph.output(graph.call_module(WHOLE, tuple(args), dict(kwargs)))
        root = torch.nn.Module()
        root.add_module(WHOLE, module)
        root.training = module.training
        made = cls(root, graph, type(model).__name__)
        made._name = type(model).__name__
        made.unread = unread
        made._rename()
        return made

    def _rename(self) -> None:
        self._register_state_dict_hook(_strip)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_prefix)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        """Save what no call refers to as well."""
        make, given = super().__reduce__()
        return _loaded, (make, given, _held(self), self._name, self.unread, self.training)

    def __deepcopy__(self, memo: Any) -> "Rewritten":
        """Copy what no call refers to as well."""
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, Rewritten)
        copied.unread, copied._name = dict(self.unread), self._name
        keep_names(copied, _holder(copy.deepcopy(_held(self), memo)))
        return copied


def _loaded(
    make: Callable[..., fx.GraphModule],
    given: tuple[Any, ...],
    held: dict[str, Any],
    name: str,
    unread: dict[str, str],
    training: bool,
) -> Rewritten:
    graph = make(*given)
    made = Rewritten(graph, graph.graph, name)
    made._name, made.unread, made.training = name, unread, training
    keep_names(made, _holder(held))
    if made.is_whole:
        made._rename()
    return made


def _held(module: torch.nn.Module) -> dict[str, Any]:
    tables = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
    return {table: vars(module)[table] for table in tables}


def _holder(held: Mapping[str, Any]) -> torch.nn.Module:
    """A module that has nothing but what another held."""
    made = torch.nn.Module()
    vars(made).update(held)
    return made


def _placeholders(
    graph: fx.Graph, model: torch.nn.Module, given: Mapping[str, Any]
) -> tuple[list[fx.Node], dict[str, fx.Node]]:
    """The arguments of a graph that calls a module, and how it is called with them."""
    args: list[fx.Node] = []
    kwargs: dict[str, fx.Node] = {}
    late: list[tuple[str, Parameter]] = []
    for name, parameter in list(signature(type(model).forward).parameters.items())[1:]:
        if parameter.kind is Parameter.VAR_POSITIONAL:
            args += [graph.placeholder(f"{name}_{i}") for i in range(len(given.get(name, ())))]
        elif parameter.kind is Parameter.VAR_KEYWORD:
            late += [(key, Parameter(key, Parameter.KEYWORD_ONLY)) for key in given.get(name, {})]
        elif parameter.kind is Parameter.KEYWORD_ONLY:
            late.append((name, parameter))
        elif parameter.default is Parameter.empty:
            args.append(graph.placeholder(name))
        else:
            args.append(graph.placeholder(name, default_value=parameter.default))
    for name, parameter in late:
        known = parameter.default is not Parameter.empty
        default = parameter.default if known else given[name]
        kwargs[name] = graph.placeholder(name, default_value=default)
    return args, kwargs


def _strip(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give parameters the names that they have in the original."""
    inner = f"{prefix}{WHOLE}."
    for key in [k for k in state if k.startswith(inner)]:
        state[prefix + key[len(inner) :]] = state.pop(key)


def _prefix(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Undo :func:`_strip`."""
    for key in [k for k in state if k.startswith(prefix)]:
        state[f"{prefix}{WHOLE}.{key[len(prefix) :]}"] = state.pop(key)
