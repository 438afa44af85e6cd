"""Records a call: every function of torch and every operator of this package that runs, in order.

The code of the layer runs as it is, and the caller gets its result. A ``TorchFunctionMode`` sees
the functions of torch, and a profiler all others. Anything that a program cannot repeat (values
read from a tensor, calls of functions that are not guarded, another mode of autograd) ends the
recording but not the call: :attr:`Recorder.reason` says why.
"""

import gc
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.fx.immutable_collections import immutable_list
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pyg_accel.formula import Operand
from pyg_accel.graph.memo import tensors_in
from pyg_accel.record.calls import Calls
from pyg_accel.record.dims import Dim, is_size
from pyg_accel.record.edge_tensors import EdgeTensor, changed_in_place, name_of
from pyg_accel.record.guard import NotComparable, Reading
from pyg_accel.record.metadata import EFFECT, FACTS, WRITES, TensorFacts
from pyg_accel.record.operators import Operators, Unwatched
from pyg_accel.record.order import checks_first, drop_unused
from pyg_accel.record.signature import LEAST
from pyg_accel.record.sizes import Sizes, asks_for_size, is_fact, rounds
from pyg_accel.record.split import DERIVED
from pyg_accel.record.steps import Steps
from pyg_accel.runtime.cache import memory_of
from pyg_accel.runtime.state import during, running

__all__ = ["Recorder", "copied", "perform", "quiet"]

T = TypeVar("T")
_NUMBERS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_FACTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Attributes of tensors that are tensors in each call.
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


