"""The associations of one layer, without running any of them."""

from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from pyg_accel.rewrite.lift import NotLifted
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.select import Options
from pyg_accel.runtime.module_state import as_it_was
from pyg_accel.runtime.report import uncounted

__all__ = ["associations"]


def associations(
    conv: MessagePassing, *example_inputs: Any, train: bool = False, **example_kwargs: Any
) -> Associations:
    """Return every association of a layer's matrix products, and those that may be the fastest.

    Features are assumed to have gradients, like the features of a hidden layer.

    Args:
        conv: the layer; it is called, and its state restored.
        example_inputs: arguments that it is called with; by default features and an edge_index.
        train: whether the backward pass counts too.
        example_kwargs: arguments by name.

    Returns:
        ``all`` trees; the ``promoted`` ones; ``bills``, the primitives of each. A layer with
        several expressions returns the trees of the last.

    Raises:
        NotLifted: with the reason, for a layer that is not rewritten.
    """
    if not example_inputs and not example_kwargs:
        example_inputs = _examples(conv)
    fast = OptimizedModel(conv, Options(train=train))
    layer = rewritten_layers(fast)[""]
    try:
        with as_it_was(conv.modules()), uncounted(), torch.no_grad():
            for _ in range(2):  # the first call of a layer may differ: caches are empty
                fast(*example_inputs, **example_kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise NotLifted(f"its code does not run on such arguments: {error}") from error
    if not layer.decisions:
        raise NotLifted(next(iter(layer.reasons)))
    return layer.decisions[-1].pruned


def _examples(conv: MessagePassing) -> tuple[Any, ...]:
    """Return features with as many columns as a layer takes, and an edge_index."""
    inner = (p.size(1) for p in conv.parameters() if p.dim() == 2)  # of the first linear layer
    channels = getattr(conv, "in_channels", None) or next(inner, 8)
    like = next(conv.parameters(), torch.empty(0))
    widths = channels if isinstance(channels, (tuple, list)) else (channels,)
    x = tuple(like.new_ones(4, max(width, 1)) for width in widths)
    # 13 edges: a size that nothing else has.
    edges = torch.arange(26, device=like.device).view(2, 13) % 4
    return (x if len(x) > 1 else x[0]), edges
