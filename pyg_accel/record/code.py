"""The owner of a code object, and the names in its instructions.

Code of a recorded layer is followed into all files, except for the code in :data:`PURE`, which only
depends on its arguments, and the code of this package.
"""

import dis
import sys
import sysconfig
from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch_geometric

__all__ = [
    "Kind", "Names", "assigned_outside", "attributes_in", "codes_of", "is_library", "is_library_file",
    "is_package_file", "is_wrapper", "kind_of", "module_of", "named_in", "names_of",
]  # fmt: skip

_LIBRARIES = ("torch", "torch_geometric", "pyg_accel", "torch_sparse", "torch_scatter", "pyg_lib")
_PACKAGE = str(Path(__file__).parents[1])
_PYTHON = sysconfig.get_path("stdlib")
_ROOTS = {str(Path(m.__path__[0])) + "/": f"{m.__name__}/" for m in (torch, torch_geometric)}
# Files and folders whose functions depend on their arguments and on modes that a program compares.
PURE = (
    "torch/nn/functional.py", "torch/functional.py", "torch/_tensor.py", "torch/_VF.py",
    "torch/overrides.py", "torch/_jit_internal.py", "torch/_dynamo/", "torch/utils/weak.py",
    "torch/jit/", "torch/compiler/", "torch/onnx/", "torch/utils/_config_module.py",
    "torch/nn/modules/module.py", "torch/nn/modules/container.py", "torch/nn/parameter.py",
    "torch/utils/_contextlib.py", "torch/autograd/grad_mode.py", "torch/autograd/function.py",
    "torch/amp/", "torch/special/", "torch/linalg/", "torch/_lowrank.py", "torch/_classes.py",
    "torch/_ops.py", "torch_geometric/utils/", "torch_geometric/typing.py",
    "torch_geometric/_compile.py", "torch_geometric/_onnx.py", "torch_geometric/backend.py",
    "torch_geometric/index.py", "torch_geometric/edge_index.py",
)  # fmt: skip
_LAYERS = ("torch/nn/modules/", "torch_geometric/nn/")
# Attributes that expose the state of a frame, a function or an object as a whole: names that Python
# defines, except for methods, whose calls are seen, and for compared attributes.
_REFLECTS = frozenset({
    *(n for cls in (type, FunctionType, MethodType) for n in (*dir(cls), *vars(cls))),
    "__dict__", "__weakref__", "__slots__", "__builtins__", "cell_contents", "f_back", "f_locals",
    "f_globals", "gi_frame", "tb_frame",
}).difference(
    {name for cls in (int, str, list, dict, set) for name in dir(cls)} - {*dir(object)},
    ("__class__", "__call__", "__get__", "__name__", "__init__", "__new__", "__eq__", "__ne__",
     "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__", "__repr__", "__format__",
     "__self__", "__func__"),
)  # fmt: skip
_ASK = ("getattr", "hasattr")
# Decorators that torch puts around functions.
_WRAPPERS = tuple(f"{root}{file}" for root, name in _ROOTS.items() if name == "torch/"
                  for file in ("_dynamo/", "_compile.py", "utils/_contextlib.py"))  # fmt: skip
# Instructions that may stand between the load of getattr() and its call.
_SIMPLE = ("LOAD_", "BINARY_", "COMPARE_OP", "PUSH_NULL", "KW_NAMES", "CACHE", "NOP", "UNARY_",
           "BUILD_", "CONTAINS_OP", "IS_OP", "EXTENDED_ARG", "PRECALL", "CALL")  # fmt: skip


class Kind(Enum):
    """The owner of code."""

    PURE = "not followed"
    INSTALLED = "of Python or a library: it acts for its caller"
    FOLLOWED = "of a layer, a user or another package"


class Names(NamedTuple):
    """The names in a code object and the functions defined in it.

    Attributes:
        attributes: read by name.
        globals: read by name, builtins included.
        optional: attributes that may be absent, as the code handles that.
        imports: imported modules, by (name, level).
        unseen: why reads of it cannot be seen; empty if they can.
    """

    attributes: frozenset[str]
    globals: frozenset[str]
    optional: frozenset[str]
    imports: frozenset[tuple[str, int]]
    unseen: str


def is_library(name: str | None) -> bool:
    """Return whether a module is of torch, PyG or this package."""
    return bool(name) and str(name).split(".", 1)[0] in _LIBRARIES


def is_library_file(path: str) -> bool:
    """Return whether a file is of torch, PyG or this package."""
    if path.startswith("<"):  # methods of named tuples and data classes, functions of overrides
        return path == "<string>" or path.startswith("<pyg_accel")
    # PyG renders templates into temporary files.
    rendered = Path(path).name.startswith("torch_geometric.")
    return rendered or path.startswith((*_ROOTS, _PACKAGE))


def module_of(function: object) -> str:
    """Return the name of the module that a function or class was defined in."""
    return str(getattr(function, "__module__", None) or "")


