"""The arguments of a call: the tensors in them, and the rest, by which calls are told apart."""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_accel.checks import check_arguments

__all__ = [
    "NUMBERS", "Arguments", "Named", "Uncapturable", "flatten", "names_of", "replaced",
]  # fmt: skip

# Python integers that say how many nodes or graphs there are, by the names that PyG gives them.
NUMBERS = {"num_nodes": "nodes", "batch_size": "graphs", "num_graphs": "graphs", "size": "graphs"}
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_PLAIN = (Tensor, torch.nn.Parameter)


class Uncapturable(Exception):
    """Why a call cannot be captured; eager execution goes on."""


def names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters of a function."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in signature(function).parameters.values() if p.kind in kinds)


class Named:
    """A call of a function: if it fails, arguments that are no tensors are named."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Keep what is needed in that case."""
        self._call = function, args, kwargs

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raise an error that says more, from that of the function."""
        if kind is not None and issubclass(kind, Exception):
            function, args, kwargs = self._call
            check_arguments({**dict(zip(names_of(function), args, strict=False)), **kwargs})


class Arguments:
    """The arguments of one call, taken apart.

    Attributes:
        tensors: all of them, also those inside lists, tuples, dictionaries and ``Data``.
        names: of the tensors: the last part of the way to each.
        form: everything else: calls of one form differ in their tensors and ``numbers`` alone.
        numbers: Python integers that count nodes or graphs, by name.
    """

    __slots__ = ("_args", "_kwargs", "form", "names", "numbers", "tensors")

    def __init__(
        self, positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Take arguments apart.

        Raises:
            Uncapturable: for arguments that are neither tensors nor constants.
        """
        self._args, self._kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.numbers: dict[str, int] = {}
        known = len(positional)
        self.form: Hashable = (
            tuple(
                self._read(value, positional[i] if i < known else str(i))
                for i, value in enumerate(args)
            ),
            tuple((name, self._read(value, name)) for name, value in kwargs.items()),
        )

    def _read(self, value: Any, name: str) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            self.tensors.append(value)
            self.names.append(name)
            return Tensor
        if kind is int and name in NUMBERS:
            self.numbers[name] = value
            return name
        if kind in _CONSTANTS:
            return (kind, value)
        if isinstance(value, (list, tuple)):
            return (kind, *(self._read(v, name) for v in value))
        if isinstance(value, dict):
            return (kind, *((k, self._read(v, str(k))) for k, v in value.items()))
        if isinstance(value, Data):
            items = ((key, item) for key, item in value.to_dict().items() if not _is_text(item))
            return (Data, *((key, self._read(item, key)) for key, item in items))
        raise Uncapturable(f"'{name}' is a {kind.__name__}")

    def rebuild(
        self, tensors: Sequence[Tensor], numbers: Mapping[str, int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors and numbers in their places."""
        rest = iter(tensors)
        args = tuple(
            _write(form, value, rest, numbers)
            for form, value in zip(self.form[0], self._args, strict=True)  # type: ignore[index]
        )
        kwargs = {
            name: _write(form, self._kwargs[name], rest, numbers)
            for name, form in self.form[1]  # type: ignore[index]
        }
        return args, kwargs


def _is_text(value: Any) -> bool:
    """Names of molecules and the like, new in each batch and of no use to a model."""
    return isinstance(value, str) or (
        isinstance(value, (list, tuple)) and all(map(_is_text, value))
    )


def _write(form: Any, value: Any, tensors: Iterator[Tensor], numbers: Mapping[str, int]) -> Any:
    if form is Tensor:
        return next(tensors)
    if isinstance(form, str):
        return numbers.get(form, value)
    kind = form[0]
    if kind is Data:
        other = copy.copy(value)
        for key, part in form[1:]:
            other[key] = _write(part, value[key], tensors, numbers)
        if "num_graphs" in numbers and "_num_graphs" in vars(other):
            vars(other)["_num_graphs"] = numbers["num_graphs"]
        return other
    if isinstance(value, dict):
        return kind((k, _write(part, value[k], tensors, numbers)) for k, part in form[1:])
    if isinstance(value, (list, tuple)):
        items = [_write(p, v, tensors, numbers) for p, v in zip(form[1:], value, strict=True)]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return value


def flatten(value: Any) -> list[Tensor]:
    """Return the tensors of a result.

    Raises:
        Uncapturable: for results that hold anything else than tensors and constants.
    """
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN:
            raise Uncapturable(f"it returns a {type(value).__name__}")
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in flatten(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flatten(v)]
    if type(value) in _CONSTANTS:
        return []
    raise Uncapturable(f"it returns a {type(value).__name__}")


def replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a result with other tensors in their places."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return type(value)((k, replaced(v, tensors)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        items = [replaced(v, tensors) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
