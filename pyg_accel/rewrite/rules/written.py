"""Layers that users write: messages ``w * x_j`` with a linear layer before or after.

Two things are read with torch.fx. ``message`` has to be linear in ``x_j``, with one number an edge
as the factor; which numbers, the message itself says, given ones for features. ``forward`` has to
call ``propagate`` once, on the features and the edge_index that it was given; what it does besides
runs as it is, before and after.
"""

import operator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_geometric.nn import Linear, MessagePassing

from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.guards import RENDERED, is_rendered
from pyg_accel.rewrite.ir import Broadcast, Expr, Leaf, Map
from pyg_accel.rewrite.matrices import Matrix, plain
from pyg_accel.rewrite.rules.common import Parts, add, edges, inverse_count, need_sum_or_mean
from pyg_accel.rewrite.trace import MODE, Unreadable, trace

__all__ = ["written"]

_MULTIPLY = {operator.mul, torch.mul, "mul", "multiply"}
_DIVIDE = {operator.truediv, torch.div, "div"}
_RESHAPE = {"view", "reshape", "unsqueeze", torch.unsqueeze, torch.reshape}
_FIXED = ("aggregate", "update", "message_and_aggregate")  # methods that have to be PyG's own


def _propagate(edge_index: Any, **kwargs: Any) -> Any:
    """Stands for the call of ``propagate`` in a graph that was read; it is never run."""
    raise AssertionError("a symbol")


def written(conv: Any, call: Call) -> Algebra:
    """A X W + b, or what has a part of it, and whatever the layer does with that."""
    cls = type(conv)
    if call.bipartite:
        raise NotLifted(f"no lifting rule for {cls.__name__} on a bipartite graph")
    for name in _FIXED:
        if getattr(cls, name) is not getattr(MessagePassing, name):
            raise NotLifted(f"{cls.__name__} has its own {name}")
    for name in RENDERED:
        if not is_rendered(getattr(cls, name), cls):
            raise NotLifted(f"{cls.__name__} has its own {name}")
    mean = need_sum_or_mean(conv)
    weighted = _read_message(conv)
    root, nodes, at = _read_forward(conv, call)
    features = at.kwargs["x"]
    before, after = None, None
    if isinstance(features, fx.Node) and _is_linear(root, features) and len(features.users) == 1:
        before, features = features, features.args[0]
    if not isinstance(features, fx.Node) or (features.op, features.target) != ("placeholder", "x"):
        raise NotLifted(f"{cls.__name__} changes its features before it aggregates them")
    users = list(at.users)
    if len(users) == 1 and _is_linear(root, users[0]):
        after = users[0]
    if before is None and after is None:
        raise NotLifted(f"{cls.__name__} has no linear layer beside its aggregation")
    last = after or at

    parts = Parts()
    parts.compiles = False  # what the layer does besides is run from a graph that was read
    run = _Rest(root, nodes, at, last, before)
    x: Expr = parts.sources(call)
    if before is not None:
        layer = root.get_submodule(str(before.target))
        x = parts.affine("W", layer, parts.sources(call), 1, cols="H" if after is None else "K")
    if weighted:
        run.check(call)
        a = parts.leaf(Leaf("A", "N", "N", "weighted"), run.matrix)
    else:
        a = edges(parts, call, "")
    out: Expr = a @ x
    if mean:
        out = Broadcast(inverse_count(parts), out)
    if after is not None:
        layer = root.get_submodule(str(after.target))
        out = out @ parts.linear("V", layer, "F" if before is None else "K")
        out = add(out, *parts.bias("c", layer))
    parts.calls["rest"] = run.finish
    return parts.algebra(Map("rest", out), learned=("A",) if weighted else ())


def _is_linear(root: torch.nn.Module, node: fx.Node) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    return type(root.get_submodule(str(node.target))) in (Linear, torch.nn.Linear)


