"""The signature of a program, and a flat function that checks arguments of a call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.graph.memo import tensors_in
from pyg_accel.record.guard import NotComparable

__all__ = ["LEAST", "Signature", "key_of"]

_EXACT = (type(None), bool, type(Ellipsis))
_EQUAL = (int, float, str)
_SEQUENCES = (tuple, list)
LEAST = 2  # sizes 0 and 1 never vary, as they broadcast: torch.compile fixes them too


class Signature:
    """Arguments with the same structure, types, dtypes, devices and sizes.

    Args:
        args: of a call.
        kwargs: of a call.
        other: of another call. Sizes that differ between the two may be any.
        drift: largest factor between these sizes and those of the call.

    Raises:
        NotComparable: if an argument is not a tensor, a number or a tuple of these.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        other: "Signature | None" = None,
        drift: int = 0,
    ) -> None:
        self.key = key_of(args, kwargs)
        tensors = self.leaves(args, kwargs)
        self.shapes: list[tuple[int | None, ...]] = [tuple(t.shape) for t in tensors]
        if other is not None:
            pairs = zip(self.shapes, other.shapes, strict=True)
            self.shapes = [tuple(map(_common, shape, others)) for shape, others in pairs]
        self.dynamic = any(None in shape for shape in self.shapes)
        self._example, self._drift = (args, kwargs), drift

    def is_like(self, other: "Signature") -> bool:
        """Whether arguments are equal up to sizes."""
        return self.key == other.key

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors among arguments."""
        return tensors_in((args, kwargs))

    def compiled(
        self, names: frozenset[str]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor, ...] | None]:
        """Return a function that returns the tensors of arguments that fit, and None for others.

        Args:
            names: of attributes that code reads, which tensors must not have of their own.
        """
        args, kwargs = self._example
        writer = _Writer(self.shapes, names, self._drift)
        leaves = writer.unpack("args", args)
        if kwargs:
            writer.names["K"] = [*kwargs]  # code may go through them in order
            writer.lines.insert(0, "if [*kwargs] != K: return None")
            for name, value in kwargs.items():
                leaves += writer.value(f"kwargs[{name!r}]", value)
        else:
            writer.lines.insert(0, "if kwargs: return None")
        tensors = "".join(f"{name}, " for name in leaves)
        body = "\n    ".join([*writer.lines, f"return ({tensors})"])
        exec(f"def admit(args, kwargs):\n    {body}\n", writer.names)
        self._example = (), {}  # release the tensors
        admit: Any = writer.names["admit"]
        return admit  # type: ignore[no-any-return]


class _Writer:
    """Generates the code of a function that compares arguments."""

    def __init__(
        self, shapes: list[tuple[int | None, ...]], names: frozenset[str], drift: int
    ) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"strided": torch.strided, "read": names}
        self._shapes, self._drift = iter(shapes), drift
        self._tensors: list[tuple[str, Tensor]] = []
        self._count = 0

    def need(self, condition: str) -> None:
        """Add a condition under which the arguments do not fit."""
        self.lines.append(f"if {condition}: return None")

    def unpack(self, source: str, values: Any) -> list[str]:
        """Add the conditions for the items of a sequence; return the names of its tensors."""
        self.need(f"len({source}) != {len(values)}")
        return [n for i, v in enumerate(values) for n in self.value(f"{source}[{i}]", v)]

    def value(self, source: str, value: Any) -> list[str]:
        """Add the conditions for a value; return the names of its tensors."""
        name = f"v{self._count}"
        self._count += 1
        self.lines.append(f"{name} = {source}")
        if isinstance(value, _EXACT):
            self.need(f"{name} is not {value!r}")
            return []
        kind = self._constant(type(value))
        if not isinstance(value, Tensor):
            self.need(f"type({name}) is not {kind}")
            if isinstance(value, _SEQUENCES):
                return self.unpack(name, value)
            if isinstance(value, float):  # 0.0 is not -0.0
                self.need(f"{name}.hex() != {value.hex()!r}")
            else:
                self.need(f"{name} != {self._constant(value)}")
            return []
        same = [other for other, tensor in self._tensors if tensor is value]
        if same:
            next(self._shapes)
            self.need(f"{name} is not {same[0]}")
            return [name]
        self.need(
            f"type({name}) is not {kind} or {name}.dtype is not {self._constant(value.dtype)}"
            f" or {name}.requires_grad is not {value.requires_grad} or {name}.layout is not strided"
            f" or {name}.get_device() != {value.get_device()}"
            f" or ({name}.__dict__ and not read.isdisjoint({name}.__dict__))"
        )
        for other, _ in self._tensors:
            self.need(f"{name} is {other}")
        shape = next(self._shapes)
        if None not in shape:
            self.need(f"{name}.shape != {self._constant(shape)}")
        else:
            self.need(f"{name}.dim() != {len(shape)}")
            for dim, size in enumerate(shape):
                least = f"< {LEAST}" if size is None else f"!= {size}"
                self.need(f"{name}.size({dim}) {least}")
                if size is None and self._drift:
                    size, factor = value.size(dim), self._drift
                    self.need(f"not {size} <= {name}.size({dim}) * {factor} <= {size * factor**2}")
        self._tensors.append((name, value))
        return [name]

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name


def _common(size: int | None, other: int | None) -> int | None:
    """Return a size that two arguments have in common; None if it may be any."""
    return size if size == other or size is None or size < LEAST else None


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a description of arguments without sizes, or raise :class:`NotComparable`."""
    named = [(name, _describe(value)) for name, value in kwargs.items()]
    tensors = [*map(id, tensors_in((args, kwargs)))]
    return (*map(_describe, args), *named, *map(tensors.index, tensors))


def _describe(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        if value.layout is not torch.strided:
            raise NotComparable("a sparse matrix among the arguments")
        return kind, value.dtype, value.get_device(), value.requires_grad, value.dim()
    if kind in _SEQUENCES:
        return kind, *map(_describe, value)
    if kind in _EXACT or kind in _EQUAL:
        return kind, value
    raise NotComparable(f"an argument of type {kind.__name__}")
