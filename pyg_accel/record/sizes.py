"""Tracks the sizes in a recording that differ between calls; programs compute them in each call.

They are sizes of arguments that differed between two calls, the number of edges that a function of
the graph returns or a mask selects, and sizes that follow from them.
"""

import dis
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx

from pyg_accel.graph import Graph
from pyg_accel.ops.csr import graph_of
from pyg_accel.record.code import is_library_file, is_package_file
from pyg_accel.record.dims import Dim
from pyg_accel.record.edge_tensors import EdgeTensor, asks, name_of

__all__ = ["Sizes", "asks_for_size", "is_fact", "rounds", "tells_apart"]

_PROPERTIES = frozenset({"requires_grad"})
# Properties that calls of one signature need not have in common.
_IDENTITY = frozenset({
    "storage_offset", "_version", "untyped_storage", "_base", "data_ptr", "is_inference",
    "is_contiguous", "stride", "is_conj", "is_neg",
})  # fmt: skip

_SHAPE = (Tensor.size, Tensor.shape.__get__)  # type: ignore[attr-defined]
_NUMBERS = ("numel", "nelement", "__len__")
# Functions of torch whose results have sizes that depend on the values of their arguments.
_SELECT = frozenset({
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "unique_dim",
    "bincount", "one_hot", "repeat_interleave", "tensor_split", "_pack_padded_sequence",
})  # fmt: skip
# Functions whose results have the sizes of their first argument, but for the last of `linear`.
_ALIKE = frozenset({
    "dropout", "alpha_dropout", "batch_norm", "layer_norm", "linear", "relu", "elu", "leaky_relu",
    "tanh", "sigmoid",
})  # fmt: skip
# Operators whose results have a row for each target of a graph.
_REDUCTIONS = ("gspmm", "sampled_spmm", "attention")
# Classes and functions that round, take a number by its bits, or tell an int from a subclass.
_ROUNDS = frozenset({"int", "round", "ceil", "floor", "trunc", "float", "math", "divmod", "bool",
                     "range", "index", "numel", "str", "repr", "type", "bytes", "bytearray",
                     "islice", "repeat", "itemgetter", "map"})  # fmt: skip
_TELLS = frozenset({"type", "__class__"})  # names by which code may tell a Dim from an int
_RENDERED = re.compile(r"_(propagate|edge_updater)_\w+\.py$")  # by PyG, for a user's class
# In Python 3.10; later versions have one instruction with the operator as its argument.
_QUOTIENTS = ("BINARY_TRUE_DIVIDE", "INPLACE_TRUE_DIVIDE", "BINARY_POWER", "INPLACE_POWER")
# Instructions behind which a subscript is no number that was computed.
_CONSTANT = ("LOAD_CONST", "LOAD_SMALL_INT", "BUILD_SLICE", "BUILD_TUPLE")


def asks_for_size(function: Callable[..., Any]) -> bool:
    """Return whether a function of torch returns sizes of a tensor."""
    return function in _SHAPE or name_of(function) in _NUMBERS


