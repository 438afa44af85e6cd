"""Products of messages with a matrix for every edge, chosen by the relation of the edge."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.formula import Operand
from pyg_accel.patching.edge_type_matmul import Matrices, multiply
from pyg_accel.patching.lazy import LazyTensor, Tracer, first_operand, is_single_side
from pyg_accel.patching.rules.common import Args, Declined, Kwargs, rule
from pyg_accel.patching.rules.rowwise import product
from pyg_accel.record.edge_tensors import plain_shape
from pyg_accel.record.recorder import quiet

__all__ = ["chooses"]


def chooses(trace: Tracer, source: Any, index: Any) -> bool:
    """Whether ``source[index]`` takes a matrix, or several, for every edge."""
    return (
        isinstance(source, Tensor)
        and not isinstance(source, LazyTensor)
        and source.dim() in (3, 4)
        and source.is_floating_point()
        and type(index) is Tensor
        and index.dtype in (torch.int32, torch.int64)
        and index.shape == (trace.num_edges,)
    )


@rule("bmm")
def _bmm(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Multiply [E, 1, K] by [E, K, M]: [E, 1, M]."""
    if len(args) != 2 or kwargs:
        raise Declined
    return product(*args) if isinstance(args[1], LazyTensor) else _product(*args)


@rule("einsum")
def _einsum(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Multiply [E, 1, B, K] by [E, B, K, M], the blocks of a diagonal: [E, B, M]."""
    if len(args) != 3 or args[0].replace(" ", "") != "abcd,acde->ace":
        raise Declined
    return _product(*args[1:])


def _product(lazy: Any, matrices: Any) -> LazyTensor:
    if not isinstance(lazy, LazyTensor) or not isinstance(matrices, Matrices):
        raise Declined
    if not is_single_side(lazy) or lazy.edge_dim != 0:
        raise Declined
    operand, x, weight = lazy.formula, first_operand(lazy), matrices.weight
    assert isinstance(operand, Operand)
    trace = lazy.tracer
    blocks = weight.unsqueeze(1) if weight.dim() == 3 else weight
    alike = x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)
    if operand.side == "e" or trace.repeated[operand.index] or not alike:
        raise Declined
    if x.dim() != weight.dim() or x.size(1) != 1 or x.shape[-2:] != blocks.shape[1:3]:
        raise Declined
    trace.linear_bytes = max(trace.linear_bytes, blocks[0].numel() * blocks.element_size())
    trace.products += blocks.size(1)
    with quiet():
        rows, row = x.reshape(x.size(0), *x.shape[-2:]), trace.end_of(operand.side)
        product = multiply(rows, blocks, matrices.edge_type, trace.edge_index, row)
    return trace.leaf("e", product, plain_shape(product), 0)
