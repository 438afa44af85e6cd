"""``check()``: a model of the user's, on all ranks and in one process, and where they differ."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed.agreement import agree
from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.spread import distribute
from pyg_accel.distributed.stores import node_stores, store_of
from pyg_accel.errors import NotDistributable, VerificationError

__all__ = ["check"]

_DROPOUTS = frozenset({"dropout", "dropout_", "feature_dropout", "alpha_dropout", "dropout1d"})


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _DROPOUTS:
            return args[0]
        return func(*args, **(kwargs or {}))


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

    Outputs, gradients and what every module returns are compared, in training mode without dropout.
    Use a small graph: every rank also runs the whole. What ``forward`` does with all nodes in its
    own code (``x.mean(0)``) shows here and nowhere else.

    Args:
        model: as it would be passed to :func:`distribute`; left as it is.
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
    alone, whole = copy.deepcopy(model).double().train(), _doubled(data)
    many = copy.deepcopy(alone)
    spread, share = distribute(many, _doubled(data), mesh, rows="all", **options)
    alone.to(spread.wire.device)
    whole = whole.to(spread.wire.device)
    expected, results = _run(alone, alone, whole, call)
    found, ours = _run(spread, many, share, call)
    owned = [(int(whole_store.num_nodes), store_of(share, key).n_id.to(spread.wire.device))
             for key, whole_store in node_stores(whole).items()]  # fmt: skip
    lines: list[str] = []
    for (name, wanted), (_, got) in zip(expected, found, strict=False):
        cuts = [wanted[own] for size, own in owned if wanted.shape[:1] == (size,)] or [wanted]
        found_lines: list[list[str]] = []  # types may have equally many nodes: one of them fits
        for cut in cuts:
            found_lines.append([])
            _compare(f"what '{name}' returns", got, cut, tolerance, found_lines[-1])
        best: list[str] = min(found_lines, key=len)
        lines += best
    for i, (wanted, got) in enumerate(zip(results, ours, strict=True)):
        _compare(f"output {i}", got, wanted, tolerance, lines)
    grads = [p.grad.abs().max() for p in alone.parameters() if p.grad is not None and p.numel()]
    scale = float(torch.stack(grads).max()) if grads else 0.0  # of all: some are zero but for noise
    for (name, p), q in zip(alone.named_parameters(), many.parameters(), strict=True):
        if p.grad is not None:
            _compare(f"the gradient of '{name}'", q.grad, p.grad, tolerance, lines, scale)

    def look() -> dict[str, str]:
        if lines:
            raise ValueError(lines[0])
        return {}

    try:
        agree(spread.wire, look)
    except NotDistributable as error:
        raise VerificationError(f"not what one process computes: {error}") from None


def _named(model: Any, data: Any) -> Any:
    forward = model.module.forward if isinstance(model, Distributed) else model.forward
    given = {}
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = _attribute(data, name)
        if value is not None:
            given[name] = value
        elif name == "data":
            given[name] = data
        elif parameter.default is parameter.empty:
            raise NotDistributable(f"data has no '{name}', which forward asks for: pass 'call'")
    return model(**given)


def _attribute(data: Any, name: str) -> Any:
    """The attribute that an argument is named after; ``x_dict`` is that of all types."""
    if not isinstance(data, HeteroData):
        return data.get(name)
    if not name.endswith("_dict"):
        return None
    return data.collect(name.removesuffix("_dict"), allow_empty=True) or None


def _run(
    model: Any, inner: torch.nn.Module, data: Data | HeteroData, call: Callable[[Any, Any], Any]
) -> tuple[list[tuple[str, Tensor]], list[Tensor]]:
    seen: list[tuple[str, Tensor]] = []
    with _recorded(inner, seen), _WithoutDropout():
        out = call(model, data)
    outs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.is_floating_point()]
    generator = torch.Generator().manual_seed(0)
    loss = None
    for t in outs:
        if t.requires_grad:
            weights = torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)
            loss = (t * weights).sum() + (0 if loss is None else loss)
    if loss is not None:
        loss.backward()
    return seen, [t.detach() for t in outs]


@contextmanager
def _recorded(model: torch.nn.Module, seen: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Take a note of what the modules of a model return, leaves and layers."""

    def hook(name: str) -> Callable[..., None]:
        def note(module: Any, args: Any, out: Any) -> None:
            several = out.items() if isinstance(out, dict) else [("", out)]
            for key, t in several:
                if isinstance(t, Tensor) and t.is_floating_point() and t.dim():
                    seen.append((f"{name}[{key!r}]" if key else name, t.detach().clone()))

        return note

    inside = {id(c) for m in model.modules() if hasattr(m, "propagate")
              for c in m.modules() if c is not m}  # fmt: skip
    handles = [
        m.register_forward_hook(hook(name)) for name, m in model.named_modules()
        if name and id(m) not in inside
    ]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(
    what: str,
    got: Tensor | None,
    wanted: Tensor,
    tolerance: float,
    lines: list[str],
    scale: float = 0.0,
) -> None:
    if got is None or got.shape != wanted.shape:
        shape = None if got is None else list(got.shape)
        lines.append(f"{what} has the shape {shape}, not {list(wanted.shape)}")
    elif wanted.numel():
        scale = max(float(wanted.abs().max()), scale, 1e-300)
        off = float((got - wanted).abs().max()) / scale
        if not off <= tolerance:
            lines.append(f"{what} differs by {off:.1e} of its largest number")


def _doubled(data: Data | HeteroData) -> Data | HeteroData:
    result = copy.copy(data)
    for store in result.stores:
        for name, value in list(store.items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                store[name] = value.double()
    return result
