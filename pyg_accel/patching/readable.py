"""What the methods of a layer read: whether a later call computes what an earlier one did.

A traced call is kept as a plan (:mod:`.plans`) only where everything that could change its formula
can be compared. That is decided from the source of the layer's methods: they may read their
arguments and plain attributes of the layer, and call methods of tensors and functions of torch that
a trace sees. What reads anything else (globals, sizes, counters, properties, attributes of tensors,
other modules) is traced in each call.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_overridable_functions
from torch_geometric.nn import MessagePassing

from pyg_accel.syntax import module_tree

__all__ = ["METHODS", "Reads", "read_class"]

# What a rendered `propagate` and `edge_updater` call.
METHODS = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
_UNPATCHED = {name: getattr(MessagePassing, name) for name in METHODS}
_MODULES = (torch, torch.nn.functional, math)
_BUILTINS = frozenset({"isinstance", "float", "int", "bool", "abs", "max", "min"})
# Attributes of tensors that a kind of call tells. Any other may have been assigned.
_OF_TENSORS = frozenset({"dtype", "ndim"})
# Methods of which a trace takes no note: sizes vary between calls of one plan.
_NOT_CALLED = frozenset({
    "size", "numel", "nelement", "item", "tolist", "data_ptr", "stride", "storage", "numpy",
    "storage_offset", "untyped_storage", "is_contiguous", "is_inference", "is_conj", "is_neg",
    "get_device", "__len__", "__hash__",
})  # fmt: skip
# Arguments that tell sizes or the graph itself: a softmax may have them, nothing else.
_OF_THE_GRAPH = frozenset({
    "index", "ptr", "dim_size", "size", "size_i", "size_j", "edge_index", "edge_index_i",
    "edge_index_j", "adj_t",
})  # fmt: skip
_SOFTMAX = ("torch_geometric.utils._softmax", "softmax")
_STATEMENTS = (
    ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AnnAssign, ast.If, ast.Assert, ast.Pass,
    ast.Expr, ast.IfExp, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Call, ast.keyword,
    ast.Attribute, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.expr_context, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop, ast.JoinedStr, ast.Slice,
)  # fmt: skip


@dataclass(frozen=True)
class Reads:
    """What the methods of a layer class read beside their arguments.

    Attributes:
        all_known: that is all; where it is not, the other fields but ``globals`` say nothing.
        attributes: of the layer.
        assigned: attributes of the layer that are assigned to.
        globals: modules and functions, as the dictionary that holds them and their names. Once one
            of them is another, the methods may read something else.
        trailing: the size of a last dimension.
    """

    all_known: bool
    attributes: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()
    globals: tuple[tuple[dict[str, Any], str], ...] = ()
    trailing: bool = False


_UNKNOWN = Reads(all_known=False)


def read_class(cls: type[MessagePassing]) -> Reads:
    """Return what the methods of a layer class read."""
    if any(getattr(cls, name) is not _UNPATCHED[name] for name in ("aggregate", "update")):
        return _UNKNOWN
    methods = [
        method
        for method in (cls.message, cls.edge_update)
        if method not in (_UNPATCHED["message"], _UNPATCHED["edge_update"])
    ]
    readers = [reader for reader in map(_read, methods) if reader is not None]
    names = {(id(names), name): (names, name) for reader in readers for names, name in reader.names}
    attributes = {name for reader in readers for name in reader.attributes}
    assigned = {name for reader in readers for name in reader.assigned}
    if (
        len(readers) < len(methods)
        or not all(reader.accepted for reader in readers)
        or attributes & assigned
        or any(_runs_code(cls, name) for name in attributes)
    ):
        return Reads(all_known=False, globals=tuple(names.values()))
    return Reads(
        True, tuple(sorted(attributes)), tuple(sorted(assigned)), tuple(names.values()),
        any(reader.trailing for reader in readers),
    )  # fmt: skip


def _runs_code(cls: type[MessagePassing], name: str) -> bool:
    """Whether to read an attribute of a layer is to call something, as it is of a property."""
    if cls.__getattr__ is not torch.nn.Module.__getattr__:
        return True
    if cls.__getattribute__ is not torch.nn.Module.__getattribute__:
        return True
    return hasattr(type(inspect.getattr_static(cls, name, None)), "__get__")


def _read(method: Callable[..., Any]) -> "_Reader | None":
    """What a method reads; None if its source is not known."""
    if not inspect.isfunction(method) or method.__closure__ or hasattr(method, "__wrapped__"):
        return None
    try:
        tree = module_tree(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError, TypeError):
        return None
    (function,) = tree.body
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    if not _is_source_of(function, method.__code__):
        return None
    reader = _Reader(method)
    reader.accepted = all(reader.accepts(statement) for statement in function.body)
    return reader


def _is_source_of(function: ast.FunctionDef, code: CodeType) -> bool:
    """Whether code reads the names of this source: a file may change after it was imported.

    Names with two leading underscores are others inside of a class, and differ as well.
    """
    module = compile(ast.Module([function], []), code.co_filename, "exec", dont_inherit=True)
    compiled = [
        c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == code.co_name
    ]
    return [_contents(c) for c in compiled] == [_contents(code)]


def _contents(code: CodeType) -> tuple[Any, ...]:
    # Not the instructions, which depend on what the module imports. White space of texts does not
    # count, as the source of a method is dedented, its docstring too.
    return code.co_names, code.co_varnames, code.co_freevars, [*map(_constant, code.co_consts)]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _contents(value)
    if isinstance(value, str):  # Python 3.10 has the full name of a comprehension
        return "<listcomp>" if value.endswith(".<listcomp>") else repr(value.split())
    return repr(value)


class _Reader:
    """Goes through the body of a method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        code = method.__code__
        self.me = code.co_varnames[0] if code.co_argcount else ""
        self.locals = frozenset((*code.co_varnames, *code.co_cellvars))
        self.parts: frozenset[str] = frozenset()  # of an attribute of the layer
        self.counters: frozenset[str] = frozenset()  # of these parts
        self.given = set(code.co_varnames[: code.co_argcount])  # not yet assigned to
        self.globals: dict[str, Any] = method.__globals__
        self.attributes: set[str] = set()
        self.assigned: set[str] = set()
        self.names: list[tuple[dict[str, Any], str]] = []
        self.trailing = False
        self.accepted = False

    def accepts(self, node: ast.AST) -> bool:
        """Whether a part of the method reads nothing but arguments and attributes of the layer."""
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Name):
            # The layer itself must not go anywhere, nor may a global come in.
            known = node.id in self.locals and node.id not in _OF_THE_GRAPH
            return (known and node.id != self.me) or node.id in self.counters
        if isinstance(node, ast.Subscript):
            load = isinstance(node.ctx, ast.Load)
            return load and self._index(node.slice) and self.accepts(node.value)
        if isinstance(node, ast.ListComp):
            return self._comprehension(node)
        if isinstance(node, ast.Raise):
            return True  # a call that raises leaves no plan
        if isinstance(node, ast.Compare):
            return self._is_empty(node) or self._compared(node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values = [node.value] if node.value is not None else []
            return all(map(self.accepts, values)) and all(map(self._target, targets))
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if self._is_last_size(node):
                self.trailing = True
                return True
            if self._is_softmax(node.func):
                return all(
                    (isinstance(part, ast.Name) and part.id in _OF_THE_GRAPH) or self.accepts(part)
                    for part in given
                )
            return self._called(node.func) and all(
                self.accepts(part) or self._is_type(part, node.func) for part in given
            )
        return isinstance(node, _STATEMENTS) and all(
            self.accepts(child) for child in ast.iter_child_nodes(node)
        )

    def _index(self, node: ast.expr | None) -> bool:
        """Whether an index is made of constants and counters: no data chooses."""
        if isinstance(node, ast.Tuple):
            return all(map(self._index, node.elts))
        if isinstance(node, ast.Slice):
            return all(map(self._index, (node.lower, node.upper, node.step)))
        if isinstance(node, ast.UnaryOp):
            return self._index(node.operand)
        if isinstance(node, ast.Name):
            return node.id in self.counters
        return node is None or isinstance(node, ast.Constant)

    def _comprehension(self, node: ast.ListComp) -> bool:
        """Whether this is a list of what is made with each part of an attribute of the layer."""
        (loop, *more), names = node.generators, [node.generators[0].target]
        over, numbered = loop.iter, isinstance(loop.iter, ast.Call)
        if isinstance(over, ast.Call):
            self.names.append((self.globals, "enumerate"))
            given = [*over.args, *over.keywords]
            if ast.unparse(over.func) != "enumerate" or len(given) != 1 or not over.args:
                return False
            if "enumerate" in self.locals or "enumerate" in self.globals:
                return False
            over, target = over.args[0], loop.target
            names = target.elts if isinstance(target, ast.Tuple) else []
        of_layer = isinstance(over, ast.Attribute) and isinstance(over.value, ast.Name)
        if more or loop.ifs or loop.is_async or not of_layer or len(names) != 1 + numbered:
            return False
        ids = [name.id for name in names if isinstance(name, ast.Name)]
        if len(ids) != len(names) or not _OF_THE_GRAPH.isdisjoint(ids) or self.me in ids:
            return False
        before = self.parts, self.counters
        self.parts = self.parts - {*ids} | {ids[-1]}
        self.counters = self.counters - {*ids} | {*ids[:-1]}
        accepted = self.accepts(over) and self.accepts(node.elt)
        self.parts, self.counters = before
        return accepted

    def _target(self, node: ast.expr) -> bool:
        """Whether something is assigned to a local name, or to an attribute of the layer."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            self.assigned.add(node.attr)
            return node.value.id == self.me
        if not isinstance(node, ast.Name) or node.id in _OF_THE_GRAPH | {self.me}:
            return False
        self.given.discard(node.id)
        return True

    def _compared(self, node: ast.Compare) -> bool:
        """Whether values are compared, and not which objects they are, but with constants."""
        operands = [node.left, *node.comparators]
        constants = [isinstance(operand, ast.Constant) for operand in operands]
        return all(map(self.accepts, operands)) and not any(
            isinstance(operator, (ast.In, ast.NotIn))
            or (isinstance(operator, (ast.Is, ast.IsNot)) and not (left or right))
            for operator, left, right in zip(node.ops, constants[:-1], constants[1:], strict=True)
        )

    def _is_empty(self, node: ast.Compare) -> bool:
        """Whether this is ``index.numel() == 0``: a kind of call says whether there are edges."""
        return ast.unparse(node) == "index.numel() == 0"

    def _is_last_size(self, node: ast.Call) -> bool:
        """Whether this is ``x.size(-1)`` of an argument, as it was given."""
        function = node.func
        if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
            return False
        return (
            function.attr == "size"
            and [ast.unparse(a) for a in node.args] == ["-1"]
            and function.value.id in self.given
            and self.accepts(function.value)
        )

    def _is_softmax(self, function: ast.expr) -> bool:
        """Whether this is PyG's softmax over target nodes, or what stands in for it."""
        if not isinstance(function, ast.Name) or function.id in self.locals:
            return False
        found = self.globals.get(function.id)
        found = getattr(found, "__original_fn", found)
        if (getattr(found, "__module__", ""), getattr(found, "__name__", "")) != _SOFTMAX:
            return False
        self.names.append((self.globals, function.id))
        return True

    def _attribute(self, node: ast.Attribute) -> bool:
        if isinstance(node.value, ast.Name) and node.value.id == self.me:
            self.attributes.add(node.attr)
            return isinstance(node.ctx, ast.Load)
        return node.attr in _OF_TENSORS and self.accepts(node.value)

    def _called(self, function: ast.expr) -> bool:
        """Whether this is a method of a tensor, a function of torch, or a harmless builtin."""
        if isinstance(function, ast.Name):
            name = function.id
            if name in self.parts:
                return True
            self.names.append((self.globals, name))
            return name in _BUILTINS and name not in self.globals and name not in self.locals
        if not isinstance(function, ast.Attribute) or function.attr in _NOT_CALLED:
            return False
        owner: ast.expr = function
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if isinstance(owner, ast.Name) and owner.id not in self.locals:
            return self._is_seen(self._module(function.value), function.attr)
        if isinstance(function.value, ast.Name) and function.value.id == self.me:
            # A module or a method: no plan is made of a call of one, but of a branch without it.
            return self._attribute(function)
        return hasattr(Tensor, function.attr) and self.accepts(function.value)

    def _is_seen(self, module: ModuleType | None, name: str) -> bool:
        """Whether this is a function of numbers, or one of tensors that a trace sees."""
        if module is None:
            return False
        self.names.append((vars(module), name))
        return module is math or vars(module).get(name) in get_overridable_functions()[module]

    def _module(self, owner: ast.expr) -> ModuleType | None:
        """The module of functions that an expression names."""
        found = None
        if isinstance(owner, ast.Name):
            found = self.globals.get(owner.id)
            self.names.append((self.globals, owner.id))
        elif isinstance(owner, ast.Attribute) and owner.attr == "functional":
            inner = owner.value  # torch.nn.functional
            if isinstance(inner, ast.Attribute) and inner.attr == "nn":
                found = torch.nn.functional if self._module(inner.value) is torch else None
        return found if isinstance(found, ModuleType) and found in _MODULES else None

    def _is_type(self, node: ast.expr, function: ast.expr) -> bool:
        """Whether this is the second argument of ``isinstance(x, Tensor)``."""
        if not isinstance(node, ast.Name) or self.globals.get(node.id) is not Tensor:
            return False
        self.names.append((self.globals, node.id))
        return isinstance(function, ast.Name) and function.id == "isinstance"
