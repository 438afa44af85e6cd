"""Utilities to test backends and models: difficult graphs, and an independent reference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.formula import Formula, parse, shape_of
from pyg_accel.formula.functions import FUNCTIONS

__all__ = ["GraphCase", "truth", "zoo"]


@dataclass(frozen=True)
class GraphCase:
    """A graph as an edge list with its name in test ids."""

    name: str
    edge_index: Tensor
    num_sources: int
    num_targets: int

    def part(self, of: int) -> "GraphCase":
        """Return a graph with one of ``of`` nodes and edges, and rows of about the same length."""
        rows, cols = (-(-count // of) for count in (self.num_sources, self.num_targets))
        return GraphCase(self.name, self.edge_index[:, ::of] // of, rows, cols)


def zoo(*, hub: int = 20_000, index_dtype: torch.dtype = torch.int64) -> Iterator[GraphCase]:
    """Yield difficult graphs: empty, unsorted, with duplicates, bipartite, with a hub.

    Args:
        hub: edges of the hub node; above 16384 the CPU kernels split its row.
        index_dtype: dtype of the edge lists.
    """
    generator = torch.Generator().manual_seed(0)

    def random(sources: int, targets: int, edges: int) -> Tensor:
        ids = torch.rand(2, edges, generator=generator)
        return (ids * torch.tensor([[sources], [targets]])).to(index_dtype)

    def case(name: str, edges: Tensor, sources: int, targets: int | None = None) -> GraphCase:
        return GraphCase(
            name, edges.to(index_dtype), sources, sources if targets is None else targets
        )

    yield case("empty", torch.empty(2, 0), 0)
    yield case("no-edges", torch.empty(2, 0), 5)
    yield case("one-edge", torch.tensor([[2], [0]]), 3)
    yield case("self-loops", torch.arange(7).repeat(2, 1), 7)
    yield case("duplicates", random(6, 6, 4).repeat(1, 5), 6)
    yield case("directed", random(40, 40, 300), 40)
    yield case("empty-rows", torch.stack([random(50, 50, 90)[0], random(50, 9, 90)[1] * 5]), 50)
    yield case("bipartite", random(23, 11, 150), 23, 11)
    star = torch.stack([torch.arange(hub) % 97, torch.full((hub,), 3)])
    yield case("hub", torch.cat([star, random(97, 97, 200)], 1)[:, torch.randperm(
        hub + 200, generator=generator)], 97)  # fmt: skip


def truth(
    case: GraphCase, formula: str | Formula, operands: Sequence[Tensor], reduce: str
) -> Tensor:
    """Compute a reduction of messages in float64 by plain, differentiable torch.

    Edge operands, and the messages of ``"none"``, are in the order of ``case.edge_index``.

    Args:
        case: the graph.
        formula: the message; operands [rows, H, F], or broadcastable to it.
        operands: by operand index.
        reduce: as in :func:`pyg_accel.ops.gspmm`.

    Returns:
        [num_targets, H, F], or [E, H, F] for ``"none"``.
    """
    message_formula = parse(formula) if isinstance(formula, str) else formula
    source, target = case.edge_index.long()
    wide = [t.double() if t.is_floating_point() else t for t in operands]
    sizes = {i: (t.size(1), t.size(2)) for i, t in enumerate(wide)}
    message = _message(message_formula, wide, source, target)
    message = message.expand(source.numel(), *shape_of(message_formula, sizes))
    if reduce == "none":
        return message
    result = message.new_full((case.num_targets, *message.shape[1:]), float(reduce == "prod"))
    degree, by_target = target.bincount(minlength=case.num_targets), target.argsort(stable=True)
    first = degree.cumsum(0) - degree
    for count in degree[degree > 0].unique():  # targets with the same number of edges together
        nodes = (degree == count).nonzero().flatten()
        messages = message[by_target[first[nodes].unsqueeze(1) + torch.arange(int(count))]]
        result = result.index_put((nodes,), _reduced(messages, reduce))
    return result


def _reduced(messages: Tensor, reduce: str) -> Tensor:
    """Reduce [nodes, edges of each, H, F] to [nodes, H, F]."""
    if reduce == "sqsum":
        return messages.pow(2).sum(1)
    if reduce in ("max", "min"):
        best: Tensor = getattr(messages, reduce)(1).values
        return best
    plain: Tensor = getattr(messages, reduce)(1)
    return plain


def _message(formula: Formula, operands: list[Tensor], source: Tensor, target: Tensor) -> Tensor:
    """Evaluate a formula as Python code, independently of the reference backend."""
    names: dict[str, object] = {name: function.torch for name, function in FUNCTIONS.items()}
    plain = "add sub mul div neg abs exp log sqrt relu sigmoid tanh sign pow"
    names |= {name: getattr(torch, name) for name in plain.split()}
    names["leaky_relu"] = torch.nn.functional.leaky_relu
    names["softplus"] = torch.nn.functional.softplus
    names["step"] = lambda x: (x > 0).double()
    names["sum"] = lambda x: x.sum(-1, keepdim=True)
    for i, operand in enumerate(operands):
        names |= {f"u{i}": operand[source] if f"u{i}" in str(formula) else None}
        names |= {f"v{i}": operand[target] if f"v{i}" in str(formula) else None}
        names |= {f"e{i}": operand}
    result: Tensor = eval(str(formula), {"__builtins__": {}}, names)
    return result
