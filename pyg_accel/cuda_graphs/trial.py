"""Recording a kind of call, and comparing it with eager ones before anybody relies on it.

Why everything is compared. Nobody can tell from a model's code whether padding changes it or
whether it draws numbers outside of torch. So outputs, gradients of arguments and parameters,
buffers and the state of optimizers are compared: the padded call with the unpadded one before
anything is recorded, and what was recorded with both, once when it is made and once more on the
data of a later call.

Why without randomness. Dropout draws other numbers for padded rows, so unpadded and padded calls
are compared with dropout switched off, and the recording with a padded call that draws
the same numbers. Where results are in half precision, rounding would hide what padding changes, so
autocast is off in the first comparison.

Why with poison. Rows of padding look like real ones, and a mean that counts them is off by little.
In trials they are multiplied by a large factor. If a model cannot work with such numbers, while it
can with others, the comparison is made without.

Why tolerances are relative. Padded calls add up in another order. A rounding error may flip the
sign of one number before a ReLU, which changes a few elements of a gradient and hardly its norm,
so gradients are compared by norms and results by elements.

Why a trial leaves no trace: it runs the user's model several times. Random numbers, buffers,
gradients, parameters of a step and attributes of modules are put back after each of them.

Why it takes the time. The same calls show what a replay saves, the device's work included; see
:mod:`.ledger`. The shortest of two is taken, as the first call of a kind may compile.
"""

import traceback
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.cuda_graphs import call
from pyg_accel.cuda_graphs.call import Arguments, Subject, Uncapturable, flatten
from pyg_accel.cuda_graphs.capture import Captured, Grads, gradients
from pyg_accel.cuda_graphs.entry import Entry
from pyg_accel.cuda_graphs.functions import NOT_RANDOM, Functions
from pyg_accel.cuda_graphs.masking import parts_taken
from pyg_accel.cuda_graphs.padding import Sizes
from pyg_accel.derived import holding
from pyg_accel.facts import expect_to_stay

__all__ = ["examine"]

# What a model may raise when it is called with padding, or captured. Eager execution tells whether
# it is the user's own mistake.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError,
             ArithmeticError, OSError)  # fmt: skip
_HERE = str(Path(__file__).parent)


class _Tolerance(NamedTuple):
    """How far results may be apart that differ in the order of additions.

    Attributes:
        elements: of each element, relative to the largest.
        norm: of all elements of a gradient, relative to its norm.
        floor: of results that are nothing but rounding, relative to these figures and the largest
            result, such as the gradient of a bias before a normalisation.
    """

    elements: float
    norm: float
    floor: float

    @classmethod
    def of(cls, dtypes: Iterable[torch.dtype], precision: str) -> "_Tolerance":
        """Return that of calls with these types among their results."""
        least = min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
        if torch.finfo(least).bits < 32:
            return cls(5e-2, 2e-1, 1e-1)
        if least == torch.float32:  # other precisions multiply matrices in 10 bits
            return cls(5e-4, 2e-2, 1e-2) if precision == "highest" else cls(1e-2, 5e-2, 1e-1)
        return cls(1e-9, 1e-7, 1e-2)

    def exceeded(self, expected: Grads, found: Grads, *, by_norm: bool) -> str:
        """Return where two sequences of tensors differ by more than rounding; empty if nowhere."""
        if len(expected) != len(found):
            return f"s: {len(found)} instead of {len(expected)}"
        relative = self.norm if by_norm else self.elements
        scale = max((_size(t, by_norm) for t in expected if t is not None), default=0.0)
        for i, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one is None or other is None:
                if one is not other:
                    return f" {i} is missing"
            elif one.shape != other.shape or one.dtype != other.dtype:
                return f" {i} is of shape {list(other.shape)} instead of {list(one.shape)}"
            elif not (one.is_floating_point() or one.is_complex()):
                if not torch.equal(one, other):
                    return f" {i} differs"
            elif not torch.equal(one.isfinite(), other.isfinite()):
                return f" {i} is not finite in the same places"
            else:
                off = _size(one - other, by_norm)
                bound = relative * (_size(one, by_norm) + self.floor * scale)
                if off > bound:
                    return f" {i} is off by {off:.2g}, more than {bound:.2g}"
        return ""


