"""Backends: implementations of the operators, and the choice between them."""

from pyg_accel.backends.base import Backend, Kernel
from pyg_accel.backends.dispatch import Decision, choose, use_backend
from pyg_accel.backends.registry import backends, get_backend, register_backend, unregister_backend
from pyg_accel.backends.spec import OpSpec

__all__ = [
    "Backend",
    "Decision",
    "Kernel",
    "OpSpec",
    "backends",
    "choose",
    "get_backend",
    "register_backend",
    "unregister_backend",
    "use_backend",
]
