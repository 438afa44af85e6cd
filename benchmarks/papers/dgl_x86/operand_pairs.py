"""Messages of every pair of operands that DGL's binary-reduce has, as layers of PyG.

Apart from `binary_reduce.py`, which imports pyg_accel before this module imports torch_geometric:
that switches on large memory pages, for stock PyG too.
"""

import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from benchmarks.tools import graphs

FEATURES = 64
EDGES = "edges"  # in place of a reduction
Op = Callable[..., Tensor]


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=-1, keepdim=True)


def copy(a: Tensor) -> Tensor:
    return a


OPS: dict[str, Op] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "dot": dot, "copy": copy,
}  # fmt: skip


class Message(NamedTuple):
    """What travels along an edge.

    Attributes:
        ends: of its operands, in their order: `uv`, `ve`, `u`.
        op: of `OPS`.
        scalar: an edge has one number.
    """

    ends: str
    op: str
    scalar: bool = False

    @property
    def name(self) -> str:
        """As DGL calls it."""
        named = f"copy_{self.ends}" if self.op == "copy" else f"_{self.op}_".join(self.ends)
        return f"{named}, scalar" if self.scalar else named


class Layer(MessagePassing):
    """A message, reduced to the targets or left on the edges; operands are [N, F] and [E, F]."""

    def __init__(self, op: Op, reduce: str) -> None:
        super().__init__(aggr=None if reduce == EDGES else reduce)
        self.op, self.on_edges = op, reduce == EDGES

    def forward(self, u: Tensor, v: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
        run = self.edge_updater if self.on_edges else self.propagate
        return run(edge_index, x=(u, v), e=e, size=(u.size(0), v.size(0)))


class UV(Layer):
    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return self.op(x_j, x_i)

    def edge_update(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return self.op(x_j, x_i)


class VU(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.op(x_i, x_j)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.op(x_i, x_j)


class UE(Layer):
    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return self.op(x_j, e)

    def edge_update(self, x_j: Tensor, e: Tensor) -> Tensor:
        return self.op(x_j, e)


class EU(Layer):
    def message(self, e: Tensor, x_j: Tensor) -> Tensor:
        return self.op(e, x_j)

    def edge_update(self, e: Tensor, x_j: Tensor) -> Tensor:
        return self.op(e, x_j)


class VE(Layer):
    def message(self, x_i: Tensor, e: Tensor) -> Tensor:
        return self.op(x_i, e)

    def edge_update(self, x_i: Tensor, e: Tensor) -> Tensor:
        return self.op(x_i, e)


class EV(Layer):
    def message(self, e: Tensor, x_i: Tensor) -> Tensor:
        return self.op(e, x_i)

    def edge_update(self, e: Tensor, x_i: Tensor) -> Tensor:
        return self.op(e, x_i)


class U(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return self.op(x_j)

    def edge_update(self, x_j: Tensor) -> Tensor:
        return self.op(x_j)


class E(Layer):
    def message(self, e: Tensor) -> Tensor:
        return self.op(e)


LAYERS: dict[str, type[Layer]] = {
    "uv": UV, "vu": VU, "ue": UE, "eu": EU, "ve": VE, "ev": EV, "u": U, "e": E,
}  # fmt: skip


def _messages() -> Iterator[Message]:
    yield from (Message("u", "copy"), Message("e", "copy"))
    for ends in ("uv", "ue", "ve"):
        yield from (Message(ends, op) for op in OPS if op != "copy")
        yield from (Message(ends[::-1], op) for op in ("sub", "div"))
    yield Message("ue", "mul", scalar=True)  # last: DGL gets other features of edges


MESSAGES = {message.name: message for message in _messages()}


class Operands:
    """A graph and values for every message on it, float32.

    Numbers have random signs and are between 0.5 and 1.5 in size, so that quotients are numbers of
    the same kind.

    Attributes:
        edge_index: [2, E], sorted by source.
        rowptr, col: the same graph, targets by sources.
        edge: [E] where an entry of `col` is in `edge_index`.
        values: by `u`, `v` [N, F], `e` [E, F], `weight` [E, 1] and `grad` [N, F], that of a sum.
    """

    def __init__(self, graph: str, features: int = FEATURES) -> None:
        self.rowptr, self.col = csr = graphs.load(graph)
        by_target = graphs.edge_list(csr)
        order = by_target[0].argsort(stable=True)
        self.edge_index = by_target[:, order].contiguous()
        self.edge = order.argsort()
        nodes, edges = self.rowptr.numel() - 1, self.col.numel()
        sizes = {"u": (nodes, features), "v": (nodes, features), "e": (edges, features),
                 "weight": (edges, 1), "grad": (nodes, features)}  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        uniform = {name: torch.rand(size, generator=generator) for name, size in sizes.items()}
        self.values = {k: torch.where(x < 0.5, x - 1.5, x + 0.5) for k, x in uniform.items()}

    def of(self, message: Message, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The values of `u`, `v` and `e`; those that the message reads may get a gradient."""
        found = {end: self.values[end] for end in "uv"}
        found["e"] = self.values["weight" if message.scalar else "e"]
        return {k: x.detach().to(dtype).requires_grad_(k in message.ends) for k, x in found.items()}

    def grad(self, out: Tensor) -> Tensor:
        """A gradient for an output of targets."""
        return self.values["grad"][:, : out.size(1)].to(out.dtype)
