"""Results of functions that derive an edge_index from another, shared by the layers that call them.

GCNConv normalises its graph in every forward pass and gets a new edge_index each time, whose graph
would be sorted each time. :func:`remembered` returns the same tensors for the same arguments, and
with them the same graph (:mod:`pyg_accel.derived`). Where weights are learned the function runs,
but its edges, which do not depend on weights, are those that came out before.

Tensors that are stored are shared, so none of them may get to where it could be changed: a layer
borrows them while its forward runs (:meth:`Running.begin`), and leaves copies behind where it
returns or keeps one.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor, get_default_dtype
from torch._C import _is_any_autocast_enabled
from torch.nn import Parameter, ParameterDict

from pyg_accel.cache import EXACT, Snapshot, arrays_of, memory_of
from pyg_accel.derived import find, keep
from pyg_accel.graph import for_autograd

__all__ = ["changed", "copied", "is_sparse_tensor", "remembered", "running", "tensors_in"]

_INERT = frozenset({type(None), bool, int, float, str})  # what most attributes of layers are
_PLAIN = (Tensor, Parameter)


class _Argument(NamedTuple):
    """Stands for an argument that is returned as it is: stored, it would keep itself alive."""

    place: int  # among the tensors of the call


class _Remembered(NamedTuple):
    result: Any
    tensors: list[Tensor]  # in it
    unchanged: Snapshot  # of them

    @classmethod
    def of(cls, result: Any) -> "_Remembered":
        """Look at a result; what is derived of its edges is stored for as long as they live."""
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


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists, dictionaries and sparse matrices."""
    if type(value) in _INERT:
        return []
    if isinstance(value, Tensor):
        return [value]
    if is_sparse_tensor(value):
        storage = value.storage
        own = (storage._row, storage._rowptr, storage._col, storage._value)
        return [t for t in own if t is not None]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_in(v)]
    return []


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with its tensors and sparse matrices changed.

    Those inside of lists, tuples and dictionaries too; a container in which all stay is itself.
    """
    if type(value) in _INERT:
        return value
    if isinstance(value, Tensor) or is_sparse_tensor(value):
        return change(value)
    if type(value) is dict:
        items: Any = {key: changed(item, change) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in value) else value
    if type(value) in (list, tuple):
        items = type(value)(changed(item, change) for item in value)
        return items if any(i is not v for i, v in zip(items, value, strict=True)) else value
    return value


def copied(value: Any, shared: list[Tensor]) -> Any:
    """Return a value with copies of tensors that share memory with certain ones."""

    def copy(own: Any) -> Any:
        again = not set(map(memory_of, tensors_in(own))).isdisjoint(map(memory_of, shared))
        return own.clone() if again else own

    return changed(value, copy)


def _form(value: Any, tensors: list[Tensor]) -> Any:
    """What an argument is told apart by, beside its tensors, which are added to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if is_sparse_tensor(value):
        own = tensors_in(value)
        tensors += own
        return "sparse", *value.sizes(), value.storage._row is None, len(own)
    if type(value) is float:
        return float, value.hex()  # 0.0 is not -0.0
    if isinstance(value, (dict, ParameterDict)):
        return dict, *((key, _form(item, tensors)) for key, item in value.items())
    if type(value) is tuple:
        return tuple, *(_form(item, tensors) for item in value)
    return type(value), value


class Running(threading.local):
    """What runs in a thread.

    Attributes:
        inside: a function whose result is remembered runs, and what it calls is not.
        lent: what the layer that runs has borrowed; None outside of layers.
        layer: that layer.
    """

    inside = False
    lent: list[Tensor] | None = None
    layer: Any = None

    def begin(self, layer: Any) -> tuple[list[Tensor] | None, Any]:
        """Let a layer borrow results until :meth:`end` is called with what this returns."""
        before = self.lent, self.layer
        self.lent, self.layer = [], layer
        return before

    def end(self, before: tuple[list[Tensor] | None, Any]) -> list[Tensor]:
        """Return what the layer has borrowed; what it returns to another is borrowed still."""
        lent = self.lent or []
        self.lent, self.layer = before
        if self.lent is not None:
            self.lent += lent
        return lent

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function; what it calls is not remembered."""
        before, self.inside = self.inside, True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside = before


running = Running()


def remembered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, or the same tensors as the last time.

    Args:
        function: derives an edge_index or a sparse matrix, whose edges depend on the integers among
            its arguments alone, and maybe weights. It has no side effects.
        args: of the call.
        kwargs: of the call.
    """
    tensors: list[Tensor] = []
    form = _form((args, kwargs), tensors)
    if running.inside or not tensors or not all([_is_plain(t) for t in tensors]):
        return running.call(function, args, kwargs)
    owners = [array for tensor in tensors for array in arrays_of(tensor)]
    original = getattr(function, "__wrapped__", function)  # of which patch() changed the code
    key = original, get_default_dtype(), _is_any_autocast_enabled(), form
    try:
        hash(key)
    except TypeError:  # an argument that cannot be a key
        return running.call(function, args, kwargs)
    known = find(owners, key)
    if known is not None and known.fits():
        result = known.result
        if type(result) is tuple:
            result = tuple([tensors[r.place] if type(r) is _Argument else r for r in result])
        return _borrow(result, known.tensors)
    result, shared = for_autograd(running.call)(function, args, kwargs), list[Tensor]()
    given = {memory_of(t) for t in (*tensors, *owners)}
    exact = [t for t in owners if t.dtype in EXACT]
    if 0 < len(exact) < len(owners):
        parts = result if type(result) is tuple else (result,)
        parts = tuple([
            _known(exact, (key, place), part, shared)
            if type(part) is Tensor and part.dtype in EXACT and memory_of(part) not in given
            else part
            for place, part in enumerate(parts)
        ])  # fmt: skip
        result = parts if type(result) is tuple else parts[0]
    kept = result
    if type(result) is tuple:  # an argument elsewhere would keep itself alive
        places = {id(t): _Argument(place) for place, t in enumerate(tensors)}
        kept = tuple([places.get(id(r), r) for r in result])
    made = tensors_in(kept)
    if not any(t.requires_grad or memory_of(t) in given for t in made):
        shared = made if keep(owners, key, _Remembered.of(kept)) else shared
    return _borrow(result, shared)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and not tensor.is_inference()


def _known(exact: list[Tensor], key: Hashable, edges: Tensor, shared: list[Tensor]) -> Tensor:
    """Return the edges that came of the same integers before; if there are none, store these."""
    known = find(exact, key)
    if known is None or not known.fits():
        known = _Remembered.of(edges)
        if not keep(exact, key, known):
            return edges
    elif any(known.result is t for t in running.lent or ()):
        return edges  # the layer has those already
    shared.append(known.result)
    return known.result  # type: ignore[no-any-return]


def _borrow(result: Any, shared: list[Tensor]) -> Any:
    """Let the layer that runs borrow a result; what it has borrowed already comes as a copy."""
    lent = running.lent
    if lent is None:
        return result
    if any(t is other for t in shared for other in lent):
        return copied(result, shared)
    lent += shared
    return result
