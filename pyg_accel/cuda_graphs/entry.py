"""One recorded kind of call: its tensors, what goes into them, and what comes out."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_accel.cache import version_of
from pyg_accel.cuda_graphs.capture import Memory, Recording, Replay, Uncaptured
from pyg_accel.cuda_graphs.inputs import Arguments, Uncapturable, flatten, replaced
from pyg_accel.cuda_graphs.masked import Constants, Known, Masked, masked_modules
from pyg_accel.cuda_graphs.padding import Layout, Padding
from pyg_accel.cuda_graphs.parts import Part, SameParts
from pyg_accel.cuda_graphs.self_loops import SelfLoops

__all__ = ["Entry", "Modes"]

_POISON = 64.0  # of padding, in trials: what leaks is seen


@dataclass(frozen=True)
class Modes:
    """What decides, beside its arguments, how torch makes a call."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    precision: str
    deterministic: bool

    @classmethod
    def now(cls, device: str) -> "Modes":
        """Return those in force."""
        on = torch.is_autocast_enabled(device)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(device) if on else None,
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )


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
        lent: what other parts of the package would otherwise forget.
        left: what a call leaves behind, beside its results.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        modules: Sequence[torch.nn.Module],
        parameters: Sequence[Tensor],
        arguments: Arguments,
        layout: Layout | None,
        held: Sequence[int],
        modes: Modes,
        memory: Memory,
    ) -> None:
        """Allocate the tensors that stay in place; :meth:`record` comes next."""
        self.layout, self.memory, self.modes = layout, memory, modes
        self._call, self._modules, self._arguments = call, modules, arguments
        self._held = [
            (place, arguments.tensors[place], version_of(arguments.tensors[place]),
             arguments.tensors[place].data_ptr()) for place in held
        ]  # fmt: skip
        self._shapes = tuple(t.shape for t in arguments.tensors)
        with torch.inference_mode(False):
            self._static = [
                self._place(place, tensor, place in held)
                for place, tensor in enumerate(arguments.tensors)
            ]
            self._copied = [p for p in range(len(self._static)) if p not in held]
            device = memory.device
            axes = [] if layout is None else list(layout.bucket)
            counts = torch.zeros(len(axes), dtype=torch.long, device=device)
            self._counts = {axis: counts[i] for i, axis in enumerate(axes)}
            self._poison = torch.ones((), device=device)
        self._known = [
            (t, int(t.max()))
            for _, t, _, _ in self._held
            if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool) and t.numel()
        ]
        self._given = [p for p, t in enumerate(arguments.tensors) if t.requires_grad and modes.grad]
        self.inputs = [self._static[place] for place in self._given]
        self.parameters = [p for p in parameters if p.requires_grad] if modes.grad else []
        # Autograd's node of a parameter works on the stream on which it was made,
        # so the recording has parameters of its own, in the same memory.
        own = {p: torch.nn.Parameter(p.detach()) for p in self.parameters}
        self._own = [
            (module, name, p, own[p])
            for module in modules
            for name, p in module._parameters.items()
            if p in own
        ]
        self.inputs += own.values()
        self.recording: Recording
        self.differentiable: list[bool] = []
        self._crops: list[str | None] = []
        self._template: Any = None
        self._sizes: Mapping[str, int] = {}
        self._shapes_now: dict[int, torch.Size] = {}
        self.unverified = 2
        self.full_precision = False
        self.parts: set[Part] = set()
        self.lent: list[Any] = []
        self.left: Any = None

    @property
    def formula(self) -> str:
        """What the report says of its replays."""
        if self.layout is None:
            return "replayed: fixed sizes"
        sizes = ", ".join(f"{most} {axis}" for axis, most in self.layout.bucket.items())
        return f"replayed: up to {sizes}"

    def _place(self, place: int, tensor: Tensor, held: bool) -> Tensor:
        if held:
            return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
        shape = tensor.shape if self.layout is None else self.layout.shapes[place]
        static = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        return static.requires_grad_(tensor.requires_grad)

    def fits(self, arguments: Arguments) -> bool:
        """Whether these arguments are those that are held, as they were, or can be copied."""
        if self.layout is None and tuple(t.shape for t in arguments.tensors) != self._shapes:
            return False
        return all(
            arguments.tensors[place] is tensor
            and version_of(tensor) == version
            and tensor.data_ptr() == address
            for place, tensor, version, address in self._held
        )

    @property
    def holds(self) -> int:
        """How many arguments must be the very tensors that they were."""
        return len(self._held)

    def load(self, arguments: Arguments, sizes: Mapping[str, int]) -> None:
        """Copy arguments to where the recording reads them."""
        self._sizes = sizes
        if self._given:
            self._shapes_now = {place: arguments.tensors[place].shape for place in self._given}
        given, kept = [], []
        for place in self._copied:
            tensor, static = arguments.tensors[place], self._static[place]
            if self.layout is not None:
                static = self.layout.part(place, static, tensor.shape)
            given.append(tensor)
            kept.append(static)
        with torch.no_grad():
            if given:
                torch._foreach_copy_(kept, given, non_blocking=True)
            for axis, count in self._counts.items():
                count.fill_(sizes[axis])

    def compute(self) -> list[Tensor]:
        """Run the function on the tensors in place: what is recorded."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.modes.grad))
            for module, name, parameter, own in self._own:
                setattr(module, name, own)  # which a recurrent layer takes note of
                stack.callback(setattr, module, name, parameter)
            stack.enter_context(self.autocast())
            stack.enter_context(Constants())
            if self.layout is None:
                tensors = [
                    t if p not in self._copied else t.view_as(t) if t.requires_grad else t.detach()
                    for p, t in enumerate(self._static)
                ]
                args, kwargs = self._arguments.rebuild(tensors, {})
                stack.enter_context(Known(self._known))
                return flatten(self._call(*args, **kwargs))
            padding = Padding(self.layout, self._counts, self._poison)
            tensors = padding.fill(self._static)
            args, kwargs = self._arguments.rebuild(tensors, self.layout.numbers)
            with (
                masked_modules(self._modules, padding),
                SelfLoops(padding),
                Masked(padding),
                SameParts(self.parts, self.layout.rows.values()),
            ):
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
        self,
        value: Any,
        padded: Sequence[Tensor],
        differentiable: Sequence[bool],
        sizes: Mapping[str, int],
    ) -> None:
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
        found = list(grads)
        for i, place in enumerate(self._given):
            grad = found[i]
            if self.layout is not None and grad is not None:
                found[i] = self.layout.part(place, grad, self._shapes_now[place])
        return found

    def __call__(self, arguments: Arguments, sizes: Mapping[str, int]) -> Any:
        """Make a call."""
        self.load(arguments, sizes)
        outs: Sequence[Tensor]
        if any(self.differentiable):
            given = [arguments.tensors[place] for place in self._given]
            outs = Replay.apply(self, *given, *self.parameters)  # type: ignore[no-untyped-call]
        else:
            outs = self.take(self.recording.forward())
        return replaced(self._template, iter(outs))

    def settle(self) -> None:
        """Count a comparison; after the last one, let go of the arguments that it was made with."""
        self.unverified -= 1
        if not self.unverified and not isinstance(self.recording, Uncaptured):
            del self._arguments
