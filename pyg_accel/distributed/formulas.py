"""Functions of an edge_index that look at the degrees of both ends, over all ranks.

PyG's own read the degree of a source node where it is a row of this rank. These ask the rank that
owns it; what they return is otherwise the same, formula by formula.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops

from pyg_accel.cache import Snapshot
from pyg_accel.derived import find, keep
from pyg_accel.distributed.halo import Halo, collect, exchange
from pyg_accel.distributed.known import adopt, stays

__all__ = ["FORMULAS", "formula"]


def gcn_norm(
    halo: Halo,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Stand in for ``gcn_norm``: ``D^-1/2 (A + I) D^-1/2``."""
    if add_self_loops:
        edge_index, edge_weight = add_remaining_self_loops(
            edge_index, edge_weight, 2.0 if improved else 1.0, halo.own
        )
    if edge_weight is None:
        edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    source, target = edge_index
    own = _inverse_root(_sums(edge_weight, target, halo.targets))
    (both,) = exchange(halo, [own])
    return edge_index, both[source] * edge_weight * own[target]


def get_laplacian(
    halo: Halo,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    normalization: str | None = None,
    dtype: torch.dtype | None = None,
    num_nodes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Stand in for ``get_laplacian``: degrees are those of the first row of the edge_index."""
    edge_index, edge_weight = remove_self_loops(edge_index, edge_weight)
    if edge_weight is None:
        edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    first, second = edge_index
    # The edges of a node as a source are spread over ranks.
    (degree,) = collect(halo, [_sums(edge_weight, first, halo.rows)])
    if normalization is None:
        edge_index, _ = add_self_loops(edge_index, num_nodes=halo.own)
        return edge_index, torch.cat([-edge_weight, degree])
    if normalization == "sym":
        (root,) = exchange(halo, [_inverse_root(degree)])
        edge_weight = root[first] * edge_weight * root[second]
    else:
        inverse = 1.0 / degree
        (inverse,) = exchange(halo, [inverse.masked_fill(inverse == torch.inf, 0)])
        edge_weight = inverse[first] * edge_weight
    edge_index, edge_weight = add_self_loops(
        edge_index, -edge_weight, fill_value=1.0, num_nodes=halo.own
    )
    return edge_index, edge_weight


FORMULAS: dict[str, Callable[..., Any]] = {"gcn_norm": gcn_norm, "get_laplacian": get_laplacian}


def formula(halo: Halo, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of one of :data:`FORMULAS`; that of tensors that stay is kept with them.

    Every rank keeps the same results: of tensors that ``distribute()`` returned, no others.
    """
    values = [*args, *kwargs.values()]
    tensors = [v for v in values if isinstance(v, Tensor)]
    if not all(map(stays, tensors)):
        return adopt(FORMULAS[name](halo, *args, **kwargs), halo)
    others = tuple(v for v in values if not isinstance(v, Tensor))
    modes = (torch.get_default_dtype(), torch.is_inference_mode_enabled())
    owners, key = (*tensors, halo), (name, tuple(kwargs), others, modes)
    found = find(owners, key, lasting=True)
    if found is not None and found[1].fits(found[0]):
        edges, weight = args[0] if len(found[0]) == 1 else found[0][0], found[0][-1]
        return edges, weight
    edges, weight = adopt(FORMULAS[name](halo, *args, **kwargs), halo)
    kept = (weight,) if edges is args[0] else (edges, weight)  # it would keep itself alive
    keep(owners, key, (kept, Snapshot(kept)), lasting=True)
    return edges, weight


def _sums(values: Tensor, rows: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add(0, rows, values)


def _inverse_root(degree: Tensor) -> Tensor:
    root = degree.pow(-0.5)
    return root.masked_fill(root == torch.inf, 0)