@lru_cache(maxsize=4096)
def kind_of(path: str) -> Kind:
    """Return the kind of code in a file."""
    if is_package_file(path) or path.startswith("<frozen importlib"):
        return Kind.PURE
    for root, name in _ROOTS.items():
        if path.startswith(root):
            inside = name + path[len(root) :]
            if inside.startswith(PURE):
                return Kind.PURE
            return Kind.FOLLOWED if inside.startswith(_LAYERS) else Kind.INSTALLED
    of_python = path.startswith(_PYTHON) and "site-packages" not in path
    return Kind.INSTALLED if of_python or path.startswith("<") else Kind.FOLLOWED


def is_wrapper(path: str) -> bool:
    """Return whether a file has decorators, whose code acts for its caller."""
    return path.startswith(_WRAPPERS)


def is_package_file(path: str) -> bool:
    """Return whether a file belongs to this package."""
    return path.startswith((_PACKAGE, "<pyg_accel"))


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and the code objects of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


@lru_cache(maxsize=4096)
def named_in(code: CodeType, *operations: str) -> tuple[Any, ...]:
    """Return the arguments of some instructions in code and its inner functions."""
    opcodes = {dis.opmap[name] for name in operations if name in dis.opmap}
    parts = [part for part in codes_of(code) if not opcodes.isdisjoint(part.co_code[::2])]
    return tuple(dict.fromkeys(
        i.argval for part in parts for i in dis.get_instructions(part) if i.opname in operations
    ))  # fmt: skip


def assigned_outside(code: CodeType) -> list[str]:
    """Return the globals and the variables of outer functions that code assigns to."""
    variables = named_in(code, "STORE_DEREF", "DELETE_DEREF")
    free = [name for name in variables if name in code.co_freevars]
    return [*named_in(code, "STORE_GLOBAL", "DELETE_GLOBAL"), *free]


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """Return the names in a code object."""
    attributes, globals_, optional = set[str](), set[str](), set[str]()
    imports, unseen = set[tuple[str, int]](), ""
    for part in codes_of(code):
        handles, steps = False, [*dis.get_instructions(part)]
        for place, step in enumerate(steps):
            name = step.opname
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                globals_.add(step.argval)
                if step.argval in _ASK:
                    constant = _constant_name(steps, place)
                    if constant is None:
                        unseen = unseen or f"'{code.co_name}' computes the name of an attribute"
                    else:
                        optional.add(constant)
            elif name == "IMPORT_NAME":
                level = steps[place - 2].argval
                imports.add((step.argval, level if isinstance(level, int) else 0))
            elif name in ("PUSH_EXC_INFO", "SETUP_FINALLY"):
                handles = True
            elif name == "MATCH_CLASS":
                unseen = unseen or f"'{code.co_name}' matches attributes by a pattern"
        code_names = set(part.co_names)
        attributes |= code_names
        if handles:
            optional |= code_names
        if reflects := sorted(_REFLECTS & (code_names | optional)):
            unseen = unseen or f"'{code.co_name}' reads {', '.join(reflects)}"
    for name in assigned_outside(code):
        unseen = f"'{code.co_name}' assigns to '{name}' outside of it"
    attributes |= optional
    return Names(
        frozenset(attributes), frozenset(globals_), frozenset(optional), frozenset(imports), unseen
    )


@lru_cache(maxsize=4096)
def attributes_in(code: CodeType) -> frozenset[str]:
    """Return the names of attributes that code may read, without a look at its instructions."""
    parts = [*codes_of(code)]
    constants = (value for part in parts for value in part.co_consts)
    return frozenset(name for part in parts for name in part.co_names).union(
        value for value in constants if isinstance(value, str) and value.isidentifier()
    )


def _constant_name(steps: list[dis.Instruction], place: int) -> str | None:
    """Return the constant name in a call of getattr() that is loaded at a place."""
    stack: list[dis.Instruction] = []  # the instruction of each value above the function
    for step in steps[place + 1 :]:
        name = step.opname
        if not name.startswith(_SIMPLE) or name == "CALL_FUNCTION_EX":
            return None
        effect = dis.stack_effect(
            step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None
        )
        if name.startswith("CALL"):
            count = (step.arg or 0) + (1 if sys.version_info >= (3, 11) else 0)
            arguments = [s for s in stack if s.opname != "PUSH_NULL"]
            if len(arguments) == step.arg and step.arg in (2, 3) and len(stack) <= count:
                constant = arguments[1]
                value = constant.argval if constant.opname == "LOAD_CONST" else None
                return value if isinstance(value, str) else None
        if effect > 0:
            stack += [step] * effect
        elif name not in ("CACHE", "NOP", "EXTENDED_ARG", "KW_NAMES", "PRECALL"):
            del stack[len(stack) + effect :]
            if not stack:
                return None
            stack[-1] = step
    return None