def _asker() -> str:
    """Return the file that called the function of torch which a mode handles now."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    while frame.f_code.co_name == "__torch_function__":  # of a mode inside of this one
        frame = frame.f_back
    return str(frame.f_code.co_filename)


def is_fact(function: Any, name: str) -> bool:
    """Return whether a function reads a property that the signature of the arguments fixes."""
    if name == "__get__":
        name = getattr(function.__self__, "__name__", "")
    if name in _IDENTITY:
        return is_package_file(_asker())
    return asks(function) or name in _PROPERTIES


class Sizes:
    """Tracks the dimensions of tensors in a recording that differ between calls.

    Args:
        exact: whether to fix the sizes that code of users reads: after a recording for any sizes
            was refused, since that code may depend on them.
        tells: whether that code may tell a :class:`Dim` from an int (:func:`tells_apart`).

    Attributes:
        expected: whether the program expects fixed sizes.
        read: whether code of users has read sizes that differ between calls.
    """

    def __init__(self, *, exact: bool, tells: bool) -> None:
        self._exact, self._tells, self.expected, self.read = exact, tells, False, False
        self._varying: dict[int, dict[int, Dim]] = {}  # of tensors by identity, by dimension

    def clear(self) -> None:
        """Release all tensors."""
        self._varying.clear()

    def vary(self, tensor: Tensor, node: fx.Node, dims: Collection[int], least: int = 0) -> None:
        """Note dimensions whose sizes differ between calls, with their lower bound."""
        if dims:
            shape, graph = _shape(tensor), node.graph
            self._varying[id(tensor)] = {
                dim: Dim.of(shape[dim], graph.call_method("size", (node, dim)), least)
                for dim in dims
            }

    def query(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the sizes that a function reads from a tensor, as a :class:`Dim` if they vary."""
        with torch._C.DisableTorchFunction():
            result, tensor = function(*args, **kwargs), args[0]
        varying, rank, name = self._of(tensor), len(_shape(tensor)), name_of(function)
        sizes: list[int] = [varying.get(dim, size) for dim, size in enumerate(_shape(tensor))]
        if function in _SHAPE and isinstance(result, int):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            sizes = sizes[dim % rank : dim % rank + 1]
        caller = _asker()
        for place, size in enumerate(sizes):
            if not isinstance(size, Dim) or is_library_file(caller):
                continue
            self.read = True
            if self._exact or self._tells:
                number, self.expected = size.expected(), True
                sizes[place] = number if self._tells else size
        if function in _SHAPE:
            return sizes[0] if isinstance(result, int) else torch.Size(sizes)
        if name != "__len__":
            return prod(sizes)
        if isinstance(sizes[0], Dim) and not is_package_file(caller):
            sizes[0].expected()  # len() returns a plain int
        return result

    def count(self, args: Any, parts: Sequence[Any]) -> None:
        """Expect the sizes that determine the number of results of a function."""
        whole = args[0] if args else None
        if not isinstance(whole, Tensor) or not parts or not isinstance(parts[0], Tensor):
            return
        size, sizes = _shape(parts[0]), _shape(whole)
        for dim, number in self._of(whole).items():
            divided = size[dim] != number if len(size) == len(sizes) else number == len(parts)
            divided = divided or len(parts) == 1
            if isinstance(number, Dim) and divided:
                number.expected()

    def _of(self, tensor: Tensor) -> dict[int, int]:
        if isinstance(tensor, EdgeTensor):
            return dict([tensor.edges()])
        return {**self._varying.get(id(tensor), {})}

    def follow(
        self,
        result: Tensor,
        node: fx.Node,
        name: str,
        args: Any,
        kwargs: Any,
        *,
        derived: bool,
        by_values: bool,
    ) -> None:
        """Note the dimensions of a result that differ between calls.

        Args:
            result: of a function.
            node: the node that computes it.
            name: of the function.
            args: of the call.
            kwargs: of the call.
            derived: whether it is derived from a graph, which decides its number of edges.
            by_values: whether its sizes may depend on the values of tensors.
        """
        shape = _shape(result)
        tensors = [value for value in _leaves(args) if isinstance(value, Tensor)]
        of_first = dict[int, int]()
        if tensors and len(_shape(tensors[0])) == len(shape):
            of_first = self._of(tensors[0])
        is_linear = name == "linear"
        if of_first and name in _ALIKE and not (is_linear and any(map(self._of, tensors[1:]))):
            same = {dim: size for dim, size in of_first.items()
                    if dim < len(shape) - is_linear and isinstance(size, Dim)}  # fmt: skip
            if same:
                self._varying[id(result)] = same
            return
        selected = range(len(shape)) if derived else _selected(name, args, kwargs, len(shape))
        if derived and len(shape) > 1:
            selected = selected[:1] if result.is_floating_point() else selected[-1:]
        if selected or by_values:
            return self.vary(result, node, selected or range(len(shape)))
        varying, fixed = set[int](), {1}
        for value in _leaves([args, kwargs]):
            if isinstance(value, Graph):
                all_varying = {s for dims in self._varying.values() for s in dims.values()}
                fixed |= {value.num_rows, value.num_cols}
                varying |= {value.num_edges, value.num_rows, value.num_cols} & all_varying
            elif isinstance(value, Tensor):
                dims_of_value = self._of(value)
                for dim, size in enumerate(_shape(value)):
                    (varying if isinstance(dims_of_value.get(dim), Dim) else fixed).add(size)
            else:
                (varying if isinstance(value, Dim) else fixed).add(int(value))
        if varying:
            dims = [d for d, size in enumerate(shape) if size in varying or size not in fixed
                    or (size != 1 and isinstance(of_first.get(d), Dim))]  # fmt: skip
            if (
                name in _REDUCTIONS and kwargs.get("reduce") != "none"
            ):  # rows are targets, not edges
                dims = [d for d in dims if d or _rows_vary(node)]
            self.vary(result, node, dims)


