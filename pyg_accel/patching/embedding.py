"""``nn.Embedding`` on a CPU: its dense gradient as an aggregation, where that is faster.

The forward pass is torch's. What torch loses is its backward pass, a scatter of rows: see
:mod:`pyg_accel.ops.embedding`.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.dispatch import fast_backend_reasons
from pyg_accel.call_report import record
from pyg_accel.ops.embedding import embedding
from pyg_accel.patching.reasons import RECORDED, is_active, torch_records, transform_reasons
from pyg_accel.settings import settings

__all__ = ["forward", "look_up", "reasons_against"]

# From this many elements of the gradient on, and up to this many words an id, the sum over a sorted
# graph was faster than torch's scatter: benchmarks/cpu_batchnorm_embedding.py. A table that is much
# larger than that is mostly zeroed, which takes either as long.
FEWEST_ELEMENTS = 1_000_000
MOST_WORDS_AN_ID = 6


def forward(
    original: Callable[..., Any], self: torch.nn.Embedding, input: Tensor, *, always: bool = False
) -> Any:
    """Stand in for ``Embedding.forward``.

    Args:
        original: torch's.
        self: the module.
        input: ids.
        always: whether or not patch() was called.
    """
    if not (always or is_active(self)) or reasons_against(self, input):
        return original(self, input)
    start = time.perf_counter()
    out = look_up(self, input)
    seconds = time.perf_counter() - start
    formula = "mean_j u0" if self.scale_grad_by_freq else "sum_j u0"
    record(type(self).__name__, f"{formula} (gradient)", "torch", "", seconds)
    return out


def look_up(module: torch.nn.Embedding, ids: Tensor) -> Tensor:
    """Return the rows, and differentiate by aggregation."""
    weight = module.weight
    if module.max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight, ids.contiguous(), module.max_norm, module.norm_type)
    padding = -1 if module.padding_idx is None else module.padding_idx
    return embedding(weight, ids, padding_idx=padding, scale_grad_by_freq=module.scale_grad_by_freq)


def reasons_against(module: torch.nn.Embedding, ids: Any) -> list[str]:
    """Return why torch's own gradient is taken."""
    if torch_records():
        return [RECORDED]
    weight = module.weight
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return ["no gradient is asked for"]
    if module.sparse:
        return ["a sparse gradient"]
    if type(ids) is not Tensor or type(weight) is not torch.nn.Parameter:
        return ["tensors of another type"]
    if weight.device.type != "cpu" or ids.device.type != "cpu" or weight.dim() != 2:
        return ["it is not on a CPU"]
    reasons = transform_reasons() or fast_backend_reasons("cpu")
    if not (reasons or settings.always or pays(ids.numel(), *weight.shape)):
        reasons = ["small"]
    return reasons


def pays(ids: int, words: int, width: int) -> bool:
    """Return whether the gradient is large enough for a graph to be built for it."""
    return ids * width >= FEWEST_ELEMENTS and words <= MOST_WORDS_AN_ID * ids
