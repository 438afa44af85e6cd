"""From a model to a torch.fx graph whose leaves are its layers.

Only modules that hold message passing layers are read; everything else stays a call of the module.
Three things differ from ``torch.fx.symbolic_trace``:

* ``self.training`` is not baked in. It becomes an attribute that the graph reads in every call, so
  dropout follows the mode.
* Arguments that are no tensors are constants of the graph, and a call with others is refused.
* A module whose code cannot be read (a branch on a value, say), or does what a graph would leave
  out (:mod:`pyg_accel.layers.reading`), becomes a leaf. Its code runs as it always did, on
  rewritten children.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import Parameter, signature
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric import utils
from torch_geometric.nn import MessagePassing, pool
from torch_geometric.nn import Sequential as GeometricSequential

from pyg_accel.layers.reading import CONSTANT, FAILURES, LeftOut, Reader, State, as_it_was
from pyg_accel.patching.reasons import has_hooks

__all__ = ["MODE", "Unreadable", "holds_layers", "read"]

MODE = "training"
# They do not ask for the mode, and are recognised by their class.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, GeometricSequential)


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


def _readable(
    module: torch.nn.Module, path: str, opaque: Collection[str]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules whose code is read, by path."""
    yield path, module
    for name, child in module._modules.items():
        inner = f"{path}.{name}" if path else name
        if child is not None and inner not in opaque and holds_layers(child):
            yield from _readable(child, inner, opaque)


def _symbolic(module: torch.nn.Module) -> type:
    """A class for a module that is read: it answers ``training`` with a symbol."""

    def training(self: torch.nn.Module) -> Any:
        tracer = _Tracer.current
        return vars(self)["training"] if tracer is None else tracer.mode_of(self)

    def assign(self: torch.nn.Module, mode: bool) -> None:
        vars(self)["training"] = mode

    body: dict[str, Any] = {}
    if not isinstance(module, CONTAINERS):
        body["training"] = property(training, assign)
    own = vars(module).get("forward")  # torch.fx looks at the class alone
    if isinstance(own, MethodType) and own.__self__ is module:
        body["forward"] = own.__func__
    return type(type(module).__name__, (type(module),), body)


def _functions() -> tuple[FunctionType, ...]:
    """PyG's functions, which branch on what they are given: calls of them are kept whole."""
    return tuple(
        value
        for module in (utils, pool)
        for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__.startswith("torch_geometric.")
    )


class _Tracer(Reader):
    current: "_Tracer | None" = None

    def __init__(self, given: Mapping[str, Any], readable: Collection[torch.nn.Module]) -> None:
        super().__init__(autowrap_functions=_functions())
        self.given, self.readable = given, {id(module) for module in readable}
        self.stack: list[str] = []
        self.state: State | None = None

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self.readable

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
        self.check()
        self.stack.pop()
        return result

    def check(self) -> None:
        """Refuse code that did what is no call."""
        if self.state is not None and (change := self.state.changed()):
            raise LeftOut(f"{change}, and a graph would not")

    def mode_of(self, module: torch.nn.Module) -> Any:
        """The mode of a module that is being read, as an attribute that the graph looks up."""
        path = self.path_of_module(module)
        return self.create_proxy("get_attr", f"{path}.{MODE}" if path else MODE, (), {})

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


def read(
    root: torch.nn.Module,
    given: Mapping[str, Any],
    opaque: Collection[str] = (),
) -> fx.Graph:
    """Read a module that has no other use.

    Args:
        root: the module.
        given: example arguments of its ``forward``, by name.
        opaque: paths of the modules that are not to be read.

    Returns:
        The graph of its calls.

    Raises:
        Unreadable: naming the innermost module that could not be read.
    """
    kinds = [p.kind for p in signature(root.forward).parameters.values()]
    if Parameter.VAR_POSITIONAL in kinds or Parameter.VAR_KEYWORD in kinds:
        raise Unreadable("", "it takes any number of arguments")
    readable = dict(_readable(root, "", opaque))
    for path, module in readable.items():
        if has_hooks(module):
            raise Unreadable(path, "it has a hook, and a graph of its calls would not run that")
    tracer = _Tracer(given, readable.values())
    forward = vars(root).get("forward")
    if forward is not None and not (
        isinstance(forward, MethodType) and forward.__self__ is root
    ):  # fmt: skip
        raise Unreadable("", "its forward is a function of another object")
    classes = {module: type(module) for module in readable.values()}
    failed: Exception | None = None
    _Tracer.current = tracer
    with as_it_was(_of_users(root)) as tracer.state:
        try:
            for module in classes:
                module.__class__ = _symbolic(module)
            found = tracer.trace(root)
            tracer.check()
        except FAILURES as error:
            failed = error
        finally:
            _Tracer.current = None
            for module, cls in classes.items():
                module.__class__ = cls
        constants = {n: v for n, v in vars(root).items() if n.startswith(CONSTANT)}
    if failed is not None:
        path = tracer.stack[-1] if tracer.stack else ""
        reason = str(failed).partition("\n")[0]
        reason = reason if isinstance(failed, LeftOut) else f"{type(failed).__name__}: {reason}"
        raise Unreadable(path, reason) from failed
    vars(root).update(constants)
    graph = fx.Graph()  # one that does not remember this tracer, so that it can be saved
    graph.output(graph.graph_copy(found, {}))
    return graph


def _of_users(root: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose code users wrote, or may have."""
    return [m for m in root.modules() if m is root or not isinstance(m, MessagePassing)]
