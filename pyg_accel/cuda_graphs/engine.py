"""Decides whether a call is recorded, replayed or run eagerly."""

import gc
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.cuda_graphs import ledger, padding
from pyg_accel.cuda_graphs.call import Arguments, Checkpoint, Modes, State, Subject, Uncapturable
from pyg_accel.cuda_graphs.capture import Captured, Memory
from pyg_accel.cuda_graphs.entry import Entry
from pyg_accel.cuda_graphs.trial import examine
from pyg_accel.runtime.cache import TensorRef
from pyg_accel.runtime.report import record
from pyg_accel.runtime.state import running

__all__ = ["WARM_UP", "Engine", "HasCaptures"]

WARM_UP = 3  # eager calls of a kind before it is captured, as torch.cuda.make_graphed_callables
_KINDS, _SHAPES, _STATES, _SEEN = 32, 64, 8, 16
_WARMING = "warming up"
_TOO_LARGE = "too large to be captured in the memory that is left"
_SLOWER = "a replay takes longer than an eager call"
_UNPAID = "earlier captures have not paid for themselves yet"


class Refused(Uncapturable):
    """No call of a kind can be captured."""


class Kind:
    """Calls that differ only in the sizes of their tensors and in integers.

    Attributes:
        places: for each axis, the argument that has its number of rows.
        entries: recordings.
        refusal: why no recording is made.
        closed: why no further recording is made.
        limit: calls with so many elements in their arguments are not recorded, and the reason.
        labels: the argument with a row for each graph, if there is one.
        padded: whether calls of one size are padded too, because unpadded recording failed.
        seen: number of calls by size, the latest last.
    """

    def __init__(self, arguments: Arguments, roles: Mapping[str, str]) -> None:
        self.places = padding.primary(arguments, roles)
        self.entries: list[Entry] = []
        self.refusal = self.closed = ""
        self.limit: tuple[float, str] = torch.inf, ""
        self.labels: int | None = None
        self.padded = False
        self.seen: OrderedDict[padding.CallSizes, int] = OrderedDict()
        self._last: list[TensorRef] = []
        self._runs = [0] * len(arguments.tensors)

    def note(self, call: "_Call") -> int:
        """Count a call; return how many had its sizes."""
        now = call.arguments.tensors
        same = [a.fits(b) and not b.is_inference() for a, b in zip(self._last, now, strict=False)]
        self._runs = [n + 1 if i < len(same) and same[i] else 1 for i, n in enumerate(self._runs)]
        self._last = [TensorRef(t) for t in now]
        key = padding.CallSizes(tuple(t.shape for t in now), tuple(call.sizes.items()))
        self.seen[key] = self.seen.pop(key, 0) + 1
        while len(self.seen) > _SHAPES:
            self.seen.popitem(last=False)
        return self.seen[key]

    def held(self) -> list[int]:
        """Return which arguments were the same tensors in the last calls."""
        return [place for place, run in enumerate(self._runs) if run > WARM_UP]

    def find(self, call: "_Call") -> Entry | None:
        """Return the best recording for a call, or None.

        If no further recording is made, every recording that is large enough is accepted.
        """
        slack = None if self.closed else padding.SLACK
        fitting = [e for e in self.entries if e.takes(call.arguments, call.sizes, slack)]
        return min(fitting, key=lambda entry: entry.preference, default=None)


class _Call(NamedTuple):
    """A call and its context; ``sizes`` are the integers of the call until sizes are read."""

    kind: Kind
    state: State
    modes: Modes
    arguments: Arguments
    sizes: padding.Sizes

    @property
    def elements(self) -> int:
        return sum(t.numel() for t in self.arguments.tensors)


