"""The model as every rank runs it: its part of the nodes, and what leaves it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyg_accel.distributed.known import backward_begins, backward_ends, running
from pyg_accel.distributed.partition import Partition
from pyg_accel.distributed.passes import Passes
from pyg_accel.distributed.randomness import RankRandom
from pyg_accel.distributed.stores import Types
from pyg_accel.distributed.sums import linear, padded
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable

__all__ = ["Distributed"]


class Distributed(torch.nn.Module):
    """A model whose layers exchange halos; see :func:`~pyg_accel.distributed.distribute`.

    Attributes:
        module: the model.
        wire: the group.
        types: who owns which nodes, by type.
        rows: ``"all"`` or ``"own"``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        wire: Wire,
        types: Types,
        rows: str,
        wrap: bool | Callable[[torch.nn.Module], torch.nn.Module],
    ) -> None:
        super().__init__()
        self.module = wrap(model) if callable(wrap) else model
        self.wire, self.types, self.rows = wire, types, rows
        self._averages = wrap is True
        self._waiting = False
        self._random = RankRandom(wire)
        self._passes = Passes(wire)
        self._kinds: dict[str, Any] = {}
        self._places: dict[Any, _Places] = {}
        self._presences: dict[tuple[Any, ...], Tensor] = {}

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's rows.

        Returns:
            What the model returns. With ``rows="all"`` tensors with a row for each node of this
            rank have one for each node of the graph, in the order of the user's data.
        """
        self._begins()
        with running(forward=self.wire, layer=None, exchanged=False):
            if self.training:
                with self._random.drawn():
                    out = self.module(*args, **kwargs)
            else:
                out = self.module(*args, **kwargs)
        return self._returned(out)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _returned(self, out: Any) -> Any:
        leaves, spec = tree_flatten(out)
        if self.rows == "all":
            leaves = self._all_rows(leaves)
        leaves = [self._watched(leaf) for leaf in leaves]
        learns = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        self._passes.forward_ends(learns=learns)
        return tree_unflatten(leaves, spec)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begins(self) -> None:
        self._waiting = False
        self._passes.forward_begins()
        backward_ends()  # one that an error ended has not said so

    def _watched(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return _Anchor.apply(self, leaf)  # type: ignore[no-untyped-call]
        return leaf

    def _all_rows(self, leaves: list[Any]) -> list[Any]:
        own = {key: _own(part, self.wire.rank) for key, part in self.types.items()}
        tensors = [t if isinstance(t, Tensor) and t.dim() else None for t in leaves]
        shown = tuple(
            None if t is None
            else (t.dim(), str(t.dtype), [k for k, n in own.items() if t.size(0) == n])
            for t in tensors
        )  # fmt: skip
        key = repr(shown)
        if key not in self._kinds:
            self._kinds[key] = self._agreed(tensors, own)
        kinds = self._kinds[key]
        return [
            leaf if kind is None else self._gathered(leaf, kind[0])
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]

    def _agreed(self, tensors: list[Tensor | None], own: dict[Any, int]) -> list[Any]:
        """Find out which outputs have a row for each node of every rank, and of which type."""
        types = list(self.types)
        rows = [-1 if t is None else t.size(0) for t in tensors]
        every = self.wire.texts([rows, [own[key] for key in types]])
        kinds: list[Any] = []
        for i in range(len(tensors)):
            fits = [
                key for j, key in enumerate(types)
                if all(said[0][i] == said[1][j] for said in every)
            ]  # fmt: skip
            if len(fits) > 1:
                raise NotDistributable(f"an output has as many rows as there are nodes of each of "
                                       f"{fits}: rows='own' leaves it as it is")  # fmt: skip
            kinds.append((fits[0],) if fits else None)
        return kinds

    def _gathered(self, leaf: Tensor, key: Any) -> Tensor:
        if key not in self._places:
            self._places[key] = _Places(self.types[key], self.wire)
        places = self._places[key]
        return linear(places.gathered, places.scattered, leaf)

    def average_gradients(self) -> None:
        """Replace the gradient of every parameter by its mean over ranks, as DDP does."""
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for p in self.module.parameters():
            if p.requires_grad:
                by_dtype.setdefault(p.dtype, []).append(p)
        with torch.no_grad():
            for parameters in by_dtype.values():
                grads = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in parameters]
                there = self._presence(parameters)
                flat = torch.cat([*(g.reshape(-1) for g in grads), there])
                self.wire.total(flat, "gradients").div_(self.wire.size)
                *means, there = flat.split([*(g.numel() for g in grads), len(grads)])
                means = [m.view(g.shape) for m, g in zip(means, grads, strict=True)]
                torch._foreach_copy_(grads, means)
                lacking = [i for i, p in enumerate(parameters) if p.grad is None]
                # Only a rank that lacks a gradient must wait to hear whether another has it.
                others = there.tolist() if lacking else []
                for i in lacking:
                    if others[i]:
                        parameters[i].grad = grads[i]

    def _presence(self, parameters: list[torch.nn.Parameter]) -> Tensor:
        """Return 1 for each parameter that has a gradient, 0 for others."""
        present = [p.grad is not None for p in parameters]
        key = parameters[0].dtype, *present
        if key not in self._presences:  # a copy from the host would wait for the device
            self._presences[key] = parameters[0].detach().new_tensor(present)
        return self._presences[key]

    def extra_repr(self) -> str:
        """Say where this is."""
        return f"rank {self.wire.rank} of {self.wire.size}, rows={self.rows!r}"


def _own(part: Partition, rank: int) -> int:
    return int(part.cuts[rank + 1]) - int(part.cuts[rank])


class _Places:
    """Where the rows of all ranks lie once they are gathered, ranks padded to one length."""

    def __init__(self, part: Partition, wire: Wire) -> None:
        sizes = part.cuts.diff()
        self.wire = wire
        self.own = int(sizes[wire.rank])
        self.longest = int(sizes.max())
        ranks = torch.repeat_interleave(torch.arange(wire.size), sizes)
        places = torch.arange(part.order.numel()) - part.cuts[ranks] + ranks * self.longest
        of_node = torch.empty_like(part.order)
        of_node[part.order] = places
        self.of_node = of_node.to(wire.device)  # [N], place of every node
        node_of = torch.full((wire.size * self.longest,), part.order.numel())
        node_of[places] = part.order
        self.node_of = node_of.to(wire.device)  # [P * longest], N for padding

    def gathered(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks in the user's order."""
        return self.wire.gather(padded(own, self.longest)).index_select(0, self.of_node)

    def scattered(self, grad: Tensor) -> Tensor:
        """Return the sums over ranks of the gradients of this rank's rows."""
        more = padded(grad, grad.size(0) + 1)
        return self.wire.scatter_sums(more.index_select(0, self.node_of))[: self.own]


class _Anchor(torch.autograd.Function):
    """What a backward pass meets first; gradients are averaged at its end."""

    @staticmethod
    def forward(ctx: Any, model: Distributed, tensor: Tensor) -> Tensor:
        ctx.model = model
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        model = ctx.model
        if not model._waiting:
            model._waiting = True
            model._passes.backward_begins()
            backward_begins(model.wire)

            def average() -> None:
                model._waiting = False
                backward_ends()
                if model._averages:
                    model.average_gradients()

            Variable._execution_engine.queue_callback(average)
        return None, grad
