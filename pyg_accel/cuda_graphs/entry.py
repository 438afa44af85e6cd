"""One recorded kind of call: its tensors, what goes into them, and what comes out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pyg_accel.cache import TensorRef
from pyg_accel.cuda_graphs.call import Arguments, Modes, State, Uncapturable, flatten, replaced
from pyg_accel.cuda_graphs.capture import Captured, Grads, Memory, Replay
from pyg_accel.cuda_graphs.functions import CONSTANTS, known_largest
from pyg_accel.cuda_graphs.masking import masked
from pyg_accel.cuda_graphs.padding import Layout, Padding, Part, Sizes
from pyg_accel.settings import settings

__all__ = ["Entry"]

_POISON = 64.0  # of padding, in trials: what leaks is seen


@contextmanager
def _of_any_size() -> Iterator[None]:
    """Run kernels on small graphs too: a replay spends none of the host's time that limits save.

    No choice that holds until settings change depends on it, so it is no change of settings.
    """
    before = settings.assigned
    settings.assigned = before | {"always": True}
    try:
        yield
    finally:
        settings.assigned = before


class Entry:
    """Tensors that stay in place, and a function of them that was recorded.

    Attributes:
        layout: how arguments are padded.
        recording: the function.
        memory: of the recording.
        inputs: what gradients are wanted of: tensors in place, then parameters.
        parameters: those of the model that have gradients.
        differentiable: which outputs have gradients.
        full_precision: autocast is off, so that rounding does not hide what padding changes.
        unverified: how many calls are still to be compared with eager ones.
        parts: which parts of tensors the call takes by position.
        cuts: integers, and the axes of which the padded call takes that many first rows.
        lent: what other parts of the package would otherwise forget.
        left: what a call leaves behind, beside its results.
        eager: the least seconds that an eager call took.
        replayed: the least seconds that a replay took.
        cost: the seconds of recording and comparing.
        replays: how many calls were replayed.
    """

    def __init__(
        self, call: Callable[..., Any], state: State, arguments: Arguments, layout: Layout,
        held: Sequence[int], modes: Modes, memory: Memory, *, differentiable: bool,
    ) -> None:  # fmt: skip
        """Allocate the tensors that stay in place."""
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
        self._known = known_largest([tensors[place] for place in held], graphs)
        self._given = [p for p, t in enumerate(tensors) if t.requires_grad and modes.grad]
        self.parameters = [p for p in state.parameters
                           if p.requires_grad and modes.grad and differentiable]  # fmt: skip
        # Autograd's node of a parameter works on the stream on which it was made,
        # so the recording has parameters of its own, in the same memory.
        own = {p: torch.nn.Parameter(p.detach()) for p in self.parameters}
        self._own = [(module, name, p, own[p]) for module in state.modules
                     for name, p in module._parameters.items() if p in own]  # fmt: skip
        self.inputs = [*(self._static[place] for place in self._given), *own.values()]
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
        """What the report says of its replays."""
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
        """Whether arguments are those that are held, as they were, and others can be copied."""
        tensors = arguments.tensors
        return (
            self.layout.takes([t.shape for t in tensors], sizes, slack)
            and all(sizes[number] <= sizes[axis] for number, axis in self.cuts)
            and all(r.fits(tensors[p]) and tensors[p].data_ptr() == a for p, r, a in self._held)
        )

    @property
    def preference(self) -> tuple[int, int]:
        """The smallest one is taken: most tensors that are not copied, then least rows."""
        return -len(self._held), sum(self.layout.bucket.values())

    def load(self, arguments: Arguments, sizes: Sizes) -> None:
        """Copy arguments to where the recording reads them."""
        self._sizes, self._shapes = sizes, [t.shape for t in arguments.tensors]
        given = [arguments.tensors[place] for place in self._copied]
        kept = [self._part(place, self._static[place]) for place in self._copied]
        with torch.no_grad():
            if given:
                torch._foreach_copy_(kept, given, non_blocking=True)
            for axis, count in self._counts.items():
                count.fill_(sizes[axis])

    def _part(self, place: int, padded: Tensor) -> Tensor:
        """Return the real part of a padded argument, or of its gradient."""
        role = self.layout.roles[place]
        if role.kind == "fixed":
            return padded
        return padded.narrow(role.dim, 0, self._shapes[place][role.dim])

    def compute(self) -> list[Tensor]:
        """Run the function on the tensors in place: what is recorded."""
        # What was derived of them in an earlier run, such as a CSR matrix, does not hold in this
        # one: a capture that read it would read it again in replays on other data.
        increment_version([self._static[place] for place in self._copied])
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.modes.grad))
            for module, name, parameter, own in self._own:
                setattr(module, name, own)  # which a recurrent layer takes note of
                stack.callback(setattr, module, name, parameter)
            stack.enter_context(self.autocast())
            stack.enter_context(_of_any_size())
            padding = Padding(self.layout, self._counts, self._poison)
            tensors = padding.fill(self._static)
            for place in set(range(len(tensors))).difference(self._copied):
                tensors[place] = self._static[place]
            args, kwargs = self._arguments.rebuild(tensors, self.layout.numbers)
            more = CONSTANTS | self._known
            with masked(self._modules, padding, self.parts, self.cuts, more):
                value = self._call(*args, **kwargs)
            return [padding.clear(out) for out in flatten(value)]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return what sets the precision; casts that are cached would lie outside of a capture."""
        if self.modes.autocast is None:
            return nullcontext()
        on, device = not self.full_precision, self.memory.device.type
        return torch.autocast(device, self.modes.autocast, enabled=on, cache_enabled=False)

    def poison(self, on: bool) -> None:
        """Let padding be unlike real rows, or like them again."""
        self._poison.fill_(_POISON if on else 1.0)

    def describe(self, value: Any, padded: Sequence[Tensor], has: Sequence[bool]) -> None:
        """Learn from an eager result and the padded one which part of outputs is real.

        Args:
            value: the eager result.
            padded: outputs of the padded call.
            has: which of them have gradients.

        Raises:
            Uncapturable: if they do not go together.
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
        """Copy gradients of the outputs to where the recording reads them."""
        for place, axis, grad in zip(self.recording.grads(), self._crops, grads, strict=True):
            if place is not None and grad is None:
                place.zero_()
            elif place is not None and grad is not None:
                (place if axis is None else place.narrow(0, 0, grad.size(0))).copy_(grad)

    def trim(self, grads: Grads) -> list[Tensor | None]:
        """Return the real part of gradients of the arguments, and those of parameters."""
        pairs = zip(self._given, grads, strict=False)
        given = [grad if grad is None else self._part(place, grad) for place, grad in pairs]
        return [*given, *grads[len(given) :]]

    def __call__(self, arguments: Arguments, sizes: Sizes) -> Any:
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