def _read_message(conv: Any) -> bool:
    """Whether messages are weighted; decline if they are not ``w * x_j``."""
    if type(conv).message is MessagePassing.message:
        return False
    name = type(conv).__name__

    class Reader(fx.Tracer):
        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
            return True

    try:
        graph = Reader().trace(_Message(conv))
    except (fx.proxy.TraceError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise NotLifted(f"the message of {name} cannot be read: {error}") from None
    nodes = list(graph.nodes)
    names = [n.target for n in nodes if n.op == "placeholder"]
    if "x_j" not in names or any(str(n).endswith("_i") for n in names) or sum(
        str(n).endswith("_j") for n in names
    ) > 1:  # fmt: skip
        raise NotLifted(f"the message of {name} is not w * x_j")
    linear: dict[fx.Node, bool] = {}  # in x_j; False for what does not depend on it
    for node in nodes[:-1]:
        deps = [linear[n] for n in node.all_input_nodes]
        if not any(deps):
            linear[node] = node.op == "placeholder" and node.target == "x_j"
            continue
        args = [isinstance(a, fx.Node) and linear[a] for a in node.args]
        once = sum(args) == 1 and not node.kwargs
        multiplied = node.target in _MULTIPLY or (node.target in _DIVIDE and args[0])
        if not (once and multiplied):
            raise NotLifted(f"the message of {name} is not w * x_j")
        linear[node] = True
    result = nodes[-1].args[0]
    if not isinstance(result, fx.Node) or not linear[result]:
        raise NotLifted(f"the message of {name} is not w * x_j")
    return result.op != "placeholder"


class _Message(torch.nn.Module):
    """A layer's ``message`` as the ``forward`` of a module, which torch.fx can read."""

    def __new__(cls, conv: Any) -> "_Message":
        forward = type(conv).message
        made = type("Message", (torch.nn.Module,), {"forward": forward})()
        vars(made).update({k: v for k, v in vars(conv).items() if k not in vars(made)})
        for table in ("_parameters", "_buffers", "_modules"):
            vars(made)[table] = getattr(conv, table)
        return made  # type: ignore[no-any-return]


def _read_forward(conv: Any, call: Call) -> tuple[torch.nn.Module, list[fx.Node], fx.Node]:
    name = type(conv).__name__

    def prepare(root: torch.nn.Module, tracer: fx.Tracer) -> None:
        def propagate(edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
            if size is not None:
                raise ValueError("a size")
            return tracer.create_proxy("call_function", _propagate, (edge_index,), kwargs)

        vars(root)["propagate"] = propagate

    try:
        root, graph = trace(conv, call.given, {}, prepare)
    except Unreadable as error:
        raise NotLifted(f"the code of {name} cannot be read: {error}") from None
    nodes = list(graph.nodes)
    calls = [n for n in nodes if n.target is _propagate]
    if len(calls) != 1 or "x" not in calls[0].kwargs:
        raise NotLifted(f"{name} does not call propagate once, with x")
    edge_index = calls[0].args[0]
    if not isinstance(edge_index, fx.Node) or edge_index.target != "edge_index":
        raise NotLifted(f"{name} makes another graph in every call")
    for node in nodes:
        if node.op == "get_attr" and not hasattr(conv, str(node.target).partition(".")[0]):
            raise NotLifted(f"{name} makes tensors of its own")  # anew in every call
    return root, nodes, calls[0]


class _Rest:
    """What a layer does besides: before its aggregation, for the weights, and after."""

    def __init__(
        self,
        root: torch.nn.Module,
        nodes: list[fx.Node],
        at: fx.Node,
        last: fx.Node,
        before: fx.Node | None,
    ) -> None:
        self.root, self.nodes, self.at, self.last = root, nodes, at, last
        later = {at}
        for node in nodes:
            if any(n in later for n in node.all_input_nodes):
                later.add(node)
        self.later = [n for n in nodes if n in later and n not in (at, last)]
        self.earlier = [n for n in nodes if n not in later and n is not before]

    def values(self, call: Call) -> dict[fx.Node, Any]:
        """Run what comes before the aggregation, once a call."""
        if "values" not in call.memo:
            call.memo["values"] = {}
            self.run(call, self.earlier)
        found: dict[fx.Node, Any] = call.memo["values"]
        return found

    def run(self, call: Call, nodes: list[fx.Node]) -> Any:
        values = call.memo["values"]
        for node in nodes:
            if node.op == "placeholder":
                values[node] = call.given[str(node.target)]
            elif node.op == "call_module" and str(node.target).endswith(MODE):
                values[node] = call.conv.training
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = self.step(call, node, args, kwargs)
        return values[nodes[-1]] if nodes else None

    def step(self, call: Call, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "output":
            return args[0]
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        found: Any = call.conv
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return found(*args, **kwargs) if node.op == "call_module" else found

    def weights(self, call: Call) -> Tensor:
        """[E, 1], the weights of the edges: messages of ones."""
        values = self.values(call)
        kwargs = {k: v for k, v in self.at.kwargs.items() if k != "x"}
        given: dict[str, Any] = dict(fx.node.map_arg(kwargs, lambda n: values[n]))
        given = {  # what PyG supplies besides
            "index": call.edge_index[call.target], "ptr": None, "dim_size": call.num_rows,
            "edge_index": call.edge_index,
        } | given  # fmt: skip
        ones = call.x.new_ones(call.edge_index.size(1), 1)
        name = type(call.conv).__name__
        wanted = list(signature(type(call.conv).message).parameters.values())[1:]
        lacking = [p.name for p in wanted
                   if p.name not in given and p.name != "x_j" and p.default is p.empty]  # fmt: skip
        if lacking:
            raise NotLifted(f"the message of {name} takes {', '.join(lacking)}")
        taken = {p.name: given[p.name] for p in wanted if p.name in given}
        weight: Tensor = call.conv.message(**taken | {"x_j": ones})
        if weight.shape != ones.shape:
            raise NotLifted(f"{name} has more than one weight an edge")
        return weight

    def check(self, call: Call) -> None:
        """Decline what has no weights, before the first call, and without the memory for them."""
        try:
            with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
                self.weights(call)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            name = type(call.conv).__name__
            raise NotLifted(f"the message of {name} cannot be read: {error}") from None
        finally:
            call.memo.clear()

    def matrix(self, call: Call) -> Matrix:
        """The matrix of the weights."""
        graph = plain(call.edge_index, call.num_rows, call.num_cols, call.target)
        return Matrix(graph, self.weights(call).squeeze(1), edge_order=True)

    def finish(self, call: Call, out: Tensor) -> Any:
        """Run what comes after the aggregation."""
        self.values(call)[self.last] = out
        return self.run(call, self.later) if self.later else out