class Engine:
    """Makes the calls of a model or a step.

    Args:
        subject: model or step.
        positional: names of its arguments.
        differentiable: whether its results have gradients.
        dynamic: whether sizes change; None observes it.
        max_captures: number of stored recordings; the least recently used is dropped.
        roles: roles of arguments by name, if names and sizes do not determine them.

    Attributes:
        recent: all recordings, the least recently used first.
    """

    recorder: type[Captured] = Captured  # tests replace it

    def __init__(
        self, subject: Subject, positional: Sequence[str], *, differentiable: bool,
        dynamic: bool | None, max_captures: int, roles: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Start without recordings."""
        padding.check_roles(roles)
        if max_captures < 1:
            raise ValueError(f"expected 'max_captures' to be at least 1 (got {max_captures})")
        self._subject, self._positional = subject, positional
        self._differentiable, self._dynamic = differentiable, dynamic
        self._most, self._roles = max_captures, dict(roles)
        self._state: State | None = None
        self._states: OrderedDict[Any, State] = OrderedDict()
        self._kinds: OrderedDict[Any, Kind] = OrderedDict()
        self.recent: OrderedDict[Entry, Kind] = OrderedDict()
        self._memory: Memory | None = None
        self._largest = 0  # elements of the largest eager call that ran beside the recordings
        self._refused: tuple[Any, str] = None, ""  # a key of the last refused call, and why
        self._changes = 0  # successive calls with changed modules
        self._thread = threading.get_ident()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, eagerly or by a replay."""
        if running.graphed:  # a model in a step, or in another model
            return self._subject.call(*args, **kwargs)
        start, why, full, looked = ledger.clock(), "", False, True
        training = [module.training for module in self._subject.roots]
        like = torch.is_grad_enabled(), *training, len(args), *kwargs
        running.graphed = True
        try:
            try:
                if like == self._refused[0] and self._state and not self._state.ledger.looks:
                    looked = False
                    raise Refused(self._refused[1])
                entry, call = self._find(args, kwargs)
                out = entry(call.arguments, call.sizes)
            except Uncapturable as reason:
                why, full = str(reason), isinstance(reason.__context__, torch.OutOfMemoryError)
                self._refused = (like, why) if isinstance(reason, Refused) else (None, "")
            else:
                self._refused = None, ""
                done = entry.formula, "CUDA graph", entry.eager, entry.saves
                if entry.left is not None:
                    self._subject.finish(entry.left)
            if full:
                gc.collect()  # frames of the failed recording are in cycles with its tensors
            if why:
                began = ledger.clock()
                out = self._eager(args, kwargs)
                done = "", "eager", ledger.clock() - began, 0.0
        finally:
            running.graphed = False
        formula, backend, eager, saved = done
        if self._state is not None:
            account = self._state.ledger
            account.called(eager, saved, replayed=not why)
            if looked and self._refused[0]:
                account.looked(ledger.clock() - start - eager)
        record(self._subject.name, formula, backend, why, ledger.clock() - start)
        return out

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        elements = sum(t.numel() for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        if self.recent and self._differentiable and elements > self._largest:
            assert self._memory is not None
            saved = Checkpoint(self._subject, self._memory.device)
            try:
                return self._subject.call(*args, **kwargs)
            except torch.OutOfMemoryError:  # try again with the memory of the captures
                self.release()
            saved.restore()
        out = self._subject.call(*args, **kwargs)
        self._largest = max(elements, self._largest)
        return out

    def release(self) -> None:
        """Free all recordings."""
        for kind in self._kinds.values():
            kind.entries.clear()
            kind.seen.clear()
            kind.closed = ""
        for state in self._states.values():
            state.ledger.losses = 0
        self.recent.clear()

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, _Call]:
        """Return the recording for a call.

        Raises:
            Uncapturable: if there is none.
        """
        if threading.get_ident() != self._thread:
            raise Uncapturable("called from another thread than the one that made it")
        arguments = Arguments(self._positional, args, kwargs)
        device = self._device(arguments)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Uncapturable("already inside of a capture")
        state = self._current()
        if reasons := self._subject.reasons() or state.reasons():
            raise Uncapturable("; ".join(reasons))
        modes = Modes.now(device.type)
        tensors = tuple((t.dtype, t.dim(), t.requires_grad) for t in arguments.tensors)
        key = state, self._subject.key(), modes, arguments.form, tensors
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(arguments, self._roles)
        self._kinds.move_to_end(key)
        if len(self._kinds) > _KINDS:
            for old in self._kinds.popitem(last=False)[1].entries:
                self.recent.pop(old, None)
        if kind.refusal:
            raise Refused(kind.refusal)
        self._memory = self._memory or Memory(device)
        if self._memory.busy:
            raise Uncapturable("an earlier call still awaits its backward pass")
        call = _Call(kind, state, modes, arguments, arguments.numbers)
        entry = kind.find(call)
        if entry is None:
            call = call._replace(sizes=padding.sizes_of(arguments, kind.places, kind.labels))
            entry = kind.find(call)
        if entry is None:
            entry = self._prepare(call)
        elif entry.unverified:
            self._examine(call, entry, None)
        self.recent.move_to_end(entry)
        return entry, call

    def _device(self, arguments: Arguments) -> torch.device:
        for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
            if tensor.layout != torch.strided:
                raise Uncapturable(f"'{name}' is a sparse tensor")
            if not self._differentiable and tensor.requires_grad:
                raise Uncapturable(f"'{name}' of a step requires a gradient")
        devices = {t.device for t in arguments.tensors}
        if len(devices) != 1:
            where = sorted(map(str, devices))
            raise Uncapturable(f"tensors on {', '.join(where)}" if where else "no tensors")
        device = devices.pop()
        if self.recorder is Captured and device.type != "cuda":
            raise Uncapturable(f"no CUDA graphs on device '{device}'")
        return device

    def _current(self) -> State:
        """Return the state of the modules; the same object if nothing was replaced."""
        if self._state is not None:
            changed = self._state.changed()
            if not changed:
                self._changes = 0
                return self._state
        state, first = State(self._subject), self._state is None
        key = state.key()
        self._changes = 0 if first or key in self._states else self._changes + 1
        self._state = self._states.setdefault(key, state)
        self._states.move_to_end(key)
        if len(self._states) > _STATES:
            self._states.popitem(last=False)
        if self._changes > WARM_UP:
            raise Uncapturable(f"each call changes {', '.join(changed)}")
        return self._state

    def _drop(self, entry: Entry) -> None:
        kind = self.recent.pop(entry, None)
        if kind is not None:
            kind.entries.remove(entry)

    def _examine(self, call: _Call, entry: Entry, recorder: type[Captured] | None) -> None:
        """Record a call, or compare a recording again with other data."""
        account, start = call.state.ledger, ledger.clock()
        try:
            examine(self._subject, entry, call.arguments, call.sizes, recorder)
        except torch.OutOfMemoryError:  # a recording and an eager call do not fit together
            raise self._limited(call, entry, _TOO_LARGE) from None
        except Uncapturable as reason:
            if recorder is None and reason.__cause__ is None:  # the results differ
                self._drop(entry)
                call.kind.refusal = str(reason)
            raise
        finally:
            seconds = ledger.clock() - start
            entry.cost += seconds
            account.spent(seconds)
        if not entry.unverified and entry.saves < 0:
            raise self._limited(call, entry, _SLOWER)
        account.worked(seconds, captured=recorder is not None)

    def _limited(self, call: _Call, entry: Entry, reason: str) -> Uncapturable:
        """Drop a recording, and capture no more calls of its size or larger."""
        self._drop(entry)
        call.kind.limit = call.elements, reason
        return Uncapturable(reason)

    def _prepare(self, call: _Call) -> Entry:
        """Record a call, if enough calls of its kind have been made.

        Raises:
            Uncapturable: if not, or if it cannot be recorded.
        """
        kind, account, arguments = call.kind, call.state.ledger, call.arguments
        times, held, ids = kind.note(call), kind.held(), kind.places.get("graphs")
        different = len(kind.seen) > WARM_UP
        changes = different or kind.padded or (ids is not None and ids not in held)
        if self._dynamic is not None:
            changes = self._dynamic
        if sum(kind.seen.values()) <= WARM_UP or not (changes or times > WARM_UP):
            never = different and self._dynamic is False
            raise Uncapturable("sizes change, and dynamic=False" if never else _WARMING)
        if call.elements >= kind.limit[0]:
            raise Uncapturable(kind.limit[1])
        if min((call.sizes[axis] for axis in kind.places), default=2) < 2:
            raise Uncapturable("a batch with fewer than two rows of something")
        if len(self.recent) >= self._most and account.losses >= self._most:
            kind.closed = kind.closed or account.too_often
        if kind.closed or not account.affords:
            raise Uncapturable(kind.closed or _UNPAID)
        assert self._memory is not None
        layout = padding.fixed_layout(arguments, call.sizes, None if ids in held else ids)
        try:
            if changes:
                reserved = {n for p in call.state.parameters for n in p.shape}
                reserved |= {n for t in arguments.tensors for n in t.shape[1:]}
                seen = list(kind.seen)[-_SEEN:]
                layout = padding.layout_of(arguments, kind.places, seen, self._roles, reserved)
            entry = Entry(
                self._subject.call, call.state, arguments, layout, [] if changes else held,
                call.modes, self._memory, differentiable=self._differentiable,
            )  # fmt: skip
            self._examine(call, entry, self.recorder)
        except Uncapturable as reason:
            if str(reason) == kind.limit[1]:
                pass
            elif kind.entries:  # an exceptional batch
                kind.seen.popitem()
            elif self._dynamic is None and not changes and len(held) < len(arguments.tensors):
                kind.padded = True  # new graphs of one size, whose number of self-loops changes
                raise Uncapturable(_WARMING) from reason
            else:
                kind.refusal = str(reason)
            raise
        self._largest = 0  # measured again beside the new recording
        kind.entries.append(entry)
        self.recent[entry] = kind
        while len(self.recent) > self._most:
            oldest = next(iter(self.recent))
            account.losses += oldest.replays * oldest.saves < oldest.cost
            self._drop(oldest)
        if changes:
            kind.labels = padding.labels_of(arguments, layout)
        return entry


class HasCaptures:
    """An object whose calls an engine makes."""

    _engine: Engine

    @property
    def captures(self) -> list[str]:
        """Descriptions of the stored captures, the least recently used first."""
        return [entry.formula for entry in self._engine.recent]

    def release(self) -> None:
        """Free all captures; later calls are captured again."""
        self._engine.release()
