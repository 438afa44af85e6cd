"""Acceleration for PyTorch Geometric: same models, same numbers, several times faster.

    import pyg_accel
    pyg_accel.patch()

Importing this package sets one variable, for large memory pages (:mod:`.large_pages`), and nothing
else: what a name needs is imported when the name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyg_accel.large_pages import ask_for_large_pages

if TYPE_CHECKING:
    from pyg_accel import distributed, layers, ops, transforms
    from pyg_accel.backends import register_backend, use_backend
    from pyg_accel.cbsr import CBSR
    from pyg_accel.cuda_graphs import graphed, graphed_step
    from pyg_accel.distributed import distribute
    from pyg_accel.errors import BackendNotSupported, ExtensionNotBuilt
    from pyg_accel.graph import Graph
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

__version__ = "0.1.0"

ask_for_large_pages()

_ROOMS = {"backends", "distributed", "errors", "layers", "ops", "rewrite", "testing", "transforms"}
_HOME = {
    "BackendNotSupported": "pyg_accel.errors",
    "CBSR": "pyg_accel.cbsr",
    "ExtensionNotBuilt": "pyg_accel.errors",
    "Graph": "pyg_accel.graph",
    "MaxK": "pyg_accel.layers",
    "MaxKGCNConv": "pyg_accel.layers",
    "MaxKGINConv": "pyg_accel.layers",
    "MaxKSAGEConv": "pyg_accel.layers",
    "calibrate_sampling": "pyg_accel.patching",
    "distribute": "pyg_accel.distributed",
    "explain": "pyg_accel.rewrite",
    "graphed": "pyg_accel.cuda_graphs",
    "graphed_step": "pyg_accel.cuda_graphs",
    "optimize": "pyg_accel.rewrite",
    "plan": "pyg_accel.rewrite",
    "patch": "pyg_accel.patching",
    "patched": "pyg_accel.patching",
    "register_backend": "pyg_accel.backends",
    "reorder": "pyg_accel.reordering",
    "report": "pyg_accel.patching",
    "reset_report": "pyg_accel.patching",
    "sampled": "pyg_accel.patching",
    "sampling_rates": "pyg_accel.ops",
    "to_maxk": "pyg_accel.layers",
    "unpatch": "pyg_accel.patching",
    "use_backend": "pyg_accel.backends",
}

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
    "transforms",
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
    return sorted([*globals(), *__all__])
