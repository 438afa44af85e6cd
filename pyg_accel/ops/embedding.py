"""Rows of a table, and their gradient as an aggregation over the places that took each row.

torch sums up the dense gradient of ``nn.Embedding`` on a CPU one row after the other, and each of
its threads looks at every id. It is the copy-reduce of a graph from places to words, which the DGL
paper on x86 (section 3.4) gives to its sparse kernels.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.derived import derived
from pyg_accel.graph import Graph
from pyg_accel.ops.operator import call, define
from pyg_accel.ops.spmm import spmm

__all__ = ["embedding"]


def embedding(
    weight: Tensor, ids: Tensor, *, padding_idx: int = -1, scale_grad_by_freq: bool = False
) -> Tensor:
    """Look rows up, as ``torch.embedding`` does; the gradient is a sum over a graph.

    The ids are sorted in the first backward pass, and remembered with the tensor that holds them.

    Args:
        weight: [words, F], floating point.
        ids: of any shape, int32 or int64, within the words.
        padding_idx: a word that gets no gradient; -1 for none.
        scale_grad_by_freq: divide the gradient of a word by how often it was looked up.

    Returns:
        [*ids.shape, F].

    Raises:
        IndexError: for ids outside of the table.
    """
    out: Tensor = call("embedding", weight, ids, padding_idx, scale_grad_by_freq)
    return out


def _backward(grad: Tensor, ids: Tensor, words: int, padding_idx: int, by_freq: bool) -> Tensor:

    def make() -> Graph:
        flat = ids.reshape(-1)
        places = torch.arange(flat.numel(), dtype=flat.dtype, device=flat.device)
        return Graph.from_edge_index(torch.stack([places, flat]), (flat.numel(), words))

    graph = derived((ids,), ("words", words), make)
    rows = grad.reshape(ids.numel(), grad.size(-1))
    out: Tensor = spmm(graph, rows, reduce="mean" if by_freq else "sum")
    if padding_idx >= 0:
        out[padding_idx] = 0
    return out


def _twice(seed: Tensor, ids: Tensor, words: int, padding_idx: int, by_freq: bool) -> Any:
    """Of a sum over the places of a word each place gets the word's; of a mean, its share."""
    if padding_idx >= 0:
        seed = seed.index_fill(0, ids.new_tensor([padding_idx]).long(), 0)
    if by_freq:
        often = torch.bincount(ids.reshape(-1), minlength=words).clamp(min=1)
        seed = seed / often.to(seed.dtype).unsqueeze(1)
    return call("embedding", seed, ids, -1, False)


define(
    "embedding(Tensor weight, Tensor ids, int padding_idx, bool by_freq) -> Tensor",
    lambda weight, ids, padding_idx, by_freq: torch.embedding(
        weight, ids, padding_idx, by_freq, False
    ),
    lambda weight, ids, *_: weight.new_empty(*ids.shape, weight.size(1)),
    gradients={
        "weight": lambda grad, ids, weight_rows, padding_idx, by_freq: call(
            "embedding_backward", grad, ids, weight_rows, padding_idx, by_freq
        )
    },
)
define(
    "embedding_backward(Tensor grad, Tensor ids, SymInt words, int padding_idx, bool by_freq) "
    "-> Tensor",
    _backward,
    lambda grad, ids, words, *_: grad.new_empty(words, grad.size(-1)),
    gradients={"grad": _twice},
)
