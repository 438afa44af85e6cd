"""``check()``: compare a model on all ranks with the same model in one process."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data, HeteroData

from pyg_accel.cuda_graphs.functions import NOT_RANDOM, Functions
from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.partition import node_stores, store_of
from pyg_accel.distributed.spread import distribute
from pyg_accel.distributed.wire import agree
from pyg_accel.errors import NotDistributable, VerificationError

__all__ = ["check"]

_GRADIENT = "the gradient"


def check(
    model: torch.nn.Module,
    data: Data | HeteroData,
    mesh: Any = None,
    *,
    call: Callable[[Any, Any], Any] | None = None,
    tolerance: float = 1e-9,
    **options: Any,
) -> None:
    """Compare a model on all ranks with the same model in one process, in float64.

    Outputs, gradients and the results of every module are compared, in training mode without
    dropout. Use a small graph: every rank also runs the whole. Only this finds code in ``forward``
    that reduces over all nodes itself (``x.mean(0)``).

    Args:
        model: as for :func:`distribute`; it is not changed.
        data: likewise.
        mesh: likewise.
        call: calls the model on data; by default ``forward`` gets the attributes of ``data`` that
            its arguments are named after, or ``data``.
        tolerance: relative to the largest number of a tensor (of all gradients).
        **options: of :func:`distribute`.

    Raises:
        VerificationError: on every rank, with the first module, output or gradient that differs.
    """
    call = _named if call is None else call
    single = copy.deepcopy(model).double().train()
    spread_model = copy.deepcopy(single)
    spread, share = distribute(spread_model, _doubled(data), mesh, rows="all", **options)
    whole = _doubled(data).to(spread.wire.device)
    expected = _run(single.to(spread.wire.device), single, whole, call)
    results = _run(spread, spread_model, share, call)
    owned = [(store.num_nodes, store_of(share, key).n_id)
             for key, store in node_stores(whole).items()]  # fmt: skip
    largest = max((_largest(t) for name, t in expected if _GRADIENT in name), default=0.0)

    def compare() -> dict[str, str]:
        for (name, reference), (_, own) in zip(expected, results, strict=False):
            if reference is None:
                continue
            # Node types may have the same number of nodes: one of them has to fit.
            parts = [
                reference,
                *(reference[ids] for n, ids in owned if reference.shape[:1] == (n,)),
            ]
            errors = [_largest(own - p) for p in parts if own is not None and p.shape == own.shape]
            if not errors:
                shape = None if own is None else list(own.shape)
                raise ValueError(f"{name} has the shape {shape}, not {list(reference.shape)}")
            # Some gradients are zero up to rounding: all are compared on one scale.
            scale = max(largest if _GRADIENT in name else _largest(reference), 1e-300)
            if not min(errors) <= tolerance * scale:
                error = min(errors) / scale
                raise ValueError(f"{name} differs by {error:.1e} of its largest number")
        return {}

    try:
        agree(spread.wire, compare)
    except NotDistributable as error:
        raise VerificationError(f"not what one process computes: {error}") from None


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


def _named(model: Any, data: Any) -> Any:
    """Call a model with the attributes of a data set that its arguments are named after."""
    forward = model.module.forward if isinstance(model, Distributed) else model.forward
    arguments = {}
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = data if name == "data" else None
        if not isinstance(data, HeteroData):
            value = data.get(name, value)
        elif name.endswith("_dict"):
            value = data.collect(name.removesuffix("_dict"), allow_empty=True) or None
        if value is not None:
            arguments[name] = value
        elif parameter.default is parameter.empty:
            raise NotDistributable(f"data has no '{name}', which forward asks for: pass 'call'")
    return model(**arguments)


def _run(
    model: Any, inner: torch.nn.Module, data: Data | HeteroData, call: Callable[[Any, Any], Any]
) -> list[tuple[str, Tensor | None]]:
    """Return by name the results of modules outside of layers, outputs and gradients."""
    seen: list[tuple[str, Tensor | None]] = []
    layers = [m for m in inner.modules() if hasattr(m, "propagate")]
    inside = {child for m in layers for child in m.modules() if child is not m}
    names = {m: name for name, m in inner.named_modules() if name and m not in inside}

    def note(module: Any, args: Any, out: Any) -> None:
        if module in names:
            for key, t in out.items() if isinstance(out, dict) else [("", out)]:
                if isinstance(t, Tensor) and t.is_floating_point() and t.dim():
                    name = f"{names[module]}[{key!r}]" if key else names[module]
                    seen.append((f"what '{name}' returns", t.detach().clone()))

    with register_module_forward_hook(note), Functions(NOT_RANDOM):
        out = call(model, data)
    outs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in outs]
    learned = [(t * w).sum() for t, w in zip(outs, weights, strict=True) if t.requires_grad]
    if learned:
        torch.stack(learned).sum().backward()
    seen += [(f"output {i}", t.detach()) for i, t in enumerate(outs)]
    return seen + [(f"{_GRADIENT} of '{n}'", p.grad) for n, p in inner.named_parameters()]


def _doubled(data: Data | HeteroData) -> Any:
    return copy.copy(data).apply(lambda t: t.double() if t.is_floating_point() else t)
