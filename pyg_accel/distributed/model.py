"""The model that every rank runs on its part of the nodes; outputs are gathered from all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyg_accel.distributed.halo import Halo, exchange, make_halo
from pyg_accel.distributed.partition import Types
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable
from pyg_accel.runtime.state import during, running

__all__ = ["Distributed"]


class Distributed(torch.nn.Module):
    """A model whose layers exchange halos; see :func:`~pyg_accel.distributed.distribute`.

    Attributes:
        module: the model.
        wire: the process group.
        types: the partition of each node type.
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
        self._backward: list[Wire] = []  # the wire during a backward pass, otherwise empty
        self._devices = [wire.device] if wire.device.type == "cuda" else []
        first = torch.tensor([torch.initial_seed() % 2**62], device=wire.device)
        self._seed = int(wire.copy_of_first(first)) + wire.rank + 1
        self._agreed: dict[str, list[list[Any]]] = {}
        self._all_nodes: dict[Any, tuple[Halo, Tensor]] = {}

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's rows.

        Returns:
            The result of the model. With ``rows="all"``, tensors with a row for each node of this
            rank get a row for each node of the graph, in the order of the user's data.
        """
        self._backward.clear()  # an error may have interrupted the last backward pass
        fresh = during(forward_wire=self.wire, halo_rows=None, scatter=None)
        with fresh, torch.random.fork_rng(self._devices, enabled=self.training):
            if self.training:
                self._seed_generators()
            out = self.module(*args, **kwargs)
        return self._returned(out)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _seed_generators(self) -> None:
        """Seed the generators for this rank and call, from the seed of the first rank."""
        torch.default_generator.manual_seed(self._seed)
        for device in self._devices:
            torch.cuda.default_generators[device.index].manual_seed(self._seed)
        self._seed += self.wire.size

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _returned(self, out: Any) -> Any:
        leaves, spec = tree_flatten(out)
        if self.rows == "all":
            leaves = self._all_rows(leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[i] = _Anchor.apply(self, leaf)  # type: ignore[no-untyped-call]
        return tree_unflatten(leaves, spec)

    def _all_rows(self, leaves: list[Any]) -> list[Any]:
        """Gather tensors that have a row per node of one type on every rank."""
        own = {key: len(part.of(self.wire.rank)) for key, part in self.types.items()}
        shapes = [t.shape if isinstance(t, Tensor) and t.dim() else None for t in leaves]
        fits = [[k for k, n in own.items() if shape and shape[0] == n] for shape in shapes]
        key = repr([(shape and len(shape), fit) for shape, fit in zip(shapes, fits, strict=True)])
        if key not in self._agreed:
            every = self.wire.values(fits)
            self._agreed[key] = [
                [k for k in fit if all(k in others[i] for others in every)]
                for i, fit in enumerate(fits)
            ]
        return [
            self._gathered(leaf, keys) if keys else leaf
            for leaf, keys in zip(leaves, self._agreed[key], strict=True)
        ]

    def _gathered(self, leaf: Tensor, keys: list[Any]) -> Tensor:
        if len(keys) > 1:
            raise NotDistributable(f"an output has as many rows as there are nodes of each of "
                                   f"{keys}: rows='own' leaves it as it is")  # fmt: skip
        if keys[0] not in self._all_nodes:
            part = self.types[keys[0]]
            positions, cuts = part.positions().to(self.wire.device), part.cuts.to(self.wire.device)
            self._all_nodes[keys[0]] = make_halo(self.wire, positions, cuts, 0, kind="outputs")
        halo, ids = self._all_nodes[keys[0]]
        return exchange(halo, leaf).index_select(0, ids)

    def average_gradients(self) -> None:
        """Replace the gradient of every parameter by its mean over ranks, as DDP does.

        A parameter without a gradient on any rank stays without.
        """
        learned = [p for p in self.module.parameters() if p.requires_grad]
        with torch.no_grad():
            for dtype in dict.fromkeys(p.dtype for p in learned):
                params = [p for p in learned if p.dtype == dtype]
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
                present = torch.tensor([p.grad is not None for p in params], dtype=dtype)
                if self.wire.device.type == "cuda":  # a copy that does not wait for the device
                    present = present.pin_memory().to(self.wire.device, non_blocking=True)
                flat = torch.cat([*(g.flatten() for g in grads), present])
                self.wire.total(flat, "gradients").div_(self.wire.size)
                *means, present = flat.split([*(g.numel() for g in grads), len(grads)])
                views = [m.view_as(g) for m, g in zip(means, grads, strict=True)]
                torch._foreach_copy_(grads, views)
                if any(p.grad is None for p in params):  # tolist() waits for the device
                    for p, grad, on_some_rank in zip(params, grads, present.tolist(), strict=True):
                        if on_some_rank:
                            p.grad = grad

    def _end_backward(self) -> None:
        self._backward.clear()
        if self._averages:
            self.average_gradients()

    def extra_repr(self) -> str:
        """Return the rank and the options."""
        return f"rank {self.wire.rank} of {self.wire.size}, rows={self.rows!r}"


class _Anchor(torch.autograd.Function):
    """Marks the start of a backward pass, and averages gradients at its end."""

    @staticmethod
    def forward(ctx: Any, model: Distributed, tensor: Tensor) -> Tensor:
        ctx.model = model
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        model = ctx.model
        if not model._backward:
            model._backward.append(model.wire)
            running.backward_wires = model._backward
            Variable._execution_engine.queue_callback(model._end_backward)
        return None, grad