def tells_apart(codes: Iterable[CodeType]) -> bool:
    """Return whether code of users may tell a :class:`Dim` from an int."""
    return any(not is_library_file(code.co_filename) and not _TELLS.isdisjoint(code.co_names)
               for code in codes)  # fmt: skip


def rounds(
    codes: Iterable[CodeType], counting: Collection[CodeType], floats: Collection[str]
) -> bool:
    """Return whether code may depend on sizes in a way that is not recorded.

    It does if it rounds numbers or compares floats, as a float times a size is no :class:`Dim`, or
    takes items at places that it computes.

    Args:
        codes: code objects that ran.
        counting: code objects that called functions in C which may read a number.
        floats: names by which they may read floats.
    """
    of_users = [code for code in codes if not is_library_file(code.co_filename)
                and not _RENDERED.search(code.co_filename)]  # fmt: skip
    names = {"", *(name for code in of_users for name in (*code.co_names, *code.co_freevars))}
    dunder = any(name.startswith("__") for code in of_users for name in code.co_names)
    if dunder or not _ROUNDS.isdisjoint(names) or not set(of_users).isdisjoint(counting):
        return True
    constants = [c for code in of_users for c in code.co_consts if isinstance(c, str)]
    if any("%" in text for text in constants) or any(map(_looks_up, of_users)):
        return True
    has_floats = not names.isdisjoint(floats) or any(map(_makes_floats, of_users))
    return has_floats and any(map(_compares_numbers, of_users))


@lru_cache(maxsize=1024)
def _makes_floats(code: CodeType) -> bool:
    return any(isinstance(constant, float) for constant in code.co_consts) or any(
        step.opname in _QUOTIENTS or step.argrepr in ("/", "/=", "**", "**=")
        for step in dis.get_instructions(code)
    )


@lru_cache(maxsize=1024)
def _compares_numbers(code: CodeType) -> bool:
    return any(
        step.opname == "COMPARE_OP"
        and not (before.opname == "LOAD_CONST" and isinstance(before.argval, str))
        for before, step in pairwise(dis.get_instructions(code))
    )


@lru_cache(maxsize=1024)
def _looks_up(code: CodeType) -> bool:
    steps = [*dis.get_instructions(code)]
    for place, step in enumerate(steps):
        if step.opname in ("BUILD_SLICE", "BINARY_SLICE"):
            parts = steps[max(place - (step.arg or 2), 0) : place]
        elif step.opname == "BINARY_SUBSCR" or step.argrepr == "[]":
            parts = steps[place - 1 : place]
        else:
            continue
        if any(part.opname not in _CONSTANT for part in parts):
            return True
    return False


def _rows_vary(node: fx.Node) -> bool:
    """Whether the number of targets of the graph that a node reads differs between calls."""
    graph = node if node.target is not operator.getitem else node.all_input_nodes[0]
    graph = graph.all_input_nodes[0]
    return graph.target is not graph_of or isinstance(graph.args[1], fx.Node)


def _selected(name: str, args: Any, kwargs: Any, rank: int) -> range:
    """Return the dimensions of a result whose sizes depend on values of tensors."""
    if name in _SELECT or (name == "where" and len(args) + len(kwargs) == 1):
        return range(rank)
    if name != "__getitem__":
        return range(0)
    *before, last = args[1] if isinstance(args[1], tuple) and args[1] else (args[1],)
    is_mask = isinstance(last, Tensor) and last.dtype in (torch.bool, torch.uint8)
    if is_mask and last.dim() == 1 and all(part == slice(None) for part in before):
        return range(len(before), len(before) + 1)
    return range(0)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors, graphs and integers in arguments."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves([*value.values()])
    elif isinstance(value, (Tensor, Graph)) or (
        isinstance(value, int) and not isinstance(value, bool)
    ):
        yield value


def _shape(tensor: Tensor) -> tuple[int, ...]:
    with torch._C.DisableTorchFunction():
        return tuple(tensor.shape)
