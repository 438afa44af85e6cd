"""Values that cannot change, and values of libraries whose reads cannot be followed.

Only the types listed here are compared by value. Any other value is followed to values of these
types, or the code is not recorded (:mod:`~pyg_accel.record.walk`).
"""

import builtins
import re
import types
from contextvars import ContextVar
from functools import partial
from inspect import FullArgSpec
from itertools import chain
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace, _Ops

__all__ = ["BUILTIN_FUNCTIONS", "BUILTIN_TYPES", "final", "is_of_torch", "is_pure"]

_FINAL = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, types.CodeType,
    re.Pattern,
})  # fmt: skip
# Immutable objects: operators of torch, and special forms of typing.
_CONSTANT = (OpOverload, OpOverloadPacket, _OpNamespace, _Ops, type(torch._VF), type(ClassVar))
BUILTIN_TYPES = frozenset({
    object, type, super, property, staticmethod, classmethod, type(None), bool, int, float, complex,
    str, bytes, bytearray, range, slice, tuple, list, dict, set, frozenset, zip, enumerate, map,
    filter, reversed, memoryview, types.SimpleNamespace, types.MethodType, types.FunctionType,
    types.ModuleType, partial, torch._C.TensorBase, torch.Size, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo,
})  # fmt: skip
BUILTIN_FUNCTIONS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    type(FullArgSpec.args),
)  # fmt: skip
# Functions written in C without side effects that only depend on their arguments.
_BUILTINS = frozenset({
    "isinstance", "issubclass", "len", "getattr", "hasattr", "callable", "iter", "next", "min",
    "max", "sum", "abs", "any", "all", "sorted", "divmod", "pow", "round", "repr",
    "__build_class__", "chr", "ord", "hash", "format",
})  # fmt: skip
_MODULES = frozenset({"math", "cmath", "_operator", "itertools", "_functools", "typing"})
_OF_TORCH = frozenset({  # modes that programs compare, and what only its own code asks
    "_get_tracing_state", "_is_tracing", "is_grad_enabled", "is_inference_mode_enabled",
    "get_default_dtype", "is_autocast_enabled", "_is_any_autocast_enabled",
    "_is_torch_function_enabled", "_has_torch_function", "_has_torch_function_unary",
    "_has_torch_function_variadic", "is_autocast_available", "_log_api_usage_once",
})  # fmt: skip
# Modules of torch in C whose functions take tensors, and are recorded where they are called.
_OPERATORS = frozenset({
    "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft", "torch._C._sparse",
    "torch._C._nested", "torch._C._VariableFunctions",
})  # fmt: skip
_CLASSES = {*BUILTIN_TYPES, Tensor, chain}
_OWNERS: tuple[Any, ...] = (
    str, bytes, int, float, complex, bool, tuple, frozenset, range, slice, list, dict, set,
    type({}.values()), type({}.keys()), type({}.items()), types.MappingProxyType,
    types.GeneratorType, torch.Size, torch.dtype, torch.device, torch.finfo, torch.iinfo,
)  # fmt: skip
_ASKS = ("id", "format", "setattr", "__instancecheck__", "_abc_instancecheck", "_abc_subclasscheck")
# Builtin functions and methods that read integers by their methods, or none.
_BY_METHODS = frozenset({
    "isinstance", "issubclass", "len", "getattr", "hasattr", "setattr", "callable", "iter", "next",
    "min", "max", "sum", "abs", "any", "all", "sorted", "id", "hash", "format", "repr", "append",
    "extend", "get", "items", "keys", "values", "update", "setdefault", "add", "copy", "join",
    "startswith", "endswith", "__build_class__",
})  # fmt: skip
_FORMATS = ("format", "format_map")  # of strings, which read attributes by names in the string


def final(value: Any) -> tuple[Any, ...] | None:
    """Return the key of a value that cannot change; None for any other value."""
    cls: Any = type(value)
    if cls is float:
        return cls, value.hex()  # 0.0 is not -0.0, and NaN equals itself
    if cls in _FINAL:
        return (cls, repr(value)) if cls is complex else (cls, value)
    if cls is slice:
        parts = [final(part) for part in (value.start, value.stop, value.step)]
        return None if None in parts else (cls, *parts)
    if issubclass(cls, numpy.generic) and value.dtype.kind in "biufc":
        return cls, value.tobytes()
    if issubclass(cls, _CONSTANT):
        return cls, id(value)
    return None


def is_pure(function: Any) -> bool:
    """Return whether a function written in C has no side effects, and no state."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if name in _FORMATS:
        return owner is builtins
    if getattr(torch._C._VariableFunctions, name, None) is function:
        return True  # an operator of torch, which is a node of a recording
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
        if module in ("builtins", "torch._C"):
            return name in (_BUILTINS if module == "builtins" else _OF_TORCH)
        return module in _MODULES or module in _OPERATORS
    if getattr(function, "__module__", None) == "torch._C":
        return name in _OF_TORCH
    if owner is None:  # a method that is looked up on its class
        owner = getattr(function, "__objclass__", None)
        return owner in (*_OWNERS, object, torch._C.TensorBase)
    if isinstance(owner, type):
        return owner in _CLASSES and name not in ("__subclasses__", "mro")
    return isinstance(owner, (Tensor, *_OWNERS))


def may_count(function: Any) -> bool:
    """Return whether a function in C that is not of torch may read an integer unseen."""
    name = function.__name__
    return name not in _BY_METHODS and not (
        getattr(torch._C._VariableFunctions, name, None) is function
        or isinstance(owner := getattr(function, "__self__", None), Tensor)
        or (owner is tuple and name == "__new__")  # of a named tuple
        or getattr(function, "__objclass__", None) is torch._C.TensorBase
        or is_of_torch(function)
    )


def is_of_torch(function: Any) -> bool:
    """Return whether a function in C is of torch, or asks for a type, an identity or a setting."""
    owner = getattr(function, "__self__", None)
    if function.__name__ in _ASKS or isinstance(owner, ContextVar):
        return True
    of_module = owner is None or isinstance(owner, (type, types.ModuleType))
    module = function.__module__ if of_module else type(owner).__module__
    return str(module).partition(".")[0] in ("torch", "pybind11_builtins")
