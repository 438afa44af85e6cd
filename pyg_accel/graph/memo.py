"""Memoises functions that derive an edge_index from another, for all layers that call them.

GCNConv normalises its graph in every forward pass to a new edge_index, which would be sorted each
time. :func:`remembered` returns the same tensors for the same arguments, and so the same graph
(:mod:`.derived`). With learned edge weights the function runs, but stored edges, which do not
depend on weights, replace its edges.

Stored tensors are shared, so user code must not get them, as it could change them in place: a layer
borrows them during its forward (``running.lent``), and tensors that it returns or stores in an
attribute are copied.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor, get_default_dtype
from torch._C import _is_any_autocast_enabled
from torch.nn import Parameter, ParameterDict

from pyg_accel.graph.csr import for_autograd
from pyg_accel.graph.derived import find, keep
from pyg_accel.runtime.cache import EXACT, Snapshot, arrays_of, memory_of
from pyg_accel.runtime.state import during, running

__all__ = ["changed", "copied", "is_sparse_tensor", "remembered", "tensors_in"]

_INERT = frozenset({type(None), bool, int, float, str})  # types of most attributes of layers
_PLAIN = (Tensor, Parameter)


class _Argument(NamedTuple):
    """A placeholder for a returned argument: an entry must not keep its owner alive."""

    position: int  # among the tensors of the call


class _Remembered(NamedTuple):
    """A stored result, its tensors, and their versions."""

    result: Any
    tensors: list[Tensor]
    unchanged: Snapshot

    @classmethod
    def of(cls, result: Any) -> "_Remembered":
        """Store a result; values derived from its edges are stored while they live."""
        tensors = tensors_in(result)
        for tensor in tensors:
            for array in arrays_of(tensor):
                if array.dtype in EXACT:
                    keep((array,), "stored", True, lasting=True)
        return cls(result, tensors, Snapshot(tensors))

    def fits(self) -> bool:
        """Whether the result is unchanged and has no gradients."""
        return self.unchanged.fits(self.tensors) and not any(t.requires_grad for t in self.tensors)


def is_sparse_tensor(value: Any) -> bool:
    """Return whether this is a ``torch_sparse.SparseTensor``, without importing torch_sparse."""
    return type(value).__name__ == "SparseTensor" and hasattr(value, "storage")


def tensors_in(value: Any, inside: tuple[int, ...] = ()) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists, dictionaries and sparse matrices.

    Args:
        value: the nest.
        inside: ids of the outer containers, as one may contain itself.
    """
    if type(value) in _INERT or id(value) in inside:
        return []
    if isinstance(value, Tensor):
        return [value]
    if is_sparse_tensor(value):
        storage = value.storage
        arrays = (storage._row, storage._rowptr, storage._col, storage._value)
        return [t for t in arrays if t is not None]
    if isinstance(value, dict):
        return tensors_in(list(value.values()), (*inside, id(value)))
    if isinstance(value, (tuple, list)):
        inside = (*inside, id(value))
        return [t for v in value for t in tensors_in(v, inside)]
    return []


def changed(value: Any, change: Callable[[Any], Any], inside: tuple[int, ...] = ()) -> Any:
    """Return a value with its tensors and sparse matrices changed.

    It enters lists, tuples and dictionaries. Unchanged containers are not copied, and a container
    that contains itself (``inside`` has the ids of the outer ones) keeps this reference.
    """
    if type(value) in _INERT or id(value) in inside:
        return value
    if isinstance(value, Tensor) or is_sparse_tensor(value):
        return change(value)
    if type(value) is dict:
        inside = (*inside, id(value))
        items: Any = {key: changed(item, change, inside) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in value) else value
    if type(value) in (list, tuple):
        inside = (*inside, id(value))
        items = type(value)(changed(item, change, inside) for item in value)
        return items if any(i is not v for i, v in zip(items, value, strict=True)) else value
    return value


