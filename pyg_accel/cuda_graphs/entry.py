"""One recorded kind of call: its tensors, what goes into them, and what comes out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyg_accel.cache import version_of
from pyg_accel.cuda_graphs.call import (
    Arguments,
    Modes,
    ModuleState,
    Uncapturable,
    flatten,
    replaced,
)
from pyg_accel.cuda_graphs.capture import Captured, Memory, Replay, Uncaptured
from pyg_accel.cuda_graphs.functions import CONSTANTS, Functions, known_largest
from pyg_accel.cuda_graphs.masking import masked
from pyg_accel.cuda_graphs.padding import Layout, Padding, Part
from pyg_accel.settings import settings

__all__ = ["Entry"]

_POISON = 64.0  # of padding, in trials: what leaks is seen


@contextmanager
def _of_any_size() -> Iterator[None]:
    """Run kernels on small graphs too: a replay spends none of the host's time that limits save.

    No choice that holds until settings change depends on it, so it is no change of settings.
    """
    before = dict(settings.assigned)
    settings.assigned["always"] = True
    try:
        yield
    finally:
        settings.assigned.clear()
        settings.assigned.update(before)


class Entry:
    """Tensors that stay in place, and a function of them that was recorded.

    Attributes:
        layout: how arguments are padded; None if they are taken as they are.
        recording: the function.
        memory: of the recording.
        inputs: what gradients are wanted of: tensors in place, then parameters.
        differentiable: which outputs have gradients.
        full_precision: autocast is off, so that rounding does not hide what padding changes.
        unverified: how many calls are still to be compared with eager ones.
        parts: which parts of tensors the call takes by position, without padding.
        cuts: integers, and the axes of which the padded call takes that many first rows.
        lent: what other parts of the package would otherwise forget.
        left: what a call leaves behind, beside its results.
        eager: the least seconds that an eager call took.
        replayed: the least seconds that a replay took.
        cost: the seconds of recording and comparing.
        replays: how many calls were replayed.
    """

    def __init__(
        self, call: Callable[..., Any], state: ModuleState, arguments: Arguments,
        layout: Layout | None, held: Sequence[int], modes: Modes, memory: Memory,
        *, differentiable: bool,
    ) -> None:  # fmt: skip
        """Allocate the tensors that stay in place."""
        self.layout, self.memory, self.modes = layout, memory, modes
        self._call, self._modules, self._arguments = call, state.modules, arguments
        tensors, self._numbers = arguments.tensors, arguments.numbers
        self._held = [
            (place, tensors[place], version_of(tensors[place]), tensors[place].data_ptr())
            for place in held
        ]
        self._shapes = [t.shape for t in tensors]
        self._copied = [place for place in range(len(tensors)) if place not in held]
        device = memory.device
        with torch.inference_mode(False):
            self._static = [self._place(p, t, p in held) for p, t in enumerate(tensors)]
            axes = [] if layout is None else list(layout.bucket)
            self._counts = dict(
                zip(axes, torch.zeros(len(axes), dtype=torch.long, device=device), strict=True)
            )
            self._poison = torch.ones((), device=device)
        self._known = known_largest([tensor for _, tensor, _, _ in self._held])
        self._given = [p for p, t in enumerate(tensors) if t.requires_grad and modes.grad]
        wanted = [p for p in state.parameters if p.requires_grad and modes.grad and differentiable]
        # Autograd's node of a parameter works on the stream on which it was made,
        # so the recording has parameters of its own, in the same memory.
        own = {p: torch.nn.Parameter(p.detach()) for p in wanted}
        self._own = [(module, name, p, own[p]) for module in state.modules
                     for name, p in module._parameters.items() if p in own]  # fmt: skip
        self.parameters = wanted
        self.inputs = [*(self._static[place] for place in self._given), *own.values()]
        self.recording: Uncaptured
        self.differentiable: list[bool] = []
        self._crops: list[str | None] = []
        self._template: Any = None
        self._sizes: Mapping[str, int] = {}
        self._shapes_now = self._shapes
        self.unverified, self.full_precision = 2, False
        self.parts: set[Part] = set()
        self.cuts: set[tuple[str, str]] = set()
        self.lent: list[Any] = []
        self.left: Any = None
        self.eager = self.replayed = torch.inf
        self.cost, self.replays = 0.0, 0

    @property
    def formula(self) -> str:
        """What the report says of its replays."""
        if self.layout is None:
            return "replayed: fixed sizes"
        sizes = ", ".join(f"{most} {axis}" for axis, most in self.layout.bucket.items())
        return f"replayed: up to {sizes}"

    @property
    def rows(self) -> int:
        """The rows of all axes of its bucket."""
        return sum(self.layout.bucket.values()) if self.layout else 0

    @property
    def saves(self) -> float:
        """Seconds that a replay saves; negative if it takes longer than an eager call."""
        return self.eager - self.replayed if self.recording.timed else 0.0

    @property
    def holds(self) -> int:
        """How many arguments must be the very tensors that they were."""
        return len(self._held)

    def _place(self, place: int, tensor: Tensor, held: bool) -> Tensor:
        if held:
            return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
        shape = tensor.shape if self.layout is None else self.layout.shapes[place]
        static = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        return static.requires_grad_(tensor.requires_grad)

    def fits(self, arguments: Arguments) -> bool:
        """Whether these arguments are those that are held, as they were, or can be copied."""
        return (
            self.layout is None
            and [t.shape for t in arguments.tensors] == self._shapes
            and arguments.numbers == self._numbers
            and all(
                arguments.tensors[place] is tensor
                and version_of(tensor) == version
                and tensor.data_ptr() == address
                for place, tensor, version, address in self._held
            )
        )

    def takes(self, arguments: Arguments, sizes: Mapping[str, int], slack: float | None) -> bool:
        """Whether these arguments can be padded to the bucket."""
        shapes = [t.shape for t in arguments.tensors]
        return (
            self.layout is not None
            and self.layout.takes(shapes, sizes, slack)
            and all(sizes[number] <= sizes[axis] for number, axis in self.cuts)
        )

    def load(self, arguments: Arguments, sizes: Mapping[str, int]) -> None:
        """Copy arguments to where the recording reads them."""
        self._sizes, self._shapes_now = sizes, [t.shape for t in arguments.tensors]
        given = [arguments.tensors[place] for place in self._copied]
        kept = [self._part(place, self._static[place]) for place in self._copied]
        with torch.no_grad():
            if given:
                torch._foreach_copy_(kept, given, non_blocking=True)
            for axis, count in self._counts.items():
                count.fill_(sizes[axis])

    def _part(self, place: int, padded: Tensor) -> Tensor:
        """Return the real part of a padded argument, or of its gradient."""
        layout = self.layout
        return padded if layout is None else layout.part(place, padded, self._shapes_now[place])

    def compute(self) -> list[Tensor]:
        """Run the function on the tensors in place: what is recorded."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.modes.grad))
            for module, name, parameter, own in self._own:
                setattr(module, name, own)  # which a recurrent layer takes note of
                stack.callback(setattr, module, name, parameter)
            stack.enter_context(self.autocast())
            stack.enter_context(_of_any_size())
            if self.layout is None:
                tensors = [
                    t if p not in self._copied else t.view_as(t) if t.requires_grad else t.detach()
                    for p, t in enumerate(self._static)
                ]
                args, kwargs = self._arguments.rebuild(tensors, {})
                stack.enter_context(Functions(CONSTANTS | self._known))
                return flatten(self._call(*args, **kwargs))
            padding = Padding(self.layout, self._counts, self._poison)
            tensors = padding.fill(self._static)
            args, kwargs = self._arguments.rebuild(tensors, self.layout.numbers)
            with masked(self._modules, padding, self.parts, self.cuts, CONSTANTS):
                value = self._call(*args, **kwargs)
            return [padding.clear(out) for out in flatten(value)]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return what sets the precision; casts that are cached would lie outside of a capture."""
        if self.modes.autocast is None:
            return nullcontext()
        on = not self.full_precision
        device = self.memory.device.type
        return torch.autocast(device, self.modes.autocast, enabled=on, cache_enabled=False)

    def poison(self, on: bool) -> None:
        """Let padding be unlike real rows, or like them again."""
        self._poison.fill_(_POISON if on else 1.0)

    def describe(
        self, value: Any, padded: Sequence[Tensor], differentiable: Sequence[bool],
        sizes: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Learn from an eager result and the padded one which part of outputs is real.

        Raises:
            Uncapturable: if they do not go together.
        """
        outs = flatten(value)
        if len(outs) != len(padded):
            raise Uncapturable("it returns another number of tensors when padded")
        rows = {} if self.layout is None else self.layout.rows
        axes = {number: axis for axis, number in rows.items()}
        self._crops = []
        for out, wide in zip(outs, padded, strict=True):
            axis = axes.get(wide.size(0)) if wide.dim() else None
            expected = wide.shape if axis is None else (sizes[axis], *wide.shape[1:])
            if tuple(expected) != tuple(out.shape):
                raise Uncapturable(
                    f"it returns {list(out.shape)}, which is {list(wide.shape)} with padding"
                )
            self._crops.append(axis)
        self.differentiable = list(differentiable)
        self._template = replaced(value, iter([torch.empty(0) for _ in outs]))

    def take(self, outs: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the real part of outputs."""
        return [
            (out if axis is None else out.narrow(0, 0, self._sizes[axis])).clone()
            for out, axis in zip(outs, self._crops, strict=True)
        ]

    def give(self, grads: Sequence[Tensor | None]) -> None:
        """Copy gradients of the outputs to where the recording reads them."""
        for place, axis, grad in zip(self.recording.grads(), self._crops, grads, strict=True):
            if place is None:
                continue
            if grad is None:
                place.zero_()
            else:
                (place if axis is None else place.narrow(0, 0, grad.size(0))).copy_(grad)

    def trim(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the real part of gradients of the arguments, and those of parameters."""
        given = [g if g is None else self._part(p, g)
                 for p, g in zip(self._given, grads, strict=False)]  # fmt: skip
        return [*given, *grads[len(given) :]]

    def __call__(self, arguments: Arguments, sizes: Mapping[str, int]) -> Any:
        """Make a call."""
        self.load(arguments, sizes)
        outs: Sequence[Tensor]
        if any(self.differentiable):
            given = [arguments.tensors[place] for place in self._given]
            outs = Replay.apply(self, *given, *self.parameters)  # type: ignore[no-untyped-call]
        else:
            outs = self.take(self.recording.forward())
        self.replays += 1
        return replaced(self._template, iter(outs))

    def settle(self) -> None:
        """Count a comparison; after the last one, let go of the arguments that it was made with."""
        self.unverified -= 1
        if not self.unverified and isinstance(self.recording, Captured):
            del self._arguments
