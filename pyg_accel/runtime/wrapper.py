"""Base of modules that wrap a model: they change its calls, and share all other attributes."""

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OF_EVERY_MODULE", "ModelWrapper"]

# Attributes that torch reads directly: wrapper and model share the objects.
_TABLES = (
    "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules",
    "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
OF_EVERY_MODULE = vars(torch.nn.Module()).keys() - {"training", *_TABLES}
# Methods of the wrapper itself: calls, and hooks on them.
_OWN_METHODS = frozenset((
    "forward", "compile", "register_backward_hook", "register_forward_hook",
    "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "_call_impl", "_get_backward_hooks",
    "_get_backward_pre_hooks", "_maybe_warn_non_full_backward_hook", "_slow_forward",
    "_wrapped_call_impl",
))  # fmt: skip


class ModelWrapper(torch.nn.Module):
    """Has the attributes, methods, parameters, names and modes of a model, but separate hooks.

    Args:
        model: any module.
        own: attributes of the wrapper; subclasses name them in ``_own``.
    """

    _own: frozenset[str] = frozenset()

    def __init__(self, model: torch.nn.Module, **own: Any) -> None:
        """Share the tables of the model."""
        super().__init__()
        del vars(self)["training"]
        vars(self).update({table: vars(model)[table] for table in _TABLES})
        vars(self).update(own, _original=model)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model."""
        model = vars(self).get("_original")
        if model is None or name == "__deepcopy__":  # a copy of a wrapper is a wrapper
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign to the model, unless it is an attribute of the wrapper."""
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete from the model, unless it is an attribute of the wrapper."""
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._original, name)

    def _is_own(self, name: str) -> bool:
        return (
            name in ("_original", "_compiled_call_impl", *_TABLES)
            or name in OF_EVERY_MODULE
            or name in self._own
            or "_original" not in vars(self)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Save the arguments and the hooks."""
        own = vars(self)
        return type(self), self._arguments(), {name: own[name] for name in OF_EVERY_MODULE}

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments of an equal wrapper."""
        return (self._original,)

    def __dir__(self) -> list[str]:
        """Add the names of the model."""
        return sorted({*object.__dir__(self), *dir(self._original)})

    def __repr__(self) -> str:
        """Show the model."""
        return f"{type(self).__name__}({self._original!r})"


def _of_the_model(name: str) -> Callable[..., Any]:
    """Return a method that calls the model's, and returns the wrapper instead of the model."""

    @functools.wraps(vars(torch.nn.Module)[name])
    def method(self: ModelWrapper, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._original, name)(*args, **kwargs)
        return self if result is self._original else result

    return method


for _name, _value in vars(torch.nn.Module).items():
    if callable(_value) and not _name.startswith("__") and _name not in _OWN_METHODS:
        setattr(ModelWrapper, _name, _of_the_model(_name))
