"""Turns a layer of PyG into its MaxK version, and records the swap."""

from dataclasses import dataclass
from typing import Any

from torch.nn import Module
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from pyg_accel.layers.aggregation import adds_or_averages
from pyg_accel.layers.maxk_gcn_conv import MaxKGCNConv
from pyg_accel.layers.maxk_gin_conv import MaxKGINConv
from pyg_accel.layers.maxk_sage_conv import MaxKSAGEConv

__all__ = ["Swap", "Swaps", "swap", "why_not"]

_VERSIONS: dict[type[Module], type[Module]] = {
    SAGEConv: MaxKSAGEConv,
    GCNConv: MaxKGCNConv,
    GINConv: MaxKGINConv,
}


@dataclass(frozen=True)
class Swap:
    """Whether a layer was swapped, or why not.

    Attributes:
        name: its path in the model.
        layer: class name of the layer before.
        reason: why it was not swapped; empty if it was.
        relu_kept: why the ReLU in front of a swapped layer stays; empty if it was removed.
    """

    name: str
    layer: str
    reason: str = ""
    relu_kept: str = ""

    @property
    def swapped(self) -> bool:
        """Whether the layer is a MaxK layer now."""
        return not self.reason


class Swaps(tuple[Swap, ...]):
    """A :class:`Swap` for each layer; ``print`` shows them as a table."""

    def __str__(self) -> str:
        lines = []
        for s in self:
            note = f"swapped, ReLU kept: {s.relu_kept}" if s.relu_kept else "swapped"
            lines.append((s.name, s.layer, f"not swapped: {s.reason}" if s.reason else note))
        if not lines:
            return "no message passing layers"
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
        return "\n".join(f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}" for a, b, c in lines)


def why_not(conv: Module, k: int) -> str:
    """Return why a layer has no useful MaxK version; empty if it has one."""
    if type(conv) not in _VERSIONS:
        return "MaxK layers exist for SAGEConv, GCNConv and GINConv"
    if not adds_or_averages(conv):
        return f"aggr={conv.aggr_module!r}: MaxK's kernels add up and average"
    width = _width(conv)
    if width is not None and k >= width:
        return f"k={k} would keep all of its {width} features, and leave no nonlinearity"
    return ""


def swap(name: str, conv: Module, k: int, relu_kept: str = "") -> Swap:
    """Turn a layer into its MaxK version, in place."""
    was = type(conv)
    # Only the class changes: parameters, buffers, hooks, caches and options stay.
    conv.__class__ = _VERSIONS[was]
    vars(conv)["k"] = k
    return Swap(name, was.__name__, relu_kept=relu_kept)


def _width(conv: Any) -> int | None:
    """Return the number of features that a layer reads; None for lazily initialised layers."""
    if isinstance(conv, GINConv):
        modules = conv.nn.modules() if isinstance(conv.nn, Module) else ()
        widths = [getattr(m, "in_channels", getattr(m, "in_features", None)) for m in modules]
        width: Any = next((w for w in widths if isinstance(w, int)), None)
    else:
        width = conv.in_channels
        width = min(width) if isinstance(width, (tuple, list)) else width
    return width if width is not None and width > 0 else None
