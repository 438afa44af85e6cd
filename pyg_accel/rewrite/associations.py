"""The association trees of one layer, without running it."""

from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from pyg_accel.rewrite.algebra import Call, NotLifted
from pyg_accel.rewrite.enumerate import associations_of
from pyg_accel.rewrite.lift import bind, is_written, lift
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.select import Options, assumptions_of

__all__ = ["associations"]


def associations(
    conv: MessagePassing,
    *example_inputs: Any,
    train: bool = False,
    static: bool = False,
    upstream: bool = True,
    **example_kwargs: Any,
) -> Associations:
    """Return every association of a layer's matrix products, and those that may be the fastest.

    Args:
        conv: the layer.
        example_inputs: arguments that it is called with; by default features and an edge_index.
        train: the backward pass counts too.
        static: the features are the same in every call.
        upstream: the features have gradients, as those of a hidden layer have.
        example_kwargs: arguments by name.

    Returns:
        ``all`` trees; the ``promoted`` ones; ``bills``, the primitives of each.

    Raises:
        NotLifted: with the reason, for a layer that is left as it is.
    """
    if not example_inputs and not example_kwargs:
        inner = (p.size(1) for p in conv.parameters() if p.dim() == 2)  # of a network's first layer
        channels = getattr(conv, "in_channels", None) or next(inner, 8)
        width = max(channels if isinstance(channels, int) else 8, 1)
        device = torch.device("meta")
        if is_written(type(conv)):  # its code runs, which takes data
            device = next((p.device for p in conv.parameters()), torch.device("cpu"))
        x = torch.ones(4, width, device=device)
        if not isinstance(channels, int):
            x = tuple(torch.ones(4, max(c, 1), device=device) for c in channels)  # type: ignore[assignment]
        example_inputs = (x, torch.zeros(2, 4, dtype=torch.long, device=device))
    call = Call(conv, bind(conv, example_inputs, example_kwargs))
    try:
        algebra = lift(conv, call)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise NotLifted(f"its code does not run on such arguments: {error}") from error
    given = assumptions_of(algebra, call, Options(train, static, upstream))
    return associations_of(algebra.expr, algebra.also, given)
