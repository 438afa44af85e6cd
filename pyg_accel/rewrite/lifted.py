"""The associations of one layer, without running any of them."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.module_state import ModuleState
from pyg_accel.patching.api import OverrideHandle
from pyg_accel.patching.programs import Programs
from pyg_accel.rewrite.enumerate import associations_of
from pyg_accel.rewrite.layer import recorded_call
from pyg_accel.rewrite.lift import NotLifted, regions_of
from pyg_accel.rewrite.nodes import Learning
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.select import assumptions_of

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
        conv: the layer; it is called once.
        example_inputs: arguments that it is called with; by default features and an edge_index.
        train: whether the backward pass counts too.
        static: whether the features are the same in every call.
        upstream: whether the features have gradients, as those of a hidden layer.
        example_kwargs: arguments by name.

    Returns:
        ``all`` trees; the ``promoted`` ones; ``bills``, the primitives of each. For a layer with
        several expressions, those of the last.

    Raises:
        NotLifted: with the reason, for a layer that is not rewritten.
    """
    if not example_inputs and not example_kwargs:
        example_inputs = _examples(conv)
    programs = Programs()
    handle = OverrideHandle({})
    device = next((t.device for t in example_inputs if isinstance(t, Tensor)), torch.device("cpu"))
    state = ModuleState(conv.modules(), device)
    try:
        for _ in range(2):  # a layer may store something in its first call
            recording = recorded_call(programs, conv, example_inputs, example_kwargs)
            program = None if isinstance(recording, str) else recording.program
            if program is not None:
                break
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise NotLifted(f"its code does not run on such arguments: {error}") from error
    finally:
        handle.remove()
        state.restore()
    if program is None:
        raise NotLifted(programs.reason)
    graph = program.graph
    *_, region = regions_of(graph, program.constants, type(conv).__name__)
    same = {n for n in graph.nodes if n.op == "placeholder"} if static else ()
    assumed = assumptions_of(region, Learning(), train=train, static=frozenset(same),
                           upstream=upstream)  # fmt: skip
    return associations_of(region.expr, assumed)


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