def _size(value: Tensor, by_norm: bool) -> float:
    """Return the norm of the finite elements, or the largest."""
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    finite = torch.where(value.isfinite(), value, 0)
    return float(finite.double().norm() if by_norm else finite.abs().max())


class _Evidence(NamedTuple):
    """What a call did."""

    value: Any
    outs: list[Tensor]
    differentiable: list[bool]
    grads: list[Tensor | None]
    state: dict[str, list[Tensor]]

    @property
    def finite(self) -> bool:
        tensors = [t for t in (*self.outs, *self.grads) if t is not None]
        return all(bool(t.isfinite().all()) for t in tensors)


def _cotangents(outs: Sequence[Tensor], differentiable: Sequence[bool]) -> list[Tensor | None]:
    """Return gradients to begin with: the same for the same shapes, and of no structure."""
    numbers = torch.Generator().manual_seed(0)
    made = [torch.randn(out.shape, generator=numbers).to(out.device, out.dtype) for out in outs]
    return [g if has else None for g, has in zip(made, differentiable, strict=True)]


class _Trial:
    """The calls that are compared, all on the same arguments and from the same state."""

    def __init__(self, subject: Subject, entry: Entry, arguments: Arguments, sizes: Sizes) -> None:
        self._subject, self._entry = subject, entry
        self._arguments, self._sizes = arguments, sizes
        self.saved = call.Checkpoint(subject, entry.memory.device)

    def _evidence(
        self, value: Any, outs: Sequence[Tensor], has: Sequence[bool],
        grads: Grads,
    ) -> _Evidence:  # fmt: skip
        state = self._subject.evidence().items()
        found = _Evidence(
            value, [out.detach().clone() for out in outs], list(has),
            [None if g is None else g.clone() for g in grads],
            {name: [t.detach().clone() for t in tensors] for name, tensors in state},
        )  # fmt: skip
        self.saved.restore()
        return found

    def eager(self, mode: Functions | None = None) -> _Evidence:
        """Make the call as the user does; timed, unless in a mode."""
        entry, arguments, now = self._entry, self._arguments, self._entry.memory.now
        tensors = [t.detach().requires_grad_() if t.requires_grad and entry.modes.grad else t
                   for t in arguments.tensors]  # fmt: skip
        args, kwargs = arguments.rebuild(tensors, {})
        start = now()
        with mode or nullcontext(), entry.autocast():
            value = self._subject.call(*args, **kwargs)
        seconds, outs = now() - start, flatten(value)
        has = [out.requires_grad for out in outs]
        by, start = _cotangents(outs, has), now()
        inputs = [t for t, old in zip(tensors, arguments.tensors, strict=True) if t is not old]
        grads = gradients(outs, [*inputs, *entry.parameters], by)
        if mode is None:
            entry.eager = min(entry.eager, seconds + now() - start)
        # A graph of autograd that is alive ties parameters to the stream that it was made on.
        value = call.replaced(value, iter([out.detach() for out in outs]))
        return self._evidence(value, outs, has, grads)

    def padded(self, like: _Evidence, *, still: bool) -> _Evidence:
        """Make the padded call without recording it."""
        entry = self._entry
        with entry.memory.aside():
            with Functions(NOT_RANDOM) if still else nullcontext():
                outs = entry.compute()
            has = [out.requires_grad for out in outs]
            entry.describe(like.value, outs, has)
            parts, by = entry.take(outs), [torch.ones_like(out) for out in outs]
            for whole, part in zip(by, _cotangents(parts, has), strict=True):
                if part is not None:  # ones on padding, where they must not matter
                    (whole[: part.size(0)] if whole.dim() else whole).copy_(part)
            grads = entry.trim(gradients(outs, entry.inputs, by))
            return self._evidence(like.value, parts, has, grads)

    def replayed(self) -> _Evidence:
        """Replay the recording as a call does."""
        entry, now = self._entry, self._entry.memory.now
        start = now()
        entry.load(self._arguments, self._sizes)
        parts = entry.take(entry.recording.forward())
        seconds = now() - start
        by, start = _cotangents(parts, entry.differentiable), now()
        grads: list[Tensor | None] = [None] * len(entry.inputs)
        if any(entry.differentiable):
            entry.give(by)
            grads = entry.trim(entry.recording.backward())
        entry.replayed = min(entry.replayed, seconds + now() - start)
        return self._evidence(None, parts, entry.differentiable, grads)

    def check(self, what: str, expected: _Evidence, found: _Evidence) -> None:
        """Raise Uncapturable where a call did something else."""
        modes = self._entry.modes
        dtypes = [out.dtype for out in expected.outs if out.is_floating_point()]
        if modes.autocast is not None and not self._entry.full_precision:
            dtypes.append(modes.autocast)
        allowed = _Tolerance.of(dtypes, modes.precision)
        pairs: dict[str, tuple[Grads, Grads]] = {
            "output": (expected.outs, found.outs), "gradient": (expected.grads, found.grads),
            **{n: (tensors, found.state[n]) for n, tensors in expected.state.items()},
        }  # fmt: skip
        for name, (one, other) in pairs.items():
            by_norm = name not in ("output", "buffer")  # that of an optimizer is made of gradients
            if wrong := allowed.exceeded(one, other, by_norm=by_norm):
                raise Uncapturable(f"{what}: {name}{wrong}")

    def run(self, recorder: type[Captured] | None) -> None:
        """Compare eager calls, padded ones and the recording, which a recorder makes if given."""
        entry, layout = self._entry, self._entry.layout
        entry.load(self._arguments, self._sizes)
        expected = self.eager()
        if layout.bucket:
            halves = (torch.half, torch.bfloat16)
            entry.full_precision = all(t.dtype not in halves for t in self._arguments.tensors)
            with parts_taken() as parts:
                plain = self.eager(Functions(NOT_RANDOM))
            entry.parts = layout.parts(parts, self._sizes)
            for poison in (True, False):
                entry.poison(poison)
                padded = self.padded(plain, still=True)
                if not poison or padded.finite or not plain.finite:
                    self.check("padding changes the result", plain, padded)
                    break  # else these numbers are too large for the model, which says nothing
            entry.poison(False)
            entry.full_precision = False
            expected = self.padded(plain, still=False)
        elif recorder is not None:
            entry.describe(expected.value, expected.outs, expected.differentiable)
        if recorder is not None:
            self._record(recorder)
        self.check("captured, it computes something else", expected, self.replayed())

    def _record(self, recorder: type[Captured]) -> None:
        subject, entry, before = self._subject, self._entry, call.State(self._subject)
        subject.prepare()
        with entry.memory.aside():
            entry.compute()
        if changed := before.changed():
            raise Uncapturable(f"its forward pass changes {', '.join(changed)}")
        self.saved.restore()
        subject.prepare()
        entry.recording = recorder(entry.compute, entry.inputs, entry.memory)
        entry.left = subject.recorded() if recorder.repeats else None
        self.saved.restore()