def perform(function: Callable[..., T], *args: Any, borrows: bool = False, **kwargs: Any) -> T:
    """Call a function of this package; a recording has it as one node.

    Args:
        function: the function.
        args: of the call.
        borrows: whether its results are derived from a graph, and shared: the layer returns copies
            of them, and must not change them.
        kwargs: of the call.
    """
    recorder = running.recorder
    with torch._C.DisableTorchFunction():
        if recorder is None:
            return function(*args, **kwargs)
        with Unwatched():
            with during(recorder=None):
                plain_args, plain_kwargs = tree_map_only(Dim, Dim.plain, (args, kwargs))
                result = function(*plain_args, **plain_kwargs)
            recorder.take(function, args, kwargs, result, borrows=borrows)
    return result


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of features that a message reads, for its gradient.

    PyG copies features to the edges, so code may change them in place before the backward pass. A
    program of a whole call omits the copy if nothing changes the features.
    """
    copy = perform(torch.clone, tensor)
    if running.recorder is not None:
        running.recorder.copies.append((tensor, copy))
    return copy


def quiet() -> AbstractContextManager[Any]:
    """Return a context in which only a recording sees the functions of torch."""
    recorder = running.recorder
    return torch._C.DisableTorchFunction() if recorder is None else recorder.exclusively()


class Recorder(TorchFunctionMode):
    """Records one call as a graph.

    Args:
        reading: of the layer.
        inputs: the tensors among the arguments, in the order of the placeholders.
        sizes: of these tensors; None for a size that may be any.
        exact: see :class:`Sizes`.
        tells: see :class:`Sizes`.
        whole: whether the call is of a whole layer, not of its propagate.

    Attributes:
        reason: why the call cannot be recorded; empty if it can.
        may_change: whether a later, similar call may be recorded nevertheless.
        overwrites: whether inputs of messages were changed in place afterwards.
        graph: the recording.
        constants: values other than arguments, by the name of their node.
        is_shareable: whether none of these, except for tensors, may belong to the layer.
        ran: code objects that ran and are followed.
        copies: features that messages read, and their copies.
    """

    def __init__(
        self,
        reading: Reading,
        inputs: Sequence[Tensor],
        sizes: Sequence[tuple[int | None, ...]],
        *,
        exact: bool = False,
        tells: bool = False,
        whole: bool = False,
    ) -> None:
        super().__init__()
        self.reason, self.whole, self.overwrites = "", whole, False
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self.is_shareable, self.may_change = True, False
        self._calls = Calls(reading, self.stop)
        self.ran = self._calls.ran
        self._values: dict[int, tuple[Any, fx.Node]] = {}
        self._borrowed: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._needed: set[int] = set()  # ids of copies whose originals were changed
        self._quiet = 0
        self._sizes = Sizes(exact=exact, tells=tells)
        self._modes = _modes()
        for number, tensor in enumerate(inputs):
            node = self.graph.placeholder(f"a{number}")
            node.meta[FACTS] = TensorFacts.of(tensor)
            self._values.setdefault(id(tensor), (tensor, node))
            dims = [dim for dim, size in enumerate(sizes[number]) if size is None]
            self._sizes.vary(tensor, node, dims, LEAST)

    def stop(self, reason: str, *, may_change: bool = False) -> None:
        """End the recording; the first reason counts."""
        if not self.reason:
            self.reason, self.may_change = reason, may_change
            self._calls.ended = True

    # -- what runs ---------------------------------------------------------------------------------

    def __enter__(self) -> "Recorder":
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the block."""
        outer, running.recorder = running.recorder, self
        before, collects = sys.getprofile(), gc.isenabled()
        gc.disable()  # finalizers are not part of the call
        try:
            with self:
                sys.setprofile(self._calls.see)
                try:
                    yield
                finally:
                    sys.setprofile(before)
        finally:
            running.recorder = outer
            if collects:
                gc.enable()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Record the functions in the block, and hide them from other modes."""
        self._quiet += 1
        try:
            with torch._C.DisableTorchFunctionSubclass(), self:
                yield
        finally:
            self._quiet -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond
            return func(*args, **kwargs)
        edges = [t for t in types if issubclass(t, EdgeTensor)]
        if asks_for_size(func):
            return self._sizes.query(func, args, kwargs)
        if edges and torch._C._is_torch_function_enabled():
            kind = next((t for t in edges if not t.waits), edges[0])
            with self:
                return kind.__torch_function__(func, types, args, kwargs)
        with Operators(func) as operators:
            if self._quiet:
                with torch._C.DisableTorchFunction():
                    result = func(*args, **kwargs)
            else:
                result = func(*args, **kwargs)
        with Unwatched():
            self.take(func, args, kwargs, result, operators)
        return result

    # -- the graph ---------------------------------------------------------------------------------

    def take(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        operators: Operators | None = None,
        *,
        borrows: bool = False,
    ) -> None:
        """Record a function of torch that called ``operators``, or one of this package."""
        name, changes, trusted = name_of(function), list[Tensor](), operators is None
        if operators is not None:
            if operators.foreign:
                self.stop(f"it calls the operator {operators.foreign}")
            changes = changed_in_place(name, args, kwargs)
            if written := operators.written:
                with torch._C.DisableTorchFunction():
                    changes += [t for t in tensors_in((args, kwargs)) if memory_of(t) in written]
            self._note_changes(changes)
        if self.reason:
            return
        if not trusted:
            if is_fact(function, name):
                return
            if torch._C._functorch.peek_interpreter_stack() is not None:
                return self.stop("it calls a transform of torch.func")
            tensors = tensors_in((args, kwargs, result))
            if any(t.layout is not torch.strided or t.is_nested for t in tensors):
                return self.stop(f"it computes with a sparse or nested tensor ({name})")
            if any(shared is tensor for shared in self._borrowed for tensor in changes):
                return self.stop("it changes a tensor in place that other calls share")
            if _modes() != self._modes or name == "__set__" or "seed" in name:
                return self.stop(f"it changes the mode of torch or of a tensor ({name})")
            if not (tensors_in(result) or changes):
                if tensors_in((args, kwargs)):
                    name = getattr(getattr(function, "__self__", None), "__name__", name)
                    self.stop(f"what it does depends on the numbers in a tensor ({name})")
                return
            attribute = getattr(getattr(function, "__self__", None), "__name__", "")
            if name == "__get__" and attribute not in _VIEWS:
                return self.stop(f"it reads {attribute} of a tensor")
        try:
            arguments = self._named(args, trusted), self._named(kwargs, trusted)
            node = self._node(function, name, *arguments)
            if borrows:
                node.meta[DERIVED] = True
            if operators is not None and operators.has_effects:
                node.meta[EFFECT] = True
            if changes:
                with torch._C.DisableTorchFunction():
                    node.meta[WRITES] = frozenset(map(memory_of, changes))
        except NotComparable as error:
            return self.stop(str(error))
        if type(result) in (tuple, list) and not trusted:
            self._sizes.count(args, result)
        for tensor, part in self._bind(result, node):
            by_values = operators is not None and operators.reads_values
            self._sizes.follow(tensor, part, name, args, kwargs, derived=borrows,
                               by_values=by_values)  # fmt: skip
            if borrows:
                self._borrowed.append(tensor)

    def _note_changes(self, changes: list[Tensor]) -> None:
        if changes and self.copies:
            with torch._C.DisableTorchFunction():
                memory = set(map(memory_of, changes))
                needed = {id(copy) for t, copy in self.copies if memory_of(t) in memory}
            self._needed |= needed
            self.overwrites |= bool(needed)

    def _node(self, function: Any, name: str, args: Any, kwargs: Any) -> fx.Node:
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], function.__self__.__name__))
        if isinstance(function, types.FunctionType) and function.__module__ == "torch._tensor":
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(function, args, kwargs)

    def _bind(self, value: Any, node: fx.Node) -> Iterator[tuple[Tensor, fx.Node]]:
        """Note the result of a node; yield its tensors and their nodes."""
        if type(value) not in (*_NUMBERS, tuple, list) and not isinstance(value, _FACTS):
            self._values[id(value)] = (value, node)
            if isinstance(value, Tensor):
                node.meta[FACTS] = TensorFacts.of(value)
                yield value, node
        if isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                if tensors_in(item):
                    part = self.graph.call_function(operator.getitem, (node, index))
                    yield from self._bind(item, part)

    def _named(self, value: Any, trusted: bool) -> Any:
        """Return an argument with nodes in place of tensors."""
        if isinstance(value, Tensor) or id(value) in self._values:
            return self.node_of(value)
        if type(value) in (tuple, list, immutable_list):
            return type(value)(self._named(v, trusted) for v in value)
        if type(value) is torch.Size:
            return tuple([self._named(v, trusted) for v in value])
        if type(value) is Dim:
            return value.node
        if type(value) is dict:
            return {k: self._named(v, trusted) for k, v in value.items()}
        if type(value) is slice:
            return slice(*(self._named(v, trusted) for v in (value.start, value.stop, value.step)))
        if type(value) in _NUMBERS or isinstance(value, _FACTS):
            return value
        formula = type(value).__module__ == Operand.__module__
        if isinstance(value, torch.Generator) or (trusted and (callable(value) or formula)):
            self.is_shareable &= formula or _is_of_no_layer(value)
            return self._constant(value)
        raise NotComparable(f"a function is called with a {type(value).__name__}")

    def node_of(self, value: Any) -> fx.Node:
        """Return the node of a tensor or graph; NotComparable if no function has returned it."""
        entry = self._values.get(id(value))
        if entry is not None:
            return entry[1]
        if not isinstance(value, Tensor):
            raise NotComparable(f"a {type(value).__name__} that no function of torch has made")
        node = self._constant(value)  # an attribute or a global, which the guard checks
        self._values[id(value)] = (value, node)
        return node

    def is_new(self, tensor: Tensor, functions: Collection[str]) -> bool:
        """Return whether one of these functions has made a tensor, and only its sizes were read."""
        _, node = self._values.get(id(tensor), (None, None))
        made_by = None if node is None or not all(map(is_size, node.users)) else node.target
        return callable(made_by) and name_of(made_by) in functions

    def _constant(self, value: Any) -> fx.Node:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.get_attr(name)
        if isinstance(value, Tensor):
            node.meta[FACTS] = TensorFacts.of(value)
        return node

    @property
    def exact(self) -> bool:
        """Whether the recording is only valid for sizes of this call."""
        return self._sizes.expected

    def finish(self, out: Any) -> None:
        """Record the result of the call, and release its tensors."""
        self._record_result(out)
        self._values.clear()
        self._borrowed.clear()
        self.copies.clear()
        self._sizes.clear()

    def check_sizes(self, floats: Collection[str]) -> None:
        """Stop if code, which may read ``floats``, depends on sizes in an unrecorded way."""
        if self._sizes.read and not self.exact and rounds(self.ran, self._calls.counting, floats):
            self.stop("what it does depends on sizes")

    def _record_result(self, out: Any) -> None:
        if self.reason:
            return
        try:
            self.graph.output(self._returned(out))
        except NotComparable as error:
            return self.stop(f"its result: {error}")
        unneeded = [self.node_of(copy) for _, copy in self.copies if id(copy) not in self._needed]
        for node in unneeded if self.whole else ():  # a function may have returned its input since
            node.replace_all_uses_with(node.all_input_nodes[0])
            self.graph.erase_node(node)
        drop_unused(self.graph)
        if (ordered := checks_first(self.graph)) is None:
            return self.stop("it checks sizes or edges that it computes after random numbers")
        self.graph = ordered

    def _returned(self, value: Any) -> Any:
        """Return the nodes of a result, with copies of shared tensors."""
        if type(value) in (tuple, list):
            return type(value)(map(self._returned, value))
        if type(value) is torch.Size:
            return self.graph.call_function(torch.Size, (self._named(value, False),))
        node = self._named(value, False)
        if isinstance(value, Tensor):
            if vars(value):
                raise NotComparable("a tensor with attributes")
            memory = memory_of(value)
            if any(memory_of(tensor) == memory for tensor in self._borrowed):
                return self.graph.call_function(torch.clone, (node,))
        return node


def _is_of_no_layer(value: Any) -> bool:
    """Whether a function only refers to other functions."""
    if type(value) is not types.FunctionType:
        return type(value) is Steps
    return all(_is_of_no_layer(cell.cell_contents) for cell in value.__closure__ or ())


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch._C._is_any_autocast_enabled(), torch.get_default_dtype(),
    )  # fmt: skip
