"""Records a kind of call, and compares the recording with eager calls before it is used.

Why everything is compared. The code of a model does not tell whether padding changes its results,
or whether it draws random numbers outside of torch. So outputs, gradients of arguments and
parameters, buffers and the state of optimizers are compared: the padded call with the unpadded call
before the recording, and the recording with both, at once and again on the data of a later call.

Why without randomness. Dropout draws other numbers for padded rows, so unpadded and padded calls
are compared without dropout, and the recording with a padded call that draws the same numbers. In
half precision rounding would hide effects of padding, so autocast is off in the first comparison.

Why with poison. Rows of padding resemble real rows, and a mean that counts them is hardly wrong. In
trials they are multiplied by a large factor. If the results are not finite then, the comparison is
repeated without the factor.

Why tolerances are relative. Padded calls add up in another order. A rounding error may flip the
sign of one number before a ReLU, which changes a few elements of a gradient and hardly its norm,
so gradients are compared by norms and results by elements.

Why state is restored. A trial runs the user's model several times. Random number generators,
buffers, gradients, parameters of a step and attributes of modules are restored after each run.

Why trials are timed. They measure the time that a replay saves, with the work of the device; see
:mod:`.ledger`. The shorter of two times counts, as the first call of a kind may compile.
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
from pyg_accel.graph.derived import holding
from pyg_accel.graph.facts import expect_to_stay

__all__ = ["examine"]

# Errors that padding or a capture may cause in a model. The eager call that follows raises errors
# of the user again.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError,
             ArithmeticError, OSError)  # fmt: skip
_HERE = str(Path(__file__).parent)


class _Tolerance(NamedTuple):
    """The tolerance for results of sums in another order.

    Attributes:
        elements: bound of each element, relative to the largest.
        norm: bound of a gradient, relative to its norm.
        floor: the share of the largest result to add to the size of each: some results consist of
            rounding errors only, such as the gradient of a bias before a normalisation.
    """

    elements: float
    norm: float
    floor: float

    @classmethod
    def of(cls, dtypes: Iterable[torch.dtype], precision: str) -> "_Tolerance":
        """Return the tolerance for results of these dtypes."""
        least = min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
        if torch.finfo(least).bits < 32:
            return cls(5e-2, 2e-1, 1e-1)
        if least == torch.float32:  # others multiply with a 10-bit mantissa
            return cls(5e-4, 2e-2, 1e-2) if precision == "highest" else cls(1e-2, 5e-2, 1e-1)
        return cls(1e-9, 1e-7, 1e-2)

    def exceeded(self, expected: Grads, actual: Grads, *, by_norm: bool) -> str:
        """Return how two sequences of tensors differ by more than rounding, or an empty string."""
        if len(expected) != len(actual):
            return f"s: {len(actual)} instead of {len(expected)}"
        relative = self.norm if by_norm else self.elements
        scale = max((_size(t, by_norm) for t in expected if t is not None), default=0.0)
        for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
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
                error = _size(one - other, by_norm)
                bound = relative * (_size(one, by_norm) + self.floor * scale)
                if error > bound:
                    return f" {i} is off by {error:.2g}, more than {bound:.2g}"
        return ""


def _size(value: Tensor, by_norm: bool) -> float:
    """Return the norm of the finite elements, or the largest."""
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    finite = torch.where(value.isfinite(), value, 0)
    return float(finite.double().norm() if by_norm else finite.abs().max())


class _Evidence(NamedTuple):
    """The results of a call, and the state that it changed."""

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
    """Return random gradients of outputs, the same for the same shapes."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in outs]
    return [g if has else None for g, has in zip(grads, differentiable, strict=True)]


