"""The state of the running call in each thread: one object for all rooms.

Code that begins something sets an attribute, and sets it back when that ends; functions that run
inside of it read the attribute. Every thread starts with the values below, so an attribute says
nothing about other threads, such as threads of backward passes on a GPU.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.nn import Module

__all__ = ["CallState", "during", "running"]


class CallState(threading.local):
    """The state of a thread. Values of classes that are defined further up are Any.

    Attributes:
        stock: whether PyG's own path runs, without acceleration of inner functions. Set by the gate
            (:mod:`.patching.gate`) and the verification; read by replaced functions.
        unconditional: whether all calls are accelerated, patched or not, of any size. Set while a
            layer of an optimized model is recorded; read by :func:`.patching.reasons.is_active`.
        arguments: tensors of the running layer, which its caller may change before the gradient.
            PyG copies features to the edges, so ``x += conv(x)`` does not change what its gradient
            reads. Set by the gate and the recording; read where operands are saved for a gradient.
        lent: tensors that the running layer has borrowed from :mod:`.graph.memo`; None outside of
            layers. Set around the forward of a layer; read by memoised functions.
        deriving: whether a memoised function runs; functions that it calls are not memoised. Set
            and read by :mod:`.graph.memo`.
        traces: traced calls (``Tracer``), innermost last. Not the stack of function modes, as a
            mode is off while it handles a function. Set by the traces; read by lazy messages.
        products: computed in a call with a sparse matrix (``Computation``); None outside. Set and
            read by :mod:`.patching.sparse`.
        recorder: of the call that is recorded (``Recorder``); None outside. Set by the recorder;
            read by functions that are one step of a program.
        notes: on calls inside of a recorded one. Set and read by :mod:`.patching.recording`.
        transformed: programs of the running optimized model, in place of programs of its layers;
            empty inside of such a layer. Set by optimized models; read by the gate.
        static: arguments of that model that are the same tensors in every call. Set by optimized
            models, and for their layers in :mod:`.distributed`; read by these layers.
        forward_wire: of the distributed model during its forward pass (``Wire``). Set by the model.
        backward_wires: of the distributed model during its backward pass, when activation
            checkpointing runs parts of the model again; otherwise empty. Set by the model.
        halo_rows: tensors with halos that the running layer has exchanged; None outside of layers
            of a distributed model. Set and read by :mod:`.distributed`.
        scatter: replaces PyG's ``scatter`` in a norm, readout or formula: a function of reduce,
            values [rows, ...], index [rows] and the size. Set and read by :mod:`.distributed`.
        graphed: whether a call of :mod:`.cuda_graphs` runs, which includes nested calls. Set and
            read by its engine.
        counted: whether the report counts calls. Set around calls that are not of the user.
        backends: names of the backends that were chosen; None if nobody asks. Set by
            :func:`.backends.notes.record_choices`; read where a kernel is chosen or run.
        sampled_widths: of the sampled aggregations that ran; None if nobody asks. Set and read by
            :mod:`.ops.sampled`.
    """

    stock = False
    unconditional = False
    arguments: tuple[Tensor, ...] = ()
    lent: list[Tensor] | None = None
    deriving = False
    traces: tuple[Any, ...] = ()
    products: list[Any] | None = None
    recorder: Any = None
    notes: Any = None
    transformed: Mapping[Module, Any] = MappingProxyType({})
    static: tuple[Any, ...] = ()
    forward_wire: Any = None
    backward_wires: Sequence[Any] = ()
    halo_rows: dict[tuple[Any, ...], tuple[Tensor, Tensor]] | None = None
    scatter: Callable[[str, Tensor, Tensor, Any], Tensor] | None = None
    graphed = False
    counted = True
    backends: dict[str, None] | None = None
    sampled_widths: list[int] | None = None

    @property
    def wire(self) -> Any:
        """The wire of the distributed model that runs; None outside of one."""
        return self.forward_wire or (self.backward_wires[0] if self.backward_wires else None)


running = CallState()


@contextmanager
def during(**values: Any) -> Iterator[None]:
    """Set attributes of the state in a ``with`` block."""
    before = {name: getattr(running, name) for name in values}
    vars(running).update(values)
    try:
        yield
    finally:
        vars(running).update(before)
