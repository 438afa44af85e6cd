"""``to_maxk``: an existing model with MaxK instead of ReLU, and the same parameters."""

import copy as copying
from collections import Counter
from collections.abc import Collection, Iterator

import torch
from torch.nn import Dropout, Identity, Module, ReLU
from torch_geometric.nn import MessagePassing, Sequential
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pyg_accel.layers.swaps import Swap, Swaps, swap, why_not
from pyg_accel.ops.maxk import check_k
from pyg_accel.runtime.hooks import has_hooks

__all__ = ["to_maxk"]

_IN_CODE = "what is in front of it is code: write a MaxK layer there, in place of it and its ReLU"


def to_maxk(model: Module, k: int, *, copy: bool = True) -> Module:
    """Replace every SAGEConv, GCNConv or GINConv after a ReLU, and the ReLU, with a MaxK layer.

    Reads the order of layers in stacks of PyG (``GraphSAGE``, ``GCN``, ``GIN`` and others built on
    BasicGNN) and in PyG's ``Sequential``, alone or inside of a model. Other models have the order
    in code, which is not read: write ``MaxKSAGEConv`` there instead of ReLU and layer.

    If something else reads the ReLU as well (jumping knowledge, a skip connection), it stays, and
    MaxK selects from its result. Layers that read the input features are not replaced, as there is
    no ReLU in front of them.

    Args:
        model: the model.
        k: how many features of each node to keep; the paper found 32 of 256 a good start.
        copy: convert a copy. Otherwise the layers of ``model`` are changed in place, and an
            optimizer with its parameters stays valid.

    Returns:
        The model with MaxK, of the same class. Its attribute ``maxk_swaps`` lists which layers were
        swapped, and why others were not; ``print`` shows it as a table.

    Raises:
        ValueError: if nothing could be swapped, with the reasons.
    """
    check_k(k)
    if not isinstance(model, Module):
        raise ValueError(f"expected 'model' to be a torch.nn.Module (got {type(model).__name__})")
    if not isinstance(copy, bool):
        raise ValueError(f"expected 'copy' to be True or False (got {copy!r})")
    model = copying.deepcopy(model) if copy else model
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    shared = {module for module, count in places.items() if count > 1}
    by_name: dict[str, Swap] = {}
    for name, module in [*model.named_modules()]:
        prefix = f"{name}." if name else ""
        if isinstance(module, BasicGNN) and type(module).forward is BasicGNN.forward:
            by_name |= {s.name: s for s in _swap_stack(prefix, module, k, shared)}
        elif type(module) is Sequential:
            by_name |= {s.name: s for s in _swap_sequence(prefix, module, k, shared)}
        elif isinstance(module, MessagePassing) and name not in by_name:
            reason = why_not(module, k) or (_IN_CODE if name else "it is the whole model: no ReLU")
            by_name[name] = Swap(name, type(module).__name__, reason)
    swaps = Swaps(by_name.values())
    if not any(s.swapped for s in swaps):
        raise ValueError(f"nothing of {type(model).__name__} can be put on MaxK\n{swaps}")
    model.maxk_swaps = swaps  # type: ignore[assignment]
    return model


def _swap_stack(prefix: str, stack: BasicGNN, k: int, shared: Collection[int]) -> Iterator[Swap]:
    """Swap the layers of a BasicGNN, whose forward is conv, norm, act, dropout, conv, ..."""
    act = stack.act
    is_relu = isinstance(act, ReLU) or act in (torch.relu, torch.nn.functional.relu)
    between = stack.act_first and any(not isinstance(n, Identity) for n in stack.norms)
    suitable: list[tuple[str, Module]] = []
    for i, conv in enumerate(stack.convs):
        reason = _why_not(conv, k, shared)
        if not reason and not getattr(conv, "project", False):
            if i == 0:
                reason = "it reads the input features: no ReLU in front"
            elif not is_relu:
                reason = f"{type(act).__name__ if act else 'nothing'} in front of it, not ReLU"
            elif between:
                reason = "a normalisation between ReLU and layer (act_first)"
        if reason:
            yield Swap(f"{prefix}convs.{i}", type(conv).__name__, reason)
        else:
            suitable.append((f"{prefix}convs.{i}", conv))
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


def _swap_sequence(
    prefix: str, model: Sequential, k: int, shared: Collection[int]
) -> Iterator[Swap]:
    """Swap the layers of a sequence that directly follow a ReLU, dropout in between aside."""
    for i, child in enumerate(model._children):
        conv, name = getattr(model, child.name), prefix + child.name
        if not isinstance(conv, MessagePassing):
            continue
        projects = getattr(conv, "project", False)
        relu = None if projects else _relu_before(model, i)
        reason = _why_not(conv, k, shared)
        if not reason and relu is None and not projects:
            reason = "no ReLU in front of it"
        if reason:
            yield Swap(name, type(conv).__name__, reason)
            continue
        relu_kept = "" if relu is None else _relu_reason(model, relu, i)
        yield swap(name, conv, k, relu_kept)
        if relu is not None and not relu_kept:
            setattr(model, model._children[relu].name, Identity())


def _relu_before(model: Sequential, i: int) -> int | None:
    """Return the place of the ReLU that child ``i`` reads, directly or through dropout."""
    value = [model._children[i].param_names[0]]
    for j in range(i - 1, -1, -1):
        child = model._children[j]
        module = getattr(model, child.name)
        if not child.param_names == child.return_names == value:
            return None
        if isinstance(module, ReLU):
            return j
        if not isinstance(module, (Dropout, Identity)):
            return None
    return None


def _relu_reason(model: Sequential, relu: int, i: int) -> str:
    """Return why a ReLU stays in front of child ``i``; empty if nothing else depends on it."""
    children = model._children
    module = getattr(model, children[relu].name)
    value = children[i].param_names[0]
    readers = [children[i].param_names[1:], *(child.param_names for child in children[i + 1 :])]
    for child, names in zip(children[i:], readers, strict=True):
        if value in names:
            return f"{child.name} reads it as well"
        if value in child.return_names:
            break
    if has_hooks(module):
        return "it has hooks"
    own = relu > 0 and children[relu - 1].return_names == [value]
    return "it works in place, on what others may read" if module.inplace and not own else ""


def _why_not(conv: Module, k: int, shared: Collection[int]) -> str:
    return why_not(conv, k) or ("the model has it in several places" if id(conv) in shared else "")
