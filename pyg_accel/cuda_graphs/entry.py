"""A recording of a kind of call: its static tensors, and copying to and from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pyg_accel.cuda_graphs.call import Arguments, Modes, State, Uncapturable, flatten, replaced
from pyg_accel.cuda_graphs.capture import Captured, Grads, Memory, Replay
from pyg_accel.cuda_graphs.functions import CONSTANTS, constant_maxima
from pyg_accel.cuda_graphs.masking import masked
from pyg_accel.cuda_graphs.padding import Layout, Padding, Part, Sizes
from pyg_accel.runtime.cache import TensorRef
from pyg_accel.settings import settings

__all__ = ["Entry"]

_POISON = 64.0  # factor on padding in trials, so that a leak shows


@contextmanager
def _of_any_size() -> Iterator[None]:
    """Run kernels on small graphs too: replays take no host time, which size limits save."""
    # Assigned directly: stored choices need not follow this change of settings.
    before = settings.assigned
    settings.assigned = before | {"always": True}
    try:
        yield
    finally:
        settings.assigned = before


class Entry:
    """Static tensors, and the recording of a function that reads them.

    Attributes:
        layout: how arguments are padded.
        recording: the function.
        memory: of the recording.
        inputs: tensors that get gradients: static tensors, then parameters.
        parameters: parameters of the model with gradients.
        differentiable: whether each output has gradients.
        full_precision: whether autocast is off: its rounding would hide effects of padding.
        unverified: number of calls still to compare with eager calls.
        parts: the slices of tensors that the call may take.
        cuts: integers, and the axes whose first rows they count.
        lent: objects that the recording reads, and that caches would otherwise drop.
        left: assignments of a call besides its results.
        eager: seconds of the fastest eager call.
        replayed: seconds of the fastest replay.
        cost: seconds of recording and comparing.
        replays: number of replayed calls.
    """

    def __init__(
        self, call: Callable[..., Any], state: State, arguments: Arguments, layout: Layout,
        held: Sequence[int], modes: Modes, memory: Memory, *, differentiable: bool,
    ) -> None:  # fmt: skip
        """Allocate the static tensors."""
        self.layout, self.memory, self.modes = layout, memory, modes
        self._call, self._modules = call, state.modules
        tensors, device = arguments.tensors, memory.device
        self._held = [(p, TensorRef(tensors[p]), tensors[p].data_ptr()) for p in held]
        self._copied = [place for place in range(len(tensors)) if place not in held]
        with torch.inference_mode(False):
            self._static = [self._place(p, t, p in held) for p, t in enumerate(tensors)]
            counts = torch.zeros(len(layout.bucket), dtype=torch.long, device=device)
            self._counts = dict(zip(layout.bucket, counts, strict=True))
            self._poison = torch.ones((), device=device)
        pairs = zip(self._static, layout.roles, strict=True)
        graphs = [(t, layout.numbers["graphs"] - 1) for t, r in pairs if r == ("fixed", "graphs")]
        self._arguments = arguments.over(self._static)
        self._maxima = constant_maxima([tensors[place] for place in held], graphs)
        self._differentiated = [p for p, t in enumerate(tensors) if t.requires_grad and modes.grad]
        self.parameters = [p for p in state.parameters
                           if p.requires_grad and modes.grad and differentiable]  # fmt: skip
        # Autograd accumulates the gradient of a parameter on the stream where the parameter was
        # first used, so the recording has separate parameters in the same memory.
        own = {p: torch.nn.Parameter(p.detach()) for p in self.parameters}
        self._own = [(module, name, p, own[p]) for module in state.modules
                     for name, p in module._parameters.items() if p in own]  # fmt: skip
        self.inputs = [*(self._static[place] for place in self._differentiated), *own.values()]
        self.recording: Captured
        self.differentiable: list[bool] = []
        self._crops: list[str | None] = []
        self._template: Any = None
        self._sizes: Sizes = {}
        self._shapes: Sequence[torch.Size] = ()
        self.unverified, self.full_precision = 2, False
        self.parts: set[Part] = set()
        self.cuts: set[tuple[str, str]] = set()
        self.lent: list[Any] = []
        self.left: Any = None
        self.eager = self.replayed = torch.inf
        self.cost, self.replays = 0.0, 0

    @property
    def formula(self) -> str:
        """The description in the report."""
        sizes = ", ".join(f"{most} {axis}" for axis, most in self.layout.bucket.items())
        return f"replayed: up to {sizes}" if sizes else "replayed: fixed sizes"

    @property
    def saves(self) -> float:
        """Seconds that a replay saves; negative if it takes longer than an eager call."""
        return self.eager - self.replayed if self.recording.repeats else 0.0

    def _place(self, place: int, tensor: Tensor, held: bool) -> Tensor:
        if held:
            return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
        static = torch.zeros(self.layout.shapes[place], dtype=tensor.dtype, device=tensor.device)
        return static.requires_grad_(tensor.requires_grad)

    def takes(self, arguments: Arguments, sizes: Sizes, slack: float | None) -> bool:
        """Whether held arguments are the same tensors, and the others fit the static ones."""
        tensors = arguments.tensors
        return (
            self.layout.takes([t.shape for t in tensors], sizes, slack)
            and all(sizes[number] <= sizes[axis] for number, axis in self.cuts)
            and all(r.fits(tensors[p]) and tensors[p].data_ptr() == a for p, r, a in self._held)
        )

    @property
    def preference(self) -> tuple[int, int]:
        """A sort key: first the most tensors that need no copy, then the fewest rows."""
        return -len(self._held), sum(self.layout.bucket.values())

    def load(self, arguments: Arguments, sizes: Sizes) -> None:
        """Copy arguments to the static tensors."""
        self._sizes, self._shapes = sizes, [t.shape for t in arguments.tensors]
        sources = [arguments.tensors[place] for place in self._copied]
        targets = [self._part(place, self._static[place]) for place in self._copied]
        with torch.no_grad():
            if sources:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            for axis, count in self._counts.items():
                count.fill_(sizes[axis])

    def _part(self, place: int, padded: Tensor) -> Tensor:
        """Return the real part of a padded argument, or of its gradient."""
        role = self.layout.roles[place]
        if role.kind == "fixed":
            return padded
        return padded.narrow(role.dim, 0, self._shapes[place][role.dim])

    def compute(self) -> list[Tensor]:
        """Run the function on the static tensors, for the recording."""
        # Invalidate cached values that earlier runs derived from them, such as a CSR matrix: the
        # capture must compute them, as replays have other data.
        increment_version([self._static[place] for place in self._copied])
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.modes.grad))
            for module, name, parameter, own in self._own:
                setattr(module, name, own)  # recurrent layers watch assignments
                stack.callback(setattr, module, name, parameter)
            stack.enter_context(self.autocast())
            stack.enter_context(_of_any_size())
            padding = Padding(self.layout, self._counts, self._poison)
            static = padding.fill(self._static)
            args, kwargs = self._arguments.rebuild(static, self.layout.numbers)
            handlers = CONSTANTS | self._maxima
            with masked(self._modules, padding, self.parts, self.cuts, handlers):
                value = self._call(*args, **kwargs)
            return [padding.clear(out) for out in flatten(value)]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast of the call without its cache, which captures must not use."""
        if self.modes.autocast is None:
            return nullcontext()
        on, device = not self.full_precision, self.memory.device.type
        return torch.autocast(device, self.modes.autocast, enabled=on, cache_enabled=False)

    def poison(self, on: bool) -> None:
        """Switch the factor on padding on or off."""
        self._poison.fill_(_POISON if on else 1.0)

    def describe(self, value: Any, padded: Sequence[Tensor], has: Sequence[bool]) -> None:
        """Derive the real part of each output from an eager result and the padded one.

        Args:
            value: the eager result.
            padded: outputs of the padded call.
            has: whether each of them has gradients.

        Raises:
            Uncapturable: if their shapes do not correspond.
        """
        outs = flatten(value)
        if len(outs) != len(padded):
            raise Uncapturable("it returns another number of tensors when padded")
        axes = {number: axis for axis, number in self.layout.rows.items()}
        self._crops = [axes.get(wide.size(0)) if wide.dim() else None for wide in padded]
        for out, wide, axis in zip(outs, padded, self._crops, strict=True):
            shape = wide.shape if axis is None else (self._sizes[axis], *wide.shape[1:])
            if tuple(shape) != tuple(out.shape):
                sizes = f"{list(out.shape)}, which is {list(wide.shape)} with padding"
                raise Uncapturable(f"it returns {sizes}")
        self.differentiable = list(has)
        self._template = replaced(value, iter([torch.empty(0) for _ in outs]))

    def take(self, outs: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the real part of outputs."""
        pairs = zip(outs, self._crops, strict=True)
        return [(t if a is None else t.narrow(0, 0, self._sizes[a])).clone() for t, a in pairs]

    def give(self, grads: Grads) -> None:
        """Copy gradients of the outputs to the buffers of the recording."""
        for static, axis, grad in zip(self.recording.grads(), self._crops, grads, strict=True):
            if static is not None and grad is None:
                static.zero_()
            elif static is not None and grad is not None:
                (static if axis is None else static.narrow(0, 0, grad.size(0))).copy_(grad)

    def trim(self, grads: Grads) -> list[Tensor | None]:
        """Return the real part of gradients of arguments, and the gradients of parameters."""
        pairs = zip(self._differentiated, grads, strict=False)
        trimmed = [grad if grad is None else self._part(place, grad) for place, grad in pairs]
        return [*trimmed, *grads[len(trimmed) :]]

    def __call__(self, arguments: Arguments, sizes: Sizes) -> Any:
        """Make a call."""
        self.load(arguments, sizes)
        outs: Sequence[Tensor]
        if any(self.differentiable):
            inputs = [arguments.tensors[place] for place in self._differentiated]
            outs = Replay.apply(self, *inputs, *self.parameters)  # type: ignore[no-untyped-call]
        else:
            outs = self.take(self.recording.forward())
        self.replays += 1
        return replaced(self._template, iter(outs))
