"""``optimize()``: the same model with the cheapest order of its matrix products; their orders."""

import linecache
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from typing import Any, get_args

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import is_uninitialized_parameter as is_lazy

import pyg_accel
from pyg_accel.errors import VerificationError
from pyg_accel.patching.api import installed
from pyg_accel.rewrite.cost import CostModel
from pyg_accel.rewrite.layer import Reassociation
from pyg_accel.rewrite.lift import NotLifted
from pyg_accel.rewrite.optimized import OptimizedModel, forward_with, rewritten_layers
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.select import Choose, Options
from pyg_accel.rewrite.tree import Tree
from pyg_accel.rewrite.verify import differences, evaluated
from pyg_accel.runtime.checks import check_arguments
from pyg_accel.runtime.module_state import as_it_was
from pyg_accel.runtime.report import uncounted
from pyg_accel.settings import settings

__all__ = ["associations", "optimize"]

# Folders whose frames lie between the code of a model and its layers.
_PASSED = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, pyg_accel.__file__))


def optimize(
    model: torch.nn.Module,
    *example_inputs: Any,
    train: bool = False,
    static: Sequence[str] | None = (),
    choose: Choose | None = None,
    cost: CostModel | None = None,
    price_all: bool = False,
    **example_kwargs: Any,
) -> OptimizedModel:
    """Let each layer of a model multiply its matrices in the fastest order.

    Layers are lifted into products of matrices, all orders are enumerated, and one is chosen for
    the sizes, the graph and the machine at hand: now for the examples, and again whenever a call
    has sizes that differ by more than a factor of two. Results and gradients stay the same (up to
    rounding). Other layers are not rewritten, and :func:`explain` says why.

    The result wraps ``model``, like a compiled module: the code of the model runs, with its
    parameters, attributes, hooks and modes. ``model`` itself is unchanged.

    The examples are run once, with gradients if ``train=True``. Buffers, random number generators
    and other state of the model are restored afterwards. On small graphs, training on a GPU may be
    faster with :class:`torch.autograd.set_multithreading_enabled` off: backward passes then run in
    the calling thread.

    Args:
        model: any module made of PyG layers, or one layer.
        example_inputs: arguments of a call, e.g. ``x, edge_index``.
        train: optimize the forward and backward pass together; by default the forward pass alone.
        static: names of arguments that are the same tensors in every call, such as ``("x",)`` for
            the features of a fixed graph: a layer aggregates them once. Changes of the tensor are
            noticed.
        choose: the association to use, for experiments: its text, a tree of
            :func:`~pyg_accel.rewrite.associations`, or a function that takes the trees that may be
            the fastest and returns one.
        cost: a cost model to use instead of the default for the device.
        price_all: predict the time of every association, also where sizes suffice to choose, for
            :func:`explain` to show.
        example_kwargs: keyword arguments of the call.

    Returns:
        A module that is called like ``model``; ``model`` may be such a module too.

    Raises:
        ValueError: if ``model`` has no message passing layer, if ``static`` or ``choose`` names
            nothing, or if the examples do not fit or come in another order.
        TypeError: if an example is an array of numpy, or the graph a list.
        VerificationError: with ``PYG_ACCEL_VERIFY=1``, if the result differs from the original's.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"expected 'model' to be a torch.nn.Module (got {model!r})")
    if isinstance(model, OptimizedModel):
        model = model._original
    if any(isinstance(m, installed.get("distributed", ())) for m in model.modules()):
        raise ValueError("expected a model before distribute(): optimize() it, then distribute it")
    if not any(isinstance(m, MessagePassing) for m in model.modules()):
        raise ValueError(f"{type(model).__name__} has no message passing layer to rewrite")
    arguments = _bind(model, example_inputs, example_kwargs)
    static = _checked(train, static, choose, cost, price_all, arguments)
    if any(is_lazy(p) for p in model.parameters()):  # the first call sets their sizes
        evaluated(model, example_inputs, example_kwargs)
    options = Options(train=train, choose=choose, cost=cost, price_all=price_all)
    fast = OptimizedModel(model, options, static)
    forward = fast.forward
    fast.forward = forward_with(model, _Noted(fast._opt_layers), static)
    try:
        evaluated(fast, example_inputs, example_kwargs, learning=train)
    except AssertionError as error:
        if str(error):
            raise
        asserted = extract_tb(error.__traceback__)[-1].line  # PyG's own have no text
        raise ValueError(f"the examples do not fit {type(model).__name__}: {asserted}") from error
    fast.forward = forward
    decisions = [d for layer in rewritten_layers(fast).values() for d in layer.decisions]
    if static and not any(decision.assumed.static & {"X", "Y"} for decision in decisions):
        warnings.warn(
            f"static={list(static)} has no effect: no layer gets {' or '.join(static)} as it is",
            stacklevel=2,
        )
    if settings.verify:
        expected, actual = (
            evaluated(m, example_inputs, example_kwargs, learning=train, gradients=train)
            for m in (model, fast)
        )
        if wrong := differences(expected, actual):
            raise VerificationError(f"{type(model).__name__}, rewritten: {wrong}")
    return fast


def associations(
    conv: MessagePassing, *example_inputs: Any, train: bool = False, **example_kwargs: Any
) -> Associations:
    """Return the associations of a layer's matrix products, and which may be the fastest.

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


class _Noted(dict[torch.nn.Module, Reassociation]):
    """Transforms by layer; a look-up notes the line of code that calls the layer."""

    def get(self, layer: Any, default: Any = None) -> Any:
        transform = super().get(layer, default)
        if transform is not None:
            transform.calls[_calling_line()] = None
        return transform


def _calling_line() -> str:
    """Return the line of code that calls a layer, with file and number."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{linecache.getline(path, number).strip()}  # {Path(path).name}, line {number}"


def _checked(
    train: Any, static: Any, choose: Any, cost: Any, price_all: Any, arguments: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names of the static arguments; refuse invalid options."""
    for name, value in {"train": train, "price_all": price_all}.items():
        if not isinstance(value, bool):
            raise ValueError(f"expected '{name}' to be True or False (got {value!r})")
    names = (static,) if isinstance(static, str) else static
    if names is None:
        names = ()
    if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"expected 'static' to be names of arguments (got {_short(static)})")
    if unknown := [name for name in names if name not in arguments]:
        raise ValueError(f"expected 'static' to name arguments of the model (got {unknown})")
    if not (choose is None or callable(choose) or isinstance(choose, (str, *get_args(Tree)))):
        raise ValueError(f"expected 'choose' to be a text, a tree or a function (got {choose!r})")
    if cost is not None and not callable(getattr(cost, "many", None)):
        raise ValueError(f"expected 'cost' to be a CostModel (got {cost!r})")
    return tuple(names)


def _short(value: Any) -> str:
    """Return the text of a wrong argument, without the values of tensors."""
    return type(value).__name__ if isinstance(value, (Tensor, list, tuple)) else repr(value)


def _bind(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        bound = signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"the examples do not fit {type(model).__name__}: {error} (expected them as the model "
            "takes them, one by one: optimize(model, x, edge_index))"
        ) from None
    bound.apply_defaults()
    check_arguments(bound.arguments)
    return dict(bound.arguments)
