"""Halos of MaxK layers, which multiply compressed features without a call of ``propagate``."""

from dataclasses import dataclass
from typing import Any

import torch

from pyg_accel.cbsr import CBSR, trust
from pyg_accel.distributed.halo import Halo, exchange
from pyg_accel.distributed.known import RUNNING, halo_of, refuse, with_halo

__all__ = ["ProductHalos", "is_running", "look"]


def is_running() -> bool:
    """Return whether a distributed model runs in this thread."""
    return RUNNING.wire is not None


def look(edge_index: Any) -> "ProductHalos | None":
    """Return the halos of edges of this rank; None outside of distributed models.

    Raises:
        NotDistributable: for other edges in a distributed model.
    """
    halo = halo_of(edge_index)
    if halo is None and is_running():
        refuse("a MaxK layer", edge_index)
    return None if halo is None else ProductHalos(halo)


@dataclass(frozen=True)
class ProductHalos:
    """The halo of one edge_index as MaxK layers ask for it.

    Attributes:
        halo: the plan.
    """

    halo: Halo

    rows = property(lambda self: self.halo.rows)
    targets = property(lambda self: self.halo.targets)

    def whole(self, data: Any) -> Any:
        """Return features with those of halo nodes; of CBSR only kept values travel."""
        if not isinstance(data, CBSR):
            return with_halo(self.halo, {"x": data})["x"]
        columns = data.indices.view(torch.uint8)
        values, columns = (exchange(self.halo, t) for t in (data.values, columns))
        return CBSR(values, trust(columns.view(data.indices.dtype), data.width), data.width)
