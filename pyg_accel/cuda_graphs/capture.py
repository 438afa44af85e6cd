"""A function as CUDA graphs, forward and backward, and its replay as an autograd function.

Nothing may compile, load or wait inside of a capture. So the function runs a few times before, on
the stream of the capture and with the choices that are made in captures
(:func:`~pyg_accel.runtime.machine.as_captured`). Its trials run on that stream too: autograd ties a
parameter to the stream on which it was first used, as long as any graph with it is alive.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_accel.cuda_graphs import ledger
from pyg_accel.runtime.machine import as_captured

__all__ = ["Captured", "Grads", "Memory", "Replay", "gradients"]

_DRY_RUNS = 2
_Function = Callable[[], list[Tensor]]
Grads = Sequence[Tensor | None]


class Token:
    """A forward pass that may have a backward pass; the autograd graph keeps it alive."""

    done = False


@lru_cache(maxsize=64)  # devices
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures: cuBLAS keeps tens of MiB for each stream."""
    return torch.cuda.Stream(device)


class Memory:
    """The stream and memory that captures of one wrapper share; it holds one call at a time.

    Attributes:
        device: the device of the captures.
        stream: the stream of the captures; None for a device without streams.
        pool: the memory pool of the captures.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet."""
        self.device = device
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self._pending: weakref.ref[Token] | None = None
        if device.type == "cuda":
            self._take()

    def _take(self) -> None:
        self.stream, self.pool = _stream(self.device), torch.cuda.graph_pool_handle()

    def renew(self) -> None:
        """Use another stream and another pool for later captures."""
        _stream.cache_clear()
        self._take()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the block on the stream of captures, after the work that was queued before."""
        stream = self.stream
        if stream is None:
            yield
            return
        here = torch.cuda.current_stream(self.device)
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            here.wait_stream(stream)

    def now(self) -> float:
        """Wait for the device, and return the time in seconds."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
        return ledger.clock()

    def begin(self) -> Token:
        """Note a forward pass that has a backward pass."""
        token = Token()
        self._pending = weakref.ref(token)
        return token

    @property
    def busy(self) -> bool:
        """Whether a backward pass may still read tensors that its forward pass saved."""
        token = None if self._pending is None else self._pending()
        return token is not None and not token.done


def _like(outs: Sequence[Tensor]) -> list[Tensor | None]:
    return [torch.zeros_like(out) if out.requires_grad else None for out in outs]


def gradients(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Grads
) -> list[Tensor | None]:
    """Return the gradients of the inputs, from the outputs that have gradients."""
    pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad and g is not None]
    if not pairs:
        return [None] * len(inputs)
    of, by = zip(*pairs, strict=True)
    return list(torch.autograd.grad(of, inputs, by, allow_unused=True))


class Captured:
    """Two CUDA graphs: one of a function, one of its gradients.

    Args:
        function: reads static tensors and returns its outputs.
        inputs: tensors to compute gradients for.
        memory: shared with other captures.
    """

    repeats = True  # whether replays save time; recorders of tests may run the function itself

    def __init__(self, function: _Function, inputs: Sequence[Tensor], memory: Memory) -> None:
        """Run the function a few times, then capture it."""
        with memory.aside(), as_captured():
            for _ in range(_DRY_RUNS):
                outs = function()
                gradients(outs, inputs, _like(outs))
                del outs
        self._graph, self._gradient = torch.cuda.CUDAGraph(), None
        with _capturing(self._graph, memory):
            outs = function()
        self._outs, self._grads = [out.detach() for out in outs], _like(outs)
        self._input_grads: list[Tensor | None] = [None] * len(inputs)
        if any(out.requires_grad for out in outs):
            self._gradient = torch.cuda.CUDAGraph()
            with _capturing(self._gradient, memory):
                self._input_grads = gradients(outs, inputs, self._grads)
        with memory.aside():  # let the stream of the caller wait for this one
            pass

    def forward(self) -> Sequence[Tensor]:
        """Replay the function; the next call overwrites its outputs."""
        self._graph.replay()
        return self._outs

    def grads(self) -> Grads:
        """Return the buffers for gradients of the outputs; None for outputs without gradients."""
        return self._grads

    def backward(self) -> Grads:
        """Replay the gradients and return copies."""
        if self._gradient is None:
            return self._input_grads
        self._gradient.replay()
        copies = [None if grad is None else torch.empty_like(grad) for grad in self._input_grads]
        if grads := [grad for grad in self._input_grads if grad is not None]:
            torch._foreach_copy_([copy for copy in copies if copy is not None], grads)
        return copies


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, memory: Memory) -> Iterator[None]:
    """Capture the block; if that fails, restore the generator, and use a new stream."""
    generator = torch.cuda.default_generators[memory.device.index or 0]
    healthy = generator.clone_state()
    done = False
    try:
        # Other threads, such as one that pins batches, may call CUDA meanwhile.
        with torch.cuda.stream(memory.stream), torch.cuda.graph(
            graph, pool=memory.pool, stream=memory.stream, capture_error_mode="thread_local"
        ):  # fmt: skip
            yield
        done = True
    finally:
        if not done:  # generator and pool may stay in the state of a capture
            generator.graphsafe_set_state(healthy)
            memory.renew()


class Replay(torch.autograd.Function):
    """A replay as an autograd function."""

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward pass of an :class:`~pyg_accel.cuda_graphs.entry.Entry`.

        ``tensors`` are the inputs that get gradients.
        """
        outs = call.take(call.recording.forward())
        ctx.call, ctx.token = call, call.memory.begin()
        ctx.save_for_backward(*tensors)  # autograd checks that they are not changed in between
        ctx.set_materialize_grads(False)
        pairs = zip(outs, call.differentiable, strict=True)
        ctx.mark_non_differentiable(*(out for out, has in pairs if not has))
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay the backward pass."""
        if ctx.token.done:
            raise RuntimeError(
                "pyg_accel.graphed: this forward pass was differentiated before, and the memory of "
                "its CUDA graph is no longer what it was; call the model once for each backward()"
            )
        _ = ctx.saved_tensors
        ctx.token.done = True
        ctx.call.give(grads)
        return (None, *ctx.call.trim(ctx.call.recording.backward()))
