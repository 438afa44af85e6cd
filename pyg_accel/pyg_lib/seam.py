"""Replaces pyg-lib in PyG by :mod:`pyg_accel.pyg_lib`.

PyG looks for pyg-lib once, at import: :mod:`torch_geometric.typing` has a flag for each function,
and modules copy flags and the package from it. :func:`give` sets them and the namespaces of
operators; :func:`take_back` restores them.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric.index import index2ptr
from torch_geometric.loader import graph_saint, shadow
from torch_geometric.nn import pool
from torch_geometric.nn.conv import edge_conv, gravnet_conv, spline_conv, x_conv
from torch_geometric.nn.dense.linear import HeteroLinear
from torch_geometric.nn.models import dimenet

from pyg_accel import pyg_lib
from pyg_accel.pyg_lib import operators, sparse_tensor
from pyg_accel.runtime.native import cpu_unavailable_reasons
from pyg_accel.settings import settings

__all__ = ["description", "give", "is_active", "served", "take_back"]

# Not WITH_SEGMM: RGCNConv would take means over the edges of all relations together, and
# HeteroLinear would time both ways in its first calls. Not WITH_INDEX_SORT: torch's sort gives the
# edges of a node the same order as without patch(), so that random numbers of edges, such as
# dropout, fall on the same edges.
_FLAGS = (
    "WITH_PYG_LIB", "WITH_GMM", "WITH_SAMPLED_OP", "WITH_SPLINE", "WITH_GRID_CLUSTER",
    "WITH_GRACLUS", "WITH_FPS", "WITH_KNN", "WITH_RADIUS", "WITH_NEAREST", "WITH_SOFTMAX",
    "WITH_METIS", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE",
)  # fmt: skip
_MISSING = object()
# Attributes to set while PyG has our module: owner, name, new value and old value.
_places: list[tuple[Any, str, Any, Any]] = []
_looked = 0  # number of modules of the process at the last _look()
_stock: dict[str, Any] = {}  # the values of the names of torch_geometric.typing
_givers = 0


def served() -> str:
    """Return the package that serves PyG while patched: ``"pyg_accel"`` or ``"pyg-lib"``."""
    installed = _stock.get("WITH_PYG_LIB", torch_geometric.typing.WITH_PYG_LIB)
    return "pyg-lib" if installed and not settings.replace_pyg_lib else "pyg_accel"


def description() -> str:
    """Describe the implementations of PyG's calls of pyg-lib on the CPU while patched."""
    if served() != "pyg_accel":
        return "pyg-lib, which is installed (PYG_ACCEL_REPLACE_PYG_LIB=1 gives PyG pyg_accel's)"
    names = ("knn", "radius", "nearest", "fps", "graclus_cluster", "random_walk")
    by_kernel = [f"{name} {operators.serving(name)}" for name in names]
    metis = "pymetis" if find_spec("pymetis") else "communities (pip install pymetis for METIS)"
    lacking = "; for torch-sparse, which is missing: GraphSAINT, ShaDow and DimeNet alone"
    sparse = "" if torch_geometric.typing.WITH_TORCH_SPARSE else lacking
    return f"pyg_accel: {', '.join(by_kernel)}, metis {metis}{sparse}"


def forward_naive(self: HeteroLinear, x: Tensor, type_ptr: Tensor) -> Tensor:
    """Multiply the rows of every type by its matrix, in HeteroLinear."""
    return pyg_lib.ops.segment_matmul(x, type_ptr, self.weight)


def example_ptr(batch: Tensor, size: int | None = None) -> Tensor:
    """Return where each example begins: ``index2ptr`` of a sorted batch.

    Raises:
        ValueError: for a batch that is not sorted or out of range: ``index2ptr`` would return wrong
            results, or write out of bounds.
    """
    if not torch.jit.is_scripting():
        size = _checked_size(batch, size)
    return index2ptr(batch, size)


def _checked_size(batch: Tensor, size: int | None) -> int | None:
    if torch.compiler.is_compiling() or batch.dim() != 1 or batch.numel() == 0:
        return size
    falls = (batch.diff() < 0).any().to(batch.dtype)
    falls, least, most = torch.stack([falls, batch[0], batch[-1]]).tolist()  # waits once
    if falls:
        raise ValueError("expected 'batch' to ascend: sort the points by example")
    if least < 0 or (size is not None and most >= size):
        raise ValueError(f"expected 'batch' from 0 to 'batch_size' (got {least} to {most})")
    return most + 1 if size is None else size


def is_active() -> bool:
    """Return whether PyG has our module now."""
    return bool(_stock)


def give() -> None:
    """Let PyG have our module, unless it uses pyg-lib; calls are counted."""
    global _givers
    _givers += 1
    if _givers > 1 or served() != "pyg_accel":
        return
    # The places of the last time, unless a module was imported or a value changed.
    valid = _looked == len(sys.modules) and all(_value(w, n) is v for w, n, _, v in _places)
    if not valid:
        _look()
    _stock.update({n: v for w, n, _, v in _places if w is torch_geometric.typing})
    for where, name, value, _ in _places:
        setattr(where, name, value)


def _look() -> None:
    """List the places, which depend on the imported modules."""
    global _looked, _places
    lacks_sparse = not torch_geometric.typing.WITH_TORCH_SPARSE
    new: dict[str, Any] = {n: True for n in _FLAGS if hasattr(torch_geometric.typing, n)}
    # Without the native library torch-sparse samples neighbours, if it is there.
    samples = lacks_sparse or not cpu_unavailable_reasons()
    new |= {"pyg_lib": pyg_lib, "WITH_PYG_LIB": samples}
    stock = {name: getattr(torch_geometric.typing, name) for name in new}
    places: list[tuple[Any, str, Any]] = [
        (module, name, new[name]) for module in _modules() for name in new
        if _value(module, name) is stock[name]
    ]  # fmt: skip
    places.append((torch.ops, "pyg", operators.NAMESPACE))
    places.append((HeteroLinear, "forward_naive", forward_naive))
    places += [(m, "index2ptr", example_ptr) for m in (pool, edge_conv, gravnet_conv, x_conv)]
    for name in ("spline_basis", "spline_weighting"):
        places.append((spline_conv, name, getattr(pyg_lib.ops, name)))
    if lacks_sparse:
        places.append((torch.ops, "torch_sparse", sparse_tensor.NAMESPACE))
        places.append((shadow, "WITH_TORCH_SPARSE", True))
        for module in (shadow, graph_saint, dimenet):
            places.append((module, "SparseTensor", sparse_tensor.SparseTensor))
    _places = [(where, name, value, _value(where, name)) for where, name, value in places]
    _looked = len(sys.modules)


def take_back() -> None:
    """End one :func:`give`; the last one restores PyG."""
    global _givers
    _givers -= 1
    if _givers or not _stock:
        return
    for where, name, _, value in _places:
        if value is _MISSING:
            delattr(where, name)
        else:
            setattr(where, name, value)
    for module in _modules() if _looked != len(sys.modules) else ():  # imported meanwhile
        for name in _stock.keys() & vars(module).keys():
            if vars(module)[name] is pyg_lib or vars(module)[name] is True:
                setattr(module, name, _stock[name])
    _stock.clear()


def _value(where: Any, name: str) -> Any:
    return vars(where).get(name, _MISSING)


def _modules() -> list[ModuleType]:
    named = list(sys.modules.items())
    return [m for name, m in named
            if name.startswith("torch_geometric.") and isinstance(m, ModuleType)]  # fmt: skip