def examine(
    subject: Subject, entry: Entry, arguments: Arguments, sizes: Sizes,
    recorder: type[Captured] | None = None,
) -> None:  # fmt: skip
    """Compare a recording with eager calls on the same arguments, as if nothing had happened.

    Args:
        subject: model or step.
        entry: with its recording, unless ``recorder`` makes it.
        arguments: of the call.
        sizes: of the call.
        recorder: records, after all that could be found wrong before has been.

    Raises:
        Uncapturable: where they differ, or with the reason why the call stays eager.
    """
    trial = _Trial(subject, entry, arguments, sizes)
    # A graph that is held is the graph of every replay: its long rows are worth knowing.
    known = expect_to_stay() if recorder is not None and not entry.layout.bucket else nullcontext()
    try:
        with holding() as lent, known:
            trial.run(recorder)
        entry.lent = entry.lent or lent
    except (torch.OutOfMemoryError, Uncapturable):
        raise
    except _FAILURES as error:
        raise Uncapturable(_first_cause(error)) from error
    finally:
        trial.saved.restore()
        entry.full_precision = False
        entry.poison(False)
    entry.unverified -= 1


def _first_cause(error: BaseException) -> str:
    """Return what went wrong first, in a line: the end of a failed capture raises too."""
    while error.__context__ is not None and not isinstance(error, Uncapturable):
        error = error.__context__
    if isinstance(error, Uncapturable):
        return str(error)
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if "stream is capturing" in what:
        what = "it waits for the device, which no CUDA graph can"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    theirs = [f for f in frames if _HERE not in f.filename]
    return f"{what} ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else what
