"""Halos for layers that multiply features with edges themselves: MaxK and rewritten layers.

A product with a matrix of edges reads rows of other ranks, which are exchanged right before it. In
rewritten layers the tree decides whether X or X W is sent, so all ranks must run the same tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.distributed.halo import Halo
from pyg_accel.distributed.tracking import Following, halo_of, refuse, stays
from pyg_accel.graph.memo import tensors_in
from pyg_accel.patching import layers
from pyg_accel.runtime.state import during, running

__all__ = ["call", "halo_of_product"]


def halo_of_product(edge_index: Any) -> Halo | None:
    """Return the halo of the edges of a MaxK layer; None outside of distributed models.

    Raises:
        NotDistributable: for edges without a halo in a distributed model.
    """
    halo = halo_of(edge_index)
    if halo is None and running.wire is not None:
        refuse("a MaxK layer", edge_index)
    return halo


@dataclass(frozen=True)
class Exchange:
    """Lets the programs of a rewritten layer agree with other ranks."""

    halo: Halo
    stays = staticmethod(stays)

    def following(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with halos for operands of ``propagate`` and for derived edges."""
        with during(halo_rows={}), Following():
            return function(*args, **kwargs)

    def agree(self, reason: str, text: str) -> str:
        """Return the first reason of any rank, or a reason if ranks pass different texts."""
        every = self.halo.wire.values((reason, text))
        different = len({text for _, text in every}) > 1
        last = "ranks read different products in it" if different else ""
        return next((reason for reason, _ in every if reason), last)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, for each time, the longest of any rank."""
        wire = self.halo.wire
        times = torch.tensor(seconds, dtype=torch.float64, device=wire.device)
        longest: list[float] = wire.largest(times, "set-up").tolist()
        return longest


def call(
    layer: MessagePassing, transformed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a rewritten layer, which exchanges rows before its products.

    Only edges that distribute() returned are accepted: their halo identifies a call on all ranks,
    while sizes differ between ranks.
    """
    arguments = (*args, *kwargs.values())
    stored = [value for value in arguments if type(value) is Tensor and stays(value)]
    halos = [halo for halo in map(halo_of, stored) if halo is not None]
    if len(halos) != 1:
        reason = "on several ranks a rewritten layer takes the edges that distribute() returned"
        return layers.untransformed(layer, transformed, reason, args, kwargs)
    programs = {layer: transformed.of_halo(halos[0], tensors_in((args, kwargs)))}
    with during(transformed=programs, exchange=Exchange(halos[0])):
        return layers.layer(layer, *args, **kwargs)
