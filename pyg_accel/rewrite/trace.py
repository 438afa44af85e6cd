"""From a model to a torch.fx graph whose leaves are its layers.

Only modules that hold message passing layers are read; everything else stays a call of the module.
Three things differ from ``torch.fx.symbolic_trace``:

* ``self.training`` is not baked in. It becomes a call of a :class:`Mode`, a module without
  parameters that ``train()`` and ``eval()`` reach like any other, so dropout follows the mode.
* Arguments that are no tensors are constants of the graph, and a call with others is refused.
* A module whose code cannot be read (a branch on a value, say) becomes a leaf. Its code runs as it
  always did, on rewritten children.
"""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric import utils
from torch_geometric.nn import MessagePassing, pool
from torch_geometric.nn import Sequential as GeometricSequential

from pyg_accel.rewrite.copies import clone, with_embeddings

__all__ = ["Mode", "Unreadable", "holds_layers", "trace"]

MODE = "training_mode"  # name of the child that knows it
# They do not ask for the mode, and count their children.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, GeometricSequential)

# What reading code on symbols may raise. A mistake of the model's own comes up when it is run.
_FAILURES = (
    fx.proxy.TraceError, TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError,
    AssertionError, NameError,
)  # fmt: skip


class Mode(torch.nn.Module):
    """Says whether the module that it is a child of is being trained."""

    def forward(self) -> bool:
        """Return the mode."""
        return self.training


class Unreadable(Exception):
    """A module whose code could not be read; the text says why.

    Attributes:
        path: of the module.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def holds_layers(module: torch.nn.Module) -> bool:
    """Whether there are message passing layers inside, so that its code has to be read."""
    if isinstance(module, MessagePassing):
        return False
    return any(isinstance(m, MessagePassing) for m in module.modules() if m is not module)


def _skeleton(module: torch.nn.Module, path: str, opaque: Mapping[str, Any]) -> torch.nn.Module:
    """Copy the modules that will be read; their mode is a symbol."""
    copied = clone(module)
    for name, child in module._modules.items():
        inner = f"{path}.{name}" if path else name
        if inner in opaque:
            copied._modules[name] = opaque[inner]
        elif child is not None and holds_layers(child):
            copied._modules[name] = _skeleton(child, inner, opaque)
        elif child is not None and not isinstance(child, MessagePassing):
            copied._modules[name] = with_embeddings(child)
    if not isinstance(module, CONTAINERS):
        copied._modules[MODE] = Mode().train(module.training)
        copied.__class__ = _symbolic(type(module))
    return copied


def _symbolic(cls: type) -> type:
    """A class whose instances answer ``training`` with a symbol while they are being read."""

    def training(self: torch.nn.Module) -> Any:
        tracer = _Tracer.current
        return vars(self)["training"] if tracer is None else tracer.mode_of(self)

    def assign(self: torch.nn.Module, mode: bool) -> None:
        vars(self)["training"] = mode

    return type(cls.__name__, (cls,), {"training": property(training, assign)})


def _functions() -> tuple[FunctionType, ...]:
    """PyG's functions, which branch on what they are given: calls of them are kept whole."""
    return tuple(
        value
        for module in (utils, pool)
        for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__.startswith("torch_geometric.")
    )


class _Tracer(fx.Tracer):
    current: "_Tracer | None" = None

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(autowrap_functions=_functions())
        self.given = given
        self.stack: list[str] = []

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return not (holds_layers(m) and (MODE in m._modules or isinstance(m, CONTAINERS)))

    def call_module(
        self,
        m: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        self.stack.append(path)
        result = super().call_module(m, forward, args, kwargs)
        self.stack.pop()
        return result

    def mode_of(self, module: torch.nn.Module) -> Any:
        """The mode of a module that is being read, as a call of its :class:`Mode`."""
        path = self.path_of_module(module)
        return self.create_proxy("call_module", f"{path}.{MODE}" if path else MODE, (), {})

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Make the arguments symbols, but constants of those that are no tensors."""
        args: list[Any] = [self.root]
        for name, parameter in list(signature(root_fn).parameters.items())[1:]:
            default = () if parameter.default is Parameter.empty else (parameter.default,)
            symbol = self.create_proxy("placeholder", name, default, {})
            value = self.given[name]
            if value is None or isinstance(value, (bool, str)) or default == (value,):
                self.create_proxy("call_function", expect, (symbol, value, name), {})
                args.append(value)
            else:
                args.append(_opened(symbol, value))
        return root_fn, args


def _opened(symbol: Any, value: Any) -> Any:
    """A tuple or list of symbols for a tuple or list of tensors: code may unpack it."""
    if type(value) in (tuple, list) and any(isinstance(v, Tensor) for v in value):
        return type(value)(None if v is None else symbol[i] for i, v in enumerate(value))
    return symbol


def expect(value: Any, example: Any, name: str) -> None:
    """Refuse an argument that the graph was not made for."""
    if isinstance(value, fx.Proxy):  # torch.fx reads a graph again, e.g. when it is loaded
        value.tracer.create_proxy("call_function", expect, (value, example, name), {})
        return
    if value is not example and value != example:
        raise ValueError(
            f"optimize() was given the example {name}={example!r}, and its result does not take "
            f"others: optimize the model again with {name} among the examples"
        )


def trace(
    model: torch.nn.Module,
    given: Mapping[str, Any],
    opaque: Mapping[str, torch.nn.Module],
) -> tuple[torch.nn.Module, fx.Graph]:
    """Read a model.

    Args:
        model: any module.
        given: example arguments of its ``forward``, by name.
        opaque: what stands for the modules that are not to be read, by path.

    Returns:
        A module that holds what the graph refers to, and the graph.

    Raises:
        Unreadable: naming the innermost module that could not be read.
    """
    kinds = [p.kind for p in signature(type(model).forward).parameters.values()]
    if Parameter.VAR_POSITIONAL in kinds or Parameter.VAR_KEYWORD in kinds:
        raise Unreadable("", "it takes any number of arguments")
    root = _skeleton(model, "", opaque)
    tracer = _Tracer(given)
    _Tracer.current = tracer
    try:
        read = tracer.trace(root)
    except _FAILURES as error:
        path = tracer.stack[-1] if tracer.stack else ""
        reason = str(error).partition("\n")[0]
        raise Unreadable(path, f"{type(error).__name__}: {reason}") from error
    finally:
        _Tracer.current = None
    graph = fx.Graph()  # one that does not remember this tracer, so that it can be saved
    graph.output(graph.graph_copy(read, {}))
    return root, graph
