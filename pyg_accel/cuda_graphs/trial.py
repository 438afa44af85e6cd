"""Recording a kind of call, and comparing it with eager ones before anybody relies on it."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_accel.cuda_graphs.capture import Memory, Recording, Uncaptured, gradients
from pyg_accel.cuda_graphs.comparison import Still, cotangents, difference, tolerance
from pyg_accel.cuda_graphs.entry import Entry
from pyg_accel.cuda_graphs.inputs import Arguments, Uncapturable, flatten, replaced
from pyg_accel.cuda_graphs.parts import PartsTaken
from pyg_accel.cuda_graphs.state import Checkpoint, ModuleState
from pyg_accel.derived import holding
from pyg_accel.facts import expect_to_stay

__all__ = ["FAILURES", "Recorder", "Subject", "compare", "first_cause", "record_call"]

# What a model may raise when it is called with padding, or captured. Eager execution tells whether
# it is the user's own mistake.
FAILURES = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError,
    ArithmeticError, OSError, Uncapturable,
)  # fmt: skip
_HERE = str(Path(__file__).parent)
Recorder = Callable[[Callable[[], list[Tensor]], Sequence[Tensor], Memory], Recording]


class Subject(Protocol):
    """What is captured: a model or a step."""

    @property
    def name(self) -> str:
        """For the report."""

    @property
    def roots(self) -> Sequence[torch.nn.Module]:
        """Modules that take part."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Make an eager call."""

    def reasons(self) -> list[str]:
        """Return why no call can be captured."""

    def key(self) -> Any:
        """Return what else than its modules decides what a call does."""

    def tensors(self) -> list[Tensor]:
        """Return what a call may change in place."""

    def evidence(self) -> dict[str, list[Tensor]]:
        """Return what of that tells whether a call was right."""

    def prepare(self) -> None:
        """Get ready to be captured."""

    def recorded(self) -> Any:
        """Return what a call leaves behind, after a recording was made."""

    def finish(self, left: Any) -> None:
        """Leave that behind, after a recording was replayed."""


class Evidence(NamedTuple):
    """What a call did."""

    value: Any
    outs: list[Tensor]
    differentiable: list[bool]
    grads: list[Tensor | None]
    state: dict[str, list[Tensor]]


def _eager(
    subject: Subject, entry: Entry, arguments: Arguments, saved: Checkpoint, *, still: bool
) -> Evidence:
    given = {id(t) for t in arguments.tensors if t.requires_grad and entry.modes.grad}
    tensors = [t.detach().requires_grad_() if id(t) in given else t for t in arguments.tensors]
    inputs = [t for t, old in zip(tensors, arguments.tensors, strict=True) if id(old) in given]
    with ExitStack() as stack:
        if still:
            stack.enter_context(Still())
        stack.enter_context(entry.autocast())
        args, kwargs = arguments.rebuild(tensors, {})
        value = subject.call(*args, **kwargs)
    outs = flatten(value)
    grads = gradients(outs, [*inputs, *entry.parameters],
                      [c if o.requires_grad else None
                       for o, c in zip(outs, cotangents(outs), strict=True)])  # fmt: skip
    # A graph of autograd that is alive ties parameters to the stream that it was made on.
    value = replaced(value, iter([out.detach() for out in outs]))
    return _evidence(subject, value, outs, grads, saved)


def _evidence(
    subject: Subject,
    value: Any,
    outs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    saved: Checkpoint,
) -> Evidence:
    found = Evidence(
        value,
        [out.detach().clone() for out in outs],
        [out.requires_grad for out in outs],
        [None if g is None else g.clone() for g in grads],
        {name: [t.detach().clone() for t in some] for name, some in subject.evidence().items()},
    )
    saved.restore()
    return found


def _padded(
    subject: Subject, entry: Entry, like: Evidence, sizes: Mapping[str, int], saved: Checkpoint,
    *, still: bool,
) -> Evidence:  # fmt: skip
    """Make the padded call without recording it."""
    with ExitStack() as stack:
        if still:
            stack.enter_context(Still())
        outs = entry.compute()
    entry.describe(like.value, outs, [out.requires_grad for out in outs], sizes)
    parts = entry.take(outs)
    grads: list[Tensor | None] = []
    for out, part, cotangent in zip(outs, parts, cotangents(parts), strict=True):
        if not out.requires_grad:
            grads.append(None)
            continue
        whole = torch.ones_like(out)  # on padding too, where it must not matter
        (whole[: part.size(0)] if out.dim() else whole).copy_(cotangent)
        grads.append(whole)
    found = entry.trim(gradients(outs, entry.inputs, grads))
    return _evidence(subject, like.value, parts, found, saved)


