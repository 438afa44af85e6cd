"""Which calls are recorded, which are replayed, and which stay eager and why."""

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.cache import TensorRef
from pyg_accel.call_report import record
from pyg_accel.cuda_graphs.buckets import SLACK, bucket_for, fits
from pyg_accel.cuda_graphs.capture import Captured, Memory
from pyg_accel.cuda_graphs.entry import Entry, Modes
from pyg_accel.cuda_graphs.inputs import Arguments, Uncapturable
from pyg_accel.cuda_graphs.padding import (
    Layout,
    Seen,
    check_roles,
    labels_of,
    layout_of,
    primary,
    sizes_of,
)  # fmt: skip
from pyg_accel.cuda_graphs.state import Checkpoint, ModuleState
from pyg_accel.cuda_graphs.trial import (
    FAILURES,
    Recorder,
    Subject,
    compare,
    first_cause,
    record_call,
)

__all__ = ["WARM_UP", "Engine"]

WARM_UP = 3  # eager calls of a kind before it is captured, as torch.cuda.make_graphed_callables
_KINDS, _SHAPES, _STATES, _SEEN = 32, 64, 8, 16
_ATTEMPTS = 2  # times the number of captures: a recording takes as long as a hundred calls
_WARMING = "warming up"
_TOO_LARGE = "too large to be captured in the memory that is left"


class _Inside(threading.local):
    """Whether a call is being made: those inside of it are part of it."""

    on = False


_inside = _Inside()


class Family:
    """Calls of one kind: they differ in the sizes of their tensors alone.

    Attributes:
        places: where the number of rows of each axis is read.
        entries: recordings, by the size of what they hold.
        refusal: why none is made.
        labels: an argument with a row for each graph.
        made: how many recordings there have been.
        most: elements of the arguments for which memory did not suffice.
        padded: calls of one size are padded too, as they cannot be recorded otherwise.
    """

    def __init__(self, arguments: Arguments, roles: Mapping[str, str]) -> None:
        self.places = primary(arguments, roles)
        self.entries: list[Entry] = []
        self.refusal = ""
        self.labels: int | None = None
        self.most: float = torch.inf
        self.made = 0
        self.padded = False
        self.seen: OrderedDict[tuple[Any, ...], Seen] = OrderedDict()
        self.calls: dict[tuple[Any, ...], int] = {}
        self._last: list[TensorRef] = []
        self._runs: list[int] = []

    def note(self, arguments: Arguments, sizes: dict[str, int]) -> int:
        """Look at a call; return how many of these sizes there were."""
        now = arguments.tensors
        if not self._last:
            self._runs = [0] * len(now)
            self._last = [TensorRef(t) for t in now]
        for i, (last, tensor) in enumerate(zip(self._last, now, strict=True)):
            same = last.fits(tensor) and not tensor.is_inference()
            self._runs[i] = self._runs[i] + 1 if same else 1
        self._last = [TensorRef(t) for t in now]
        shapes = tuple(t.shape for t in now)
        key = (shapes, tuple(sizes.items()))
        self.calls[key] = self.calls.get(key, 0) + 1
        self.seen[key] = Seen(shapes, dict(arguments.numbers), sizes)
        self.seen.move_to_end(key)
        while len(self.seen) > _SHAPES:
            self.calls.pop(self.seen.popitem(last=False)[0])
        return self.calls[key]

    def forget(self) -> None:
        """Do not look at the sizes of the last call again."""
        self.calls.pop(self.seen.popitem()[0])

    def held(self) -> list[int]:
        """Return which arguments have been the same tensors for a while."""
        return [place for place, run in enumerate(self._runs) if run > WARM_UP]

    def find(
        self, arguments: Arguments, sizes: Mapping[str, int] | None, most: int
    ) -> Entry | None:
        """Return the recording for a call; with no sizes given, one that does not need them.

        Any that is large enough will do where ``most`` recordings have been made several times.
        """
        if sizes is None:
            whole = [e for e in self.entries if e.layout is None and e.fits(arguments)]
            return max(whole, key=lambda entry: entry.holds, default=None)
        slack = SLACK if self.made < _ATTEMPTS * most else None
        shapes = [t.shape for t in arguments.tensors]
        padded = [
            e
            for e in self.entries
            if e.layout and fits(sizes, e.layout.bucket, slack) and e.layout.takes(shapes, sizes)
        ]
        return min(padded, key=lambda e: sum(e.layout.bucket.values()) if e.layout else 0,
                   default=None)  # fmt: skip