def copied(value: Any, shared: list[Tensor]) -> Any:
    """Return a value with copies of its tensors that share memory with any of ``shared``."""
    memory = set(map(memory_of, shared))

    def copy(tensor: Any) -> Any:
        is_shared = not memory.isdisjoint(map(memory_of, tensors_in(tensor)))
        return tensor.clone() if is_shared else tensor

    return changed(value, copy)


def _form(value: Any, tensors: list[Tensor]) -> Any:
    """Return a key of an argument without its tensors, which are appended to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if is_sparse_tensor(value):
        arrays = tensors_in(value)
        tensors += arrays
        return "sparse", *value.sizes(), value.storage._row is None, len(arrays)
    if type(value) is float:
        return float, value.hex()  # 0.0 is not -0.0
    if isinstance(value, (dict, ParameterDict)):
        return dict, *((key, _form(item, tensors)) for key, item in value.items())
    if type(value) is tuple:
        return tuple, *(_form(item, tensors) for item in value)
    return type(value), value


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function without memoising the functions that it calls."""
    with during(deriving=True):
        return function(*args, **kwargs)


_call_for_autograd = for_autograd(_call)


def remembered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, or the stored result of an equal call.

    Args:
        function: derives an edge_index or a sparse matrix, maybe with weights. Its edges only
            depend on the integer tensors among its arguments, and it has no side effects.
        args: of the call.
        kwargs: of the call.
    """
    tensors: list[Tensor] = []
    form = _form((args, kwargs), tensors)
    if running.deriving or not tensors or not all([_is_plain(t) for t in tensors]):
        return _call(function, args, kwargs)
    owners = [array for tensor in tensors for array in arrays_of(tensor)]
    original = getattr(function, "__wrapped__", function)  # the same key with and without patch()
    key = original, get_default_dtype(), _is_any_autocast_enabled(), form
    try:
        hash(key)
    except TypeError:  # an argument that is not hashable
        return _call(function, args, kwargs)
    entry = find(owners, key)
    if entry is not None and entry.fits():
        result = entry.result
        if type(result) is tuple:
            result = tuple([tensors[r.position] if type(r) is _Argument else r for r in result])
        return _borrow(result, entry.tensors)
    result, shared = _call_for_autograd(function, args, kwargs), list[Tensor]()
    argument_memory = {memory_of(t) for t in (*tensors, *owners)}
    exact = [t for t in owners if t.dtype in EXACT]
    if 0 < len(exact) < len(owners):
        parts = result if type(result) is tuple else (result,)
        parts = tuple([
            _stored_edges(exact, (key, index), part, shared)
            if type(part) is Tensor
            and part.dtype in EXACT
            and memory_of(part) not in argument_memory
            else part
            for index, part in enumerate(parts)
        ])  # fmt: skip
        result = parts if type(result) is tuple else parts[0]
    stored = result
    if type(result) is tuple:
        arguments = {id(t): _Argument(index) for index, t in enumerate(tensors)}
        stored = tuple([arguments.get(id(r), r) for r in result])
    new = tensors_in(stored)
    # In any other container, an argument would keep its owner alive.
    if not any(t.requires_grad or memory_of(t) in argument_memory for t in new):
        shared = new if keep(owners, key, _Remembered.of(stored)) else shared
    return _borrow(result, shared)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and not tensor.is_inference()


def _stored_edges(
    exact: list[Tensor], key: Hashable, edges: Tensor, shared: list[Tensor]
) -> Tensor:  # fmt: skip
    """Return the stored edges for the same integers, or store these."""
    entry = find(exact, key)
    if entry is None or not entry.fits():
        entry = _Remembered.of(edges)
        if not keep(exact, key, entry):
            return edges
    elif any(entry.result is t for t in running.lent or ()):
        return edges  # the layer borrows the stored edges already
    shared.append(entry.result)
    return entry.result  # type: ignore[no-any-return]


def _borrow(result: Any, shared: list[Tensor]) -> Any:
    """Lend a result to the running layer, or a copy if it borrows the result already."""
    lent = running.lent
    if lent is None:
        return result
    if any(t is other for t in shared for other in lent):
        return copied(result, shared)
    lent += shared
    return result