class _Trial:
    """Compared calls with the same arguments and initial state."""

    def __init__(self, subject: Subject, entry: Entry, arguments: Arguments, sizes: Sizes) -> None:
        self._subject, self._entry = subject, entry
        self._arguments, self._sizes = arguments, sizes
        self.saved = call.Checkpoint(subject, entry.memory.device)

    def _evidence(
        self, value: Any, outs: Sequence[Tensor], has: Sequence[bool], grads: Grads
    ) -> _Evidence:
        state = self._subject.evidence().items()
        evidence = _Evidence(
            value, [out.detach().clone() for out in outs], list(has),
            [None if g is None else g.clone() for g in grads],
            {name: [t.detach().clone() for t in tensors] for name, tensors in state},
        )  # fmt: skip
        self.saved.restore()
        return evidence

    def eager(self, mode: Functions | None = None) -> _Evidence:
        """Make the call eagerly; time it if there is no mode."""
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
        # An autograd graph that is alive ties parameters to its stream: keep no reference to it.
        value = call.replaced(value, iter([out.detach() for out in outs]))
        return self._evidence(value, outs, has, grads)

    def padded(self, like: _Evidence, *, dropout: bool) -> _Evidence:
        """Make the padded call without recording it."""
        entry = self._entry
        with entry.memory.aside():
            with nullcontext() if dropout else Functions(NOT_RANDOM):
                outs = entry.compute()
            has = [out.requires_grad for out in outs]
            entry.describe(like.value, outs, has)
            parts, by = entry.take(outs), [torch.ones_like(out) for out in outs]
            for whole, part in zip(by, _cotangents(parts, has), strict=True):
                if part is not None:  # the gradient of padding stays 1, which must not matter
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

    def check(self, what: str, expected: _Evidence, actual: _Evidence) -> None:
        """Raise Uncapturable if two calls differ."""
        modes = self._entry.modes
        dtypes = [out.dtype for out in expected.outs if out.is_floating_point()]
        if modes.autocast is not None and not self._entry.full_precision:
            dtypes.append(modes.autocast)
        allowed = _Tolerance.of(dtypes, modes.precision)
        pairs: dict[str, tuple[Grads, Grads]] = {
            "output": (expected.outs, actual.outs), "gradient": (expected.grads, actual.grads),
            **{n: (tensors, actual.state[n]) for n, tensors in expected.state.items()},
        }  # fmt: skip
        for name, (one, other) in pairs.items():
            by_norm = name not in ("output", "buffer")  # state of optimizers consists of gradients
            if wrong := allowed.exceeded(one, other, by_norm=by_norm):
                raise Uncapturable(f"{what}: {name}{wrong}")

    def run(self, recorder: type[Captured] | None) -> None:
        """Compare eager calls, padded calls and the recording, which a recorder makes first."""
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
                padded = self.padded(plain, dropout=False)
                if not poison or padded.finite or not plain.finite:
                    self.check("padding changes the result", plain, padded)
                    break  # otherwise the poison overflows, which says nothing about padding
            entry.poison(False)
            entry.full_precision = False
            expected = self.padded(plain, dropout=True)
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
    """Compare a recording with eager calls on the same arguments, and restore all state.

    Args:
        subject: model or step.
        entry: with its recording, unless ``recorder`` makes it.
        arguments: of the call.
        sizes: of the call.
        recorder: makes the recording, after the padded call has passed its comparison.

    Raises:
        Uncapturable: if they differ, or with another reason why the call stays eager.
    """
    trial = _Trial(subject, entry, arguments, sizes)
    # An unpadded graph is the graph of every replay, so measuring its rows pays.
    stays = expect_to_stay() if recorder is not None and not entry.layout.bucket else nullcontext()
    try:
        with holding() as lent, stays:
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
    """Return the first error in a line: the end of a failed capture raises another error."""
    while error.__context__ is not None and not isinstance(error, Uncapturable):
        error = error.__context__
    if isinstance(error, Uncapturable):
        return str(error)
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if "stream is capturing" in text:
        text = "it waits for the device, which no CUDA graph can"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    users = [f for f in frames if _HERE not in f.filename]
    return f"{text} ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else text
