"""``torch.ops.pyg`` as PyG calls it: operators, and a namespace that replaces pyg-lib's.

Functions that TorchScript and ``torch.compile`` call are operators of torch, registered as
``pyg_accel::...`` with pyg-lib's order of arguments; others are plain functions. Calls of operators
are in :func:`pyg_accel.report`.
"""

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pyg_accel import pyg_lib
from pyg_accel.ops.operator import define
from pyg_accel.pyg_lib import distributed, ops, partition, sampler
from pyg_accel.pyg_lib.ops.cluster import sampler_of
from pyg_accel.pyg_lib.ops.points import kernel_of
from pyg_accel.pyg_lib.sampler import relation_neighbor_sample
from pyg_accel.runtime.native import library_of
from pyg_accel.runtime.report import record_batch

__all__ = ["NAMESPACE", "serving"]

_POINTS = ("knn", "radius", "nearest")
_CPU = torch.device("cpu")


def serving(name: str, like: Tensor | None = None, most: int = 16) -> str:
    """Return the implementation of an operator: ``cpu`` (C++), ``triton``, or ``torch``."""
    like = torch.empty(0, 3) if like is None else like
    if name in _POINTS:
        return kernel_of(like, most)
    if name == "fps":
        return sampler_of(like)
    device = _CPU if name == "graclus_cluster" else like.device
    native = name in ("graclus_cluster", "random_walk") and device.type == "cpu"
    return "cpu" if native and library_of(device) is not None else "torch"


# torch omits the last arguments if they equal the defaults of the schema.
def _knn(
    x: Tensor, y: Tensor, ptr_x: Tensor | None = None, ptr_y: Tensor | None = None, k: int = 1,
    *options: Any,
) -> Tensor:  # fmt: skip
    return ops.knn(x, y, k, ptr_x, ptr_y, *options)


def _radius(
    x: Tensor, y: Tensor, ptr_x: Tensor | None = None, ptr_y: Tensor | None = None, r: float = 1.0,
    *options: Any,
) -> Tensor:  # fmt: skip
    return ops.radius(x, y, r, ptr_x, ptr_y, *options)


def _edges(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(2, torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def _some(_: Tensor, ptr: Tensor, *__: Any) -> Tensor:
    return ptr.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def _rows(like: Tensor, *_: Any) -> Tensor:
    return like.new_empty(like.size(0), dtype=torch.int64)


def _nodes(rowptr: Tensor, *_: Any) -> Tensor:
    return rowptr.new_empty(rowptr.size(0) - 1)


def _walks(rowptr: Tensor, _: Tensor, seed: Tensor, walk_length: int, *__: Any) -> Tensor:
    return rowptr.new_empty(seed.size(0), walk_length + 1)


_EXAMPLES = "Tensor x, Tensor y, Tensor? ptr_x=None, Tensor? ptr_y=None"
_OPERATORS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (f"knn({_EXAMPLES}, int k=1, bool cosine=False, int num_workers=1)", _knn, _edges),
    (f"radius({_EXAMPLES}, float r=1.0, int max_num_neighbors=32, int num_workers=1, "
     "bool ignore_same_index=False)", _radius, _edges),
    (f"nearest({_EXAMPLES})", ops.nearest, _rows),
    ("fps(Tensor src, Tensor ptr, float ratio=0.5, bool random_start=True)", ops.fps, _some),
    ("grid_cluster(Tensor pos, Tensor size, Tensor? start=None, Tensor? end=None)",
     ops.grid_cluster, _rows),
    ("graclus_cluster(Tensor rowptr, Tensor col, Tensor? weight=None)",
     ops.graclus_cluster, _nodes),
    ("random_walk(Tensor rowptr, Tensor col, Tensor seed, int walk_length, float p, float q)",
     sampler.random_walk, _walks),
)  # fmt: skip


def _reported(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose calls are in the report."""

    def call(*args: Any) -> Any:
        began = time.perf_counter()
        out = run(*args)
        place = {"knn": 4, "radius": 5}.get(name, len(args))
        most = args[place] if place < len(args) else 32
        what = serving(name, args[0], most)
        record_batch(name, "for pyg-lib's", what, "", time.perf_counter() - began)
        return out

    return call


NAMESPACE = ModuleType("torch.ops.pyg")  # TorchScript looks up operators in modules only
vars(NAMESPACE).update(
    cuda_version=pyg_lib.cuda_version,
    neighbor_sample=sampler.neighbor_sample,
    hetero_neighbor_sample=relation_neighbor_sample,
    subgraph=sampler.subgraph,
    metis=partition.metis,
    **{name: getattr(ops, name) for name in ops.__all__},
    **{name: getattr(distributed, name) for name in distributed.__all__},
)
for _schema, _run, _fake in _OPERATORS:
    _name = _schema.partition("(")[0]
    define(f"{_schema} -> Tensor", _reported(_name, _run), _fake)
    setattr(NAMESPACE, _name, getattr(torch.ops.pyg_accel, _name))