class Engine:
    """Makes the calls of a model or a step.

    Args:
        subject: model or step.
        positional: names of its arguments.
        differentiable: whether its results have gradients.
        dynamic: whether sizes change; None finds out.
        max_captures: how many recordings are kept; the least recently used goes.
        roles: what arguments are, by name, where names and sizes do not tell.
    """

    recorder: Recorder = Captured  # tests put `Uncaptured` here

    def __init__(
        self,
        subject: Subject,
        positional: Sequence[str],
        *,
        differentiable: bool,
        dynamic: bool | None,
        max_captures: int,
        roles: Mapping[str, str],
    ) -> None:
        """Record nothing yet."""
        check_roles(roles)
        if max_captures < 1:
            raise ValueError(f"expected 'max_captures' to be at least 1 (got {max_captures})")
        self._subject, self._positional = subject, positional
        self._differentiable, self._dynamic = differentiable, dynamic
        self._most, self._roles = max_captures, dict(roles)
        self._state: ModuleState | None = None
        self._states: OrderedDict[Any, ModuleState] = OrderedDict()
        self._families: OrderedDict[Any, Family] = OrderedDict()
        self._recent: OrderedDict[Entry, Family] = OrderedDict()
        self._memory: Memory | None = None
        self._largest = 0  # elements of arguments for which there was memory beside the recordings
        self._changes = 0  # how many calls in a row found the modules changed
        self._thread = threading.get_ident()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, eagerly or by a replay."""
        if _inside.on:  # a model in a step, or in another model
            return self._subject.call(*args, **kwargs)
        start = time.perf_counter()
        _inside.on = True
        try:
            try:
                entry, arguments, sizes = self._find(args, kwargs)
                out = entry(arguments, sizes)
            except Uncapturable as reason:
                formula, backend, why = "", "eager", str(reason)
                full = isinstance(reason.__context__, torch.OutOfMemoryError)
            else:
                formula, backend, why = entry.formula, "CUDA graph", ""
                if entry.left is not None:
                    self._subject.finish(entry.left)
            if why:
                if full:
                    gc.collect()  # frames of the recording hold each other, and its tensors
                out = self._eager(args, kwargs)
        finally:
            _inside.on = False
        record(self._subject.name, formula, backend, why, time.perf_counter() - start)
        return out

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        elements = sum(t.numel() for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        if not self._recent or not self._differentiable or elements <= self._largest:
            out = self._subject.call(*args, **kwargs)
            self._largest = max(elements, self._largest)
            return out
        assert self._memory is not None
        state = self._state
        saved = Checkpoint([], state.buffers if state else [], self._memory.device)
        try:
            return self._subject.call(*args, **kwargs)
        except torch.OutOfMemoryError:  # the captures may hold what is missing
            self.release()
        saved.restore()
        return self._subject.call(*args, **kwargs)

    def release(self) -> None:
        """Free all recordings; those that are needed are made again."""
        for family in self._families.values():
            family.entries.clear()
            family.calls.clear()
            family.seen.clear()
            family.made = 0
        self._recent.clear()

    @property
    def captures(self) -> list[str]:
        """What is recorded, the least recently used first."""
        return [entry.formula for entry in self._recent]

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Entry, Arguments, Mapping[str, int]]:
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
        kind = (
            id(state), self._subject.key(), modes, arguments.form,
            tuple((t.dtype, t.dim(), t.requires_grad) for t in arguments.tensors),
        )  # fmt: skip
        try:
            family = self._families.get(kind)
        except TypeError:
            raise Uncapturable("an argument that cannot be told apart from others") from None
        if family is None:
            family = self._families[kind] = Family(arguments, self._roles)
            while len(self._families) > _KINDS:
                _, old = self._families.popitem(last=False)
                for entry in old.entries:
                    self._recent.pop(entry, None)
        self._families.move_to_end(kind)
        if family.refusal:
            raise Uncapturable(family.refusal)
        if self._memory is not None and self._memory.busy:
            raise Uncapturable("an earlier call still awaits its backward pass")
        sizes: dict[str, int] = {}
        found = family.find(arguments, None, self._most)
        if found is None:
            sizes = sizes_of(arguments, family.places, family.labels)
            found = family.find(arguments, sizes, self._most)
        if found is None:
            entry = self._prepare(family, state, arguments, sizes, modes, device)
        else:
            entry = found
            if entry.unverified:
                self._verify(family, state, entry, arguments, sizes)
        self._recent.move_to_end(entry)
        return entry, arguments, sizes

    def _device(self, arguments: Arguments) -> torch.device:
        for name, tensor in zip(arguments.names, arguments.tensors, strict=True):
            if tensor.layout != torch.strided:
                raise Uncapturable(f"'{name}' is a sparse tensor")
            if not self._differentiable and tensor.requires_grad:
                raise Uncapturable(f"'{name}' of a step requires a gradient")
        found = {t.device for t in arguments.tensors}
        if len(found) != 1:
            where = sorted(map(str, found))
            raise Uncapturable(f"tensors on {', '.join(where)}" if where else "no tensors")
        device = found.pop()
        if self.recorder is Captured and device.type != "cuda":
            raise Uncapturable(f"no CUDA graphs on device '{device}'")
        return device

    def _current(self) -> ModuleState:
        """Return the state of the modules, the same as long as nothing in them is replaced."""
        changed: list[str] = []
        if self._state is not None and not self._state.holds():
            changed = self._state.changed()
        if self._state is None or changed:
            found = ModuleState(self._subject.roots)
            new = found.key() not in self._states
            self._changes = self._changes + 1 if changed and new else 0
            self._state = self._states.setdefault(found.key(), found)
            self._states.move_to_end(found.key())
            while len(self._states) > _STATES:
                _, old = self._states.popitem(last=False)
                for kind in [k for k in self._families if k[0] == id(old)]:
                    for entry in self._families.pop(kind).entries:
                        self._recent.pop(entry, None)
        else:
            self._changes = 0
        if self._changes > WARM_UP:
            raise Uncapturable(f"each call changes {', '.join(changed)}")
        return self._state

    def _verify(
        self,
        family: Family,
        state: ModuleState,
        entry: Entry,
        arguments: Arguments,
        sizes: Mapping[str, int],
    ) -> None:
        """Compare a recording once more, on other data than it was made with."""
        saved = Checkpoint(state.modules, self._subject.tensors(), entry.memory.device)
        try:
            compare(self._subject, entry, arguments, sizes, saved)
        except Uncapturable as reason:
            self._drop(entry)
            family.refusal = str(reason)
            raise
        except torch.OutOfMemoryError:  # a recording and an eager call do not fit together
            self._drop(entry)
            family.most = sum(t.numel() for t in arguments.tensors)
            raise Uncapturable(_TOO_LARGE) from None
        except FAILURES as error:  # of this call, perhaps; the eager one will tell
            raise Uncapturable(first_cause(error)) from error
        finally:
            saved.restore()
            entry.full_precision = False
            entry.poison(False)
        entry.settle()

    def _drop(self, entry: Entry) -> None:
        family = self._recent.pop(entry, None)
        if family is not None:
            family.entries.remove(entry)

    def _prepare(
        self,
        family: Family,
        state: ModuleState,
        arguments: Arguments,
        sizes: dict[str, int],
        modes: Modes,
        device: torch.device,
    ) -> Entry:
        """Record a call once there were enough of its kind.

        Raises:
            Uncapturable: if there were not, or if it cannot be recorded.
        """
        times = family.note(arguments, sizes)
        held = family.held()
        ids = family.places.get("graphs")
        different = len(family.seen) > WARM_UP
        changes = different or family.padded or (ids is not None and ids not in held)
        if self._dynamic is not None:
            changes = self._dynamic
        if sum(family.calls.values()) <= WARM_UP or not (changes or times > WARM_UP):
            never = different and self._dynamic is False
            raise Uncapturable("sizes change, and dynamic=False" if never else _WARMING)
        if sum(t.numel() for t in arguments.tensors) >= family.most:
            raise Uncapturable(_TOO_LARGE)
        if min(sizes.values(), default=2) < 2:
            raise Uncapturable("a batch with fewer than two rows of something")
        if family.made >= _ATTEMPTS * self._most:
            raise Uncapturable("batches differ too much in size for so few captures")
        self._memory = self._memory or Memory(device)
        while len(self._recent) >= self._most:
            self._drop(next(iter(self._recent)))
        try:
            layout = self._layout(family, arguments, sizes, state) if changes else None
            entry = Entry(
                self._subject.call, state.modules, state.parameters if self._differentiable else [],
                arguments, layout, [] if changes else held, modes, self._memory,
            )  # fmt: skip
            record_call(self._subject, state, entry, arguments, sizes, self.recorder)
        except torch.OutOfMemoryError:
            family.most = sum(t.numel() for t in arguments.tensors)
            raise Uncapturable(_TOO_LARGE) from None
        except Uncapturable as reason:
            if family.entries:  # it is this batch that is odd
                family.forget()
            elif self._dynamic is None and not changes and len(held) < len(arguments.tensors):
                family.padded = True  # new graphs of one size, whose number of self-loops changes
                raise Uncapturable(_WARMING) from reason
            else:
                family.refusal = str(reason)
            raise
        family.made += 1
        self._largest = 0  # beside one recording more
        family.entries.append(entry)
        self._recent[entry] = family
        if layout is not None:
            family.labels = labels_of(arguments, layout)
        return entry

    def _layout(
        self, family: Family, arguments: Arguments, sizes: dict[str, int], state: ModuleState
    ) -> Layout:
        seen = list(family.seen.values())[-_SEEN:]
        most = {
            axis: max(s.sizes[axis] for s in seen if s.sizes[axis] <= SLACK * size)
            for axis, size in sizes.items()
        }
        fixed = {n for p in state.parameters for n in p.shape}
        fixed |= {n for t in arguments.tensors for n in t.shape[1:]}
        return layout_of(arguments, seen, self._roles, bucket_for(most, fixed))
