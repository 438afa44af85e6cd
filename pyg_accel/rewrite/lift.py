"""Lifting: what a layer computes, as an expression, and where its matrices come from.

A rule (:mod:`.rules`) reads the options of the layer and what kind of arguments it was called with,
and either returns an :class:`Algebra` or raises :class:`NotLifted` with the reason. It is asked
again only if a call has other kinds of arguments.
"""

from collections.abc import Mapping
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch_geometric.nn import MessagePassing

import pyg_accel.rewrite.rules  # noqa: F401 - they register themselves
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.enumerate import associations_of
from pyg_accel.rewrite.guards import reasons_now
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.registry import rule_of
from pyg_accel.rewrite.select import assumptions_of
from pyg_accel.rewrite.user_layers import lift_user_layer

__all__ = ["associations", "bind", "is_user_layer", "lift", "named", "parameters_of"]


class Parameters(NamedTuple):
    """What a layer's ``forward`` takes.

    Attributes:
        defaults: of all arguments, by name; None where there is none.
        positional: names of those that are taken by position, in order.
        more: it takes any others as well.
    """

    defaults: Mapping[str, Any]
    positional: tuple[str, ...]
    more: bool


@lru_cache(maxsize=256)
def parameters_of(cls: type) -> Parameters:
    """Return what the ``forward`` of a class of layers takes."""
    found = list(signature(cls.forward).parameters.values())[1:]  # type: ignore[attr-defined]
    return Parameters(
        {p.name: None if p.default is p.empty else p.default for p in found},
        tuple(p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
        any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found),
    )


def bind(conv: MessagePassing, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a layer by name, defaults included.

    Raises:
        NotLifted: for arguments that the layer does not take.
    """
    return named(parameters_of(type(conv)), args, kwargs)  # type: ignore[arg-type]


def named(
    parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Do the same for the parameters of a layer: a compiler does not read :func:`parameters_of`.

    Raises:
        NotLifted: for arguments that the layer does not take.
    """
    given = dict(parameters.defaults)
    given.update(zip(parameters.positional, args, strict=False))
    given.update(kwargs)
    if not parameters.more:
        twice = [name for name in parameters.positional[: len(args)] if name in kwargs]
        others = len(args) > len(parameters.positional) or len(given) > len(parameters.defaults)
        if twice or others:
            raise NotLifted("arguments that its forward does not take")
    return given


def lift(conv: MessagePassing, call: Call) -> Algebra:
    """Return what a layer computes.

    Raises:
        NotLifted: with the reason.
    """
    if reasons := reasons_now(conv):
        raise NotLifted("; ".join(reasons))
    return (rule_of(type(conv)) or lift_user_layer)(conv, call)  # type: ignore[arg-type]


def is_user_layer(cls: type) -> bool:
    """Whether a layer has no rule: its code is run as it is, in every call."""
    return rule_of(cls) is None


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
        if is_user_layer(type(conv)):  # its code runs, which takes data
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
    call.static = static
    given = assumptions_of(algebra, call, train=train, upstream=upstream)
    return associations_of(algebra.expr, algebra.also, given)
