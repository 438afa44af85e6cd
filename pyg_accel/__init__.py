"""Acceleration for PyTorch Geometric: same models, same numbers, several times faster.

    import pyg_accel
    pyg_accel.patch()

Importing this package sets one variable, for large memory pages
(:mod:`pyg_accel.runtime.large_pages`), and nothing else: what a name needs is imported when the
name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyg_accel.runtime.large_pages import ask_for_large_pages

if TYPE_CHECKING:
    from pyg_accel import distributed, layers, ops
    from pyg_accel.backends import register_backend, use_backend
    from pyg_accel.cuda_graphs import graphed, graphed_step
    from pyg_accel.distributed import distribute
    from pyg_accel.errors import BackendNotSupported, ExtensionNotBuilt
    from pyg_accel.graph import CBSR, Graph
    from pyg_accel.layers import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv, to_maxk
    from pyg_accel.ops import sampling_rates
    from pyg_accel.patching import (
        calibrate_sampling,
        patch,
        patched,
        report,
        reset_report,
        sampled,
        unpatch,
    )
    from pyg_accel.reordering import reorder
    from pyg_accel.rewrite import explain, optimize, plan

__version__ = "0.2.0"

ask_for_large_pages()

_ROOMS = {"backends", "distributed", "errors", "layers", "ops", "rewrite", "testing"}
_EXPORTS = {
    "backends": ("register_backend", "use_backend"),
    "cuda_graphs": ("graphed", "graphed_step"),
    "distributed": ("distribute",),
    "errors": ("BackendNotSupported", "ExtensionNotBuilt"),
    "graph": ("CBSR", "Graph"),
    "layers": ("MaxK", "MaxKGCNConv", "MaxKGINConv", "MaxKSAGEConv", "to_maxk"),
    "ops": ("sampling_rates",),
    "patching": ("calibrate_sampling", "patch", "patched", "report", "reset_report", "sampled",
                 "unpatch"),
    "reordering": ("reorder",),
    "rewrite": ("explain", "optimize", "plan"),
}  # fmt: skip
_HOME = {name: f"pyg_accel.{room}" for room, names in _EXPORTS.items() for name in names}

__all__ = [
    "CBSR",
    "BackendNotSupported",
    "ExtensionNotBuilt",
    "Graph",
    "MaxK",
    "MaxKGCNConv",
    "MaxKGINConv",
    "MaxKSAGEConv",
    "calibrate_sampling",
    "distribute",
    "distributed",
    "explain",
    "graphed",
    "graphed_step",
    "layers",
    "ops",
    "optimize",
    "patch",
    "patched",
    "plan",
    "register_backend",
    "reorder",
    "report",
    "reset_report",
    "sampled",
    "sampling_rates",
    "to_maxk",
    "unpatch",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"pyg_accel.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pyg_accel' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
