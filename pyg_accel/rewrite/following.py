"""What it takes to run the code of a layer with another ``propagate``."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing

from pyg_accel.rewrite.algebra import NotLifted
from pyg_accel.rewrite.deferred import Deferred, settled

__all__ = ["asks_types", "followed", "settle_items"]

_CONTAINERS = (list, dict, OrderedDict, defaultdict, deque)


class _Followed:
    """A base of classes of layers whose ``propagate`` is that of a run."""

    __slots__ = ("_pyg_accel_propagate",)
    _pyg_accel_propagate: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Tell no class of the user's that there is another one."""

    @property  # before what the instance has
    def propagate(self) -> Callable[..., Any]:
        """That of the run."""
        return self._pyg_accel_propagate


@lru_cache(maxsize=256)
def _followed_class(cls: Any) -> Any:
    metaclass: Any = type(cls)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return metaclass(cls.__name__, (_Followed, cls), names)


def followed(conv: MessagePassing, propagate: Callable[..., Any], *, alone: bool = False) -> Any:
    """Return a layer with all attributes of ``conv``, the very same ones, for one call.

    Its ``propagate`` is another. Nothing is set on ``conv``, which other threads may be calling.
    One that is ``alone`` has a table of attributes of its own: what its code assigns is not kept.

    Raises:
        NotLifted: if there can be no such class.
    """
    try:
        kind: Any = type(conv)
        cls = _followed_class(kind)
    except TypeError as error:  # slots, or a metaclass of its own
        raise NotLifted(f"no subclass of {type(conv).__name__} can be made: {error}") from None
    made = cls.__new__(cls)
    object.__setattr__(made, "__dict__", dict(vars(conv)) if alone else vars(conv))
    object.__setattr__(made, "_pyg_accel_propagate", propagate)
    return made


@lru_cache(maxsize=256)
def asks_types(cls: type) -> bool:
    """Whether a module's code may tell a tensor without data by its exact type."""
    todo: list[Any] = [cls.forward, getattr(cls, "message", None)]  # type: ignore[attr-defined]
    seen: set[CodeType] = set()
    while todo:
        function = todo.pop()
        todo += [f for f in (getattr(function, "__wrapped__", None),) if f is not None]
        code = getattr(function, "__code__", None)
        home = (getattr(function, "__module__", None) or "").partition(".")[0]
        if not isinstance(code, CodeType) or code in seen or home in ("torch", "torch_geometric"):
            continue
        seen.add(code)
        names = set(_names(code))
        if names & {"type", "__class__"}:
            return True
        todo += [getattr(cls, name, None) for name in names]
        todo += [function.__globals__.get(name) for name in names]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def settle_items(values: Any, depth: int = 3) -> None:
    """Replace what was put off by its data, in containers that stay the same objects."""
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        if type(value) in _CONTAINERS and depth:
            settle_items(value, depth - 1)
        elif (data := settled(value)) is not value and (
            isinstance(value, Deferred) or any(isinstance(v, Deferred) for v in tree_leaves(value))
        ):
            values[key] = data
