"""One layer of PyG turned into its MaxK version, and the record of the swap."""

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
    """What became of one layer.

    Attributes:
        name: where it is in the model.
        layer: class name of the layer as it was.
        reason: why it was left alone; empty if it was swapped.
        relu_kept: why the ReLU in front of a swapped layer stayed; empty if it went.
    """

    name: str
    layer: str
    reason: str = ""
    relu_kept: str = ""

    @property
    def swapped(self) -> bool:
        """Whether the layer is on MaxK now."""
        return not self.reason


class Swaps(tuple[Swap, ...]):
    """What became of all layers; ``print`` shows it as a table."""

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
    """Return why a layer has no MaxK version that makes sense; empty if it has."""
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
    # Its class alone: parameters, buffers, hooks, caches and settings are those of PyG's layer.
    conv.__class__ = _VERSIONS[was]
    vars(conv)["k"] = k
    return Swap(name, was.__name__, relu_kept=relu_kept)


def _width(conv: Any) -> int | None:
    """Number of features that a layer reads; None if that is not known yet."""
    if isinstance(conv, GINConv):
        modules = conv.nn.modules() if isinstance(conv.nn, Module) else ()
        widths = [getattr(m, "in_channels", getattr(m, "in_features", None)) for m in modules]
        width: Any = next((w for w in widths if isinstance(w, int)), None)
    else:
        width = conv.in_channels
        width = min(width) if isinstance(width, (tuple, list)) else width
    return width if width is not None and width > 0 else None