def _recorded(
    subject: Subject, entry: Entry, arguments: Arguments, sizes: Mapping[str, int],
    saved: Checkpoint,
) -> Evidence:  # fmt: skip
    """Replay the recording as a call does."""
    parts = entry.take(entry.recording.forward())
    grads: list[Tensor | None] = []
    if any(entry.differentiable):
        entry.give([
            c if has else None
            for c, has in zip(cotangents(parts), entry.differentiable, strict=True)
        ])  # fmt: skip
        grads = entry.trim(entry.recording.backward())
    else:
        grads = [None] * len(entry.inputs)
    return _evidence(subject, None, parts, grads, saved)


def _check(what: str, entry: Entry, expected: Evidence, found: Evidence) -> None:
    dtypes = [out.dtype for out in expected.outs if out.is_floating_point()]
    if entry.modes.autocast is not None and not entry.full_precision:
        dtypes.append(entry.modes.autocast)
    allowed = tolerance(dtypes, entry.modes.precision)
    wrong = difference(expected.outs, found.outs, "output", allowed) or difference(
        expected.grads, found.grads, "gradient", allowed, by_norm=True
    )
    for name, tensors in expected.state.items():
        by_norm = name != "buffer"  # that of an optimizer is made of gradients
        wrong = wrong or difference(tensors, found.state[name], name, allowed, by_norm=by_norm)
    if wrong:
        raise Uncapturable(f"{what}: {wrong}")


def compare(
    subject: Subject,
    entry: Entry,
    arguments: Arguments,
    sizes: Mapping[str, int],
    saved: Checkpoint,
    make: Callable[[], None] | None = None,
) -> None:
    """Compare a recording with eager calls on the same arguments.

    Args:
        subject: model or step.
        entry: with its recording, unless ``make`` makes it.
        arguments: of the call.
        sizes: of the call.
        saved: what every call begins with.
        make: records, after all that could be found wrong before has been.

    Raises:
        Uncapturable: where they differ.
    """
    entry.load(arguments, sizes)
    if entry.layout is None:
        expected = _eager(subject, entry, arguments, saved, still=False)
        if make is not None:
            entry.describe(expected.value, expected.outs, expected.differentiable, sizes)
    else:
        halves = (torch.half, torch.bfloat16)
        entry.full_precision = all(t.dtype not in halves for t in arguments.tensors)
        with PartsTaken() as taken:
            plain = _eager(subject, entry, arguments, saved, still=True)
        entry.parts = taken.found
        for poison in (True, False):
            entry.poison(poison)
            padded = _padded(subject, entry, plain, sizes, saved, still=True)
            if poison and not _finite(padded) and _finite(plain):
                continue  # numbers too large for the model, which says nothing about leaks
            _check("padding changes the result", entry, plain, padded)
            if poison:
                break
        entry.poison(False)
        entry.full_precision = False
        expected = _padded(subject, entry, plain, sizes, saved, still=False)
    if make is not None:
        make()
    found = _recorded(subject, entry, arguments, sizes, saved)
    _check("captured, it computes something else", entry, expected, found)


def _finite(evidence: Evidence) -> bool:
    return all(bool(t.isfinite().all()) for t in (*evidence.outs, *evidence.grads) if t is not None)


def record_call(
    subject: Subject,
    state: ModuleState,
    entry: Entry,
    arguments: Arguments,
    sizes: Mapping[str, int],
    recorder: Recorder,
) -> None:
    """Record a call, as if nothing had happened.

    Raises:
        Uncapturable: with the reason why it stays eager.
    """
    saved = Checkpoint(state.modules, subject.tensors(), entry.memory.device)

    def make() -> None:
        before = ModuleState(subject.roots)
        subject.prepare()
        entry.compute()
        if changed := before.changed():
            raise Uncapturable(f"its forward pass changes {', '.join(changed)}")
        saved.restore()
        subject.prepare()
        entry.recording = recorder(entry.compute, entry.inputs, entry.memory)
        entry.left = None if isinstance(entry.recording, Uncaptured) else subject.recorded()
        saved.restore()

    try:
        # A graph that is held is the graph of every replay: its long rows are worth knowing.
        known = expect_to_stay() if entry.layout is None else nullcontext()
        with holding() as lent, known:
            compare(subject, entry, arguments, sizes, saved, make)
        entry.lent = lent
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise Uncapturable(first_cause(error)) from error
    finally:
        saved.restore()
        entry.full_precision = False
    entry.settle()


def first_cause(error: BaseException) -> str:
    """Return what went wrong first, in a line: the end of a failed capture raises too."""
    while error.__context__ is not None and not isinstance(error, Uncapturable):
        error = error.__context__
    if isinstance(error, Uncapturable):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    what = f"{type(error).__name__}: {lines[0]}"
    if "stream is capturing" in what:
        what = "it waits for the device, which no CUDA graph can"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    theirs = [f for f in frames if _HERE not in f.filename]
    return f"{what} ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else what
