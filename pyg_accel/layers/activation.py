"""MaxK as a nonlinearity: the function, and a module to use instead of ``ReLU``."""

from types import FunctionType
from typing import Any, TypeVar, Union

import torch
from torch import Tensor
from torch._C import _is_tracing
from torch_geometric.typing import OptPairTensor

from pyg_accel.graph import CBSR
from pyg_accel.ops import maxk
from pyg_accel.ops.maxk import check_k
from pyg_accel.patching.reasons import transform_reasons
from pyg_accel.runtime.checks import shown

__all__ = ["MaxK", "copied", "dense_maxk", "masked", "masked_pair", "maxk", "needs_torch"]

T = TypeVar("T")


def masked(x: Tensor, k: int) -> Tensor:
    """Return :func:`dense_maxk` by functions that TorchScript, traces and transforms support."""
    columns = torch.argsort(x, dim=-1, descending=True, stable=True)[..., :k]
    selected = torch.zeros_like(x, dtype=torch.bool).scatter(-1, columns, 1)
    return x.masked_fill(selected.logical_not(), 0.0)


def masked_pair(x: Union[Tensor, OptPairTensor], k: int) -> OptPairTensor:  # noqa: UP007
    """Return the features of both sides, masked."""
    if isinstance(x, Tensor):
        both = masked(x, k)
        return both, both
    target = x[1]
    return masked(x[0], k), None if target is None else masked(target, k)


def needs_torch(x: Any) -> bool:
    """Return whether a call is part of a trace, or inside of a transform of torch."""
    if torch.compiler.is_compiling() or not (_is_tracing() or transform_reasons(modes=False)):
        return False
    sides = x if type(x) in (tuple, list) else (x,)
    return not any(isinstance(features, CBSR) for features in sides)


def copied(function: T, name: str) -> T:
    """Return a function under another name, under which TorchScript compiles it as a method."""
    original: Any = function
    copy: Any = FunctionType(original.__code__, original.__globals__, name, original.__defaults__)
    copy.__annotations__ = original.__annotations__
    return copy  # type: ignore[no-any-return]


def dense_maxk(x: Tensor | CBSR, k: int) -> Tensor:
    """Return [..., F] with all but the k largest features of each row set to 0.

    A CBSR is the result of MaxK already, and is converted to dense features.
    """
    if isinstance(x, CBSR):
        return x.dense()
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise ValueError(f"expected 'x' to be features [..., F] or a CBSR (got {shown(x)})")
    if needs_torch(x):
        return masked(x, k)
    if k >= x.size(-1):
        return x
    if x.dim() == 2:
        return maxk(x, k).dense()
    return maxk(x.reshape(-1, x.size(-1)), k).dense().view(x.shape)


class MaxK(torch.nn.Module):
    """The MaxK nonlinearity as a layer (MaxK-GNN paper, section 3.1).

    Keeps the k largest features of each row, of any sign, and sets the others to 0, without
    gradients. Use it like ReLU between ``Linear`` layers. In front of an aggregation use the
    ``MaxK*Conv`` layers, which do not write the zeros.

    Args:
        k: how many features to keep; with no more than k features, all of them.

    Raises:
        ValueError: unless k is a whole number of at least 1.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = check_k(k)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., F] for x [..., F]."""
        if not torch.jit.is_scripting():
            return dense_maxk(x, self.k)
        return masked(x, self.k)

    def extra_repr(self) -> str:
        """Return the text in the brackets of the repr."""
        return f"k={self.k}"
