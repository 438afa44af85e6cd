"""``to_maxk``: an existing model with MaxK in place of ReLU and the same parameters."""

import copy as copying
from collections.abc import Iterator

import torch
from torch.nn import Identity, Module
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_accel.layers.pairs import swap_pairs
from pyg_accel.layers.swaps import Swap, Swaps, swap, why_not
from pyg_accel.ops.maxk import check_k

__all__ = ["to_maxk"]


def to_maxk(model: Module, k: int, *, copy: bool = True) -> Module:
    """Replace every SAGEConv, GCNConv or GINConv after a ReLU, and the ReLU, with a MaxK layer.

    If something else reads the ReLU as well (jumping knowledge, a skip connection), it stays, and
    MaxK selects from its result. Layers that read the input features are not replaced, as there is
    no ReLU in front of them.

    Stacks of PyG (``GraphSAGE``, ``GCN``, ``GIN`` and others built on BasicGNN) keep their class.
    The forward of any other model is traced with torch.fx, and the result is a module that runs the
    graph and is like the model in all other respects. So the forward must have no branches on
    values of tensors, no differences between training and evaluation except dropout, no contexts
    such as ``torch.no_grad()``, and no assignments to attributes.

    Args:
        model: the model.
        k: how many features of each node to keep; the paper found 32 of 256 a good start.
        copy: convert a copy. Otherwise the layers of ``model`` itself are changed, so that an
            optimizer with its parameters has those of the result.

    Returns:
        The model with MaxK. Its attribute ``maxk_swaps`` lists which layers were swapped, and why
        others were not; ``print`` shows it as a table.

    Raises:
        ValueError: if nothing could be swapped, with the reasons.
    """
    check_k(k)
    if not isinstance(model, Module):
        raise ValueError(f"expected 'model' to be a torch.nn.Module (got {type(model).__name__})")
    if not isinstance(copy, bool):
        raise ValueError(f"expected 'copy' to be True or False (got {copy!r})")
    model = copying.deepcopy(model) if copy else model
    stacks = {name: m for name, m in model.named_modules() if _is_stack(m)}
    swaps = [s for name, stack in stacks.items() for s in _swap_stack(name, stack, k)]
    inside = {id(m) for stack in stacks.values() for m in stack.modules()}
    if any(isinstance(m, MessagePassing) and id(m) not in inside for m in model.modules()):
        model, more = swap_pairs(model, k, leaves=inside)
        swaps += more
    if not any(s.swapped for s in swaps):
        raise ValueError(f"nothing of {type(model).__name__} can be put on MaxK\n{Swaps(swaps)}")
    model.maxk_swaps = Swaps(swaps)  # type: ignore[assignment]
    return model


def _is_stack(module: Module) -> bool:
    return isinstance(module, BasicGNN) and type(module).forward is BasicGNN.forward


def _swap_stack(name: str, stack: BasicGNN, k: int) -> Iterator[Swap]:
    """Swap the layers of a model whose forward is known: conv, norm, act, dropout, conv, ..."""
    prefix = f"{name}.convs." if name else "convs."
    act = stack.act
    is_relu = isinstance(act, torch.nn.ReLU) or act in (torch.relu, torch.nn.functional.relu)
    between = stack.act_first and any(not isinstance(n, Identity) for n in stack.norms)
    suitable: list[tuple[str, Module]] = []
    for i, conv in enumerate(stack.convs):
        reason = why_not(conv, k)
        if not reason and not getattr(conv, "project", False):
            if i == 0:
                reason = "it reads the input features: no ReLU in front"
            elif not is_relu:
                reason = f"{type(act).__name__ if act else 'nothing'} in front of it, not ReLU"
            elif between:
                reason = "a normalisation between ReLU and layer (act_first)"
        if reason:
            yield Swap(prefix + str(i), type(conv).__name__, reason)
        else:
            suitable.append((prefix + str(i), conv))
    relu_kept = ""
    if stack.jk_mode is not None:
        relu_kept = "jumping knowledge reads it as well"
    elif [conv for _, conv in suitable] != list(stack.convs)[1:]:
        relu_kept = "it is in front of all layers, and not all were swapped"
    elif any(getattr(conv, "project", False) for _, conv in suitable):
        relu_kept = "the layers project behind it"
    for path, conv in suitable:
        yield swap(path, conv, k, relu_kept)
    if suitable and not relu_kept:
        stack.act = None
