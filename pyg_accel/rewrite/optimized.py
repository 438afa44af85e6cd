"""What ``optimize()`` returns: the model itself, whose layers run their programs meanwhile."""

import functools
import weakref
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from pyg_accel.patching import embedding
from pyg_accel.patching.reasons import has_hooks
from pyg_accel.rewrite.layer import RewrittenLayer
from pyg_accel.rewrite.override import RUNNING, Runners, install, uninstall
from pyg_accel.rewrite.select import Options
from pyg_accel.rewrite.trace import Unreadable, read

__all__ = ["OptimizedModel", "rewritten_layers"]

# What the wrapper has in common with the model: torch looks into these tables of both.
_TABLES = (
    "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules",
    "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
# Methods of every module that are not the model's: its calls and the hooks on them.
_OWN_METHODS = frozenset((
    "forward", "compile", "register_backward_hook", "register_forward_hook",
    "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "_call_impl", "_get_backward_hooks",
    "_get_backward_pre_hooks", "_get_name", "_maybe_warn_non_full_backward_hook", "_slow_forward",
    "_wrapped_call_impl",
))  # fmt: skip
_STATE = frozenset(("_orig_mod", "_opt_layers", "_opt_options", "_opt_static", "_opt_example"))
_OF_EVERY_MODULE = vars(torch.nn.Module()).keys() - {"training", *_TABLES}
_OWN = _STATE | frozenset(_TABLES) | _OF_EVERY_MODULE | {"forward", "_compiled_call_impl"}


class OptimizedModel(torch.nn.Module):
    """Calls a model, and its layers run the fastest order of their products meanwhile.

    Attributes, methods, parameters, names and modes are those of the model, which is unchanged
    wherever it is called itself. Hooks on calls are its own.

    Args:
        model: any module.
        options: of ``optimize()``.
        static: names of the arguments of the model that are the same tensors in every call.
        example: :func:`~pyg_accel.rewrite.trace.kinds_of` the arguments of a call, by name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        static: tuple[str, ...] = (),
        example: Mapping[str, Any] | None = None,
    ) -> None:
        """Share what the model holds."""
        super().__init__()
        own = vars(self)
        del own["training"]
        own.update({table: vars(model)[table] for table in _TABLES})
        layers = _runners(model, options)
        own.update(_orig_mod=model, _opt_layers=layers, _opt_options=options, _opt_static=static,
                   _opt_example=example, forward=_forward(model, layers, static))  # fmt: skip
        install()
        weakref.finalize(self, uninstall)

    def __getattr__(self, name: str) -> Any:
        """Return what the model has under a name."""
        model = vars(self).get("_orig_mod")
        if model is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign to the model what is the model's."""
        if name in _OWN or "_orig_mod" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete what is the model's."""
        if name in _OWN:
            super().__delattr__(name)
        else:
            delattr(self._orig_mod, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Save the model, and what it was made with; decisions are made anew."""
        own = vars(self)
        state = {name: own[name] for name in _OF_EVERY_MODULE}
        return type(self), (self._orig_mod, self._opt_options, self._opt_static,
                            self._opt_example), state  # fmt: skip

    def __copy__(self) -> "OptimizedModel":
        """Return another one of the same model."""
        make, given, _ = self.__reduce__()
        return make(*given)  # type: ignore[no-any-return]

    def __dir__(self) -> list[str]:
        """Name what the model has too."""
        return sorted({*object.__dir__(self), *dir(self._orig_mod)})

    def __repr__(self) -> str:
        """Show the model."""
        return f"{type(self).__name__}({self._orig_mod!r})"

    @property
    def unread(self) -> dict[str, str]:
        """Why no graph of the model's calls can be drawn, if that is so; they run all the same."""
        try:
            read(self._orig_mod, self._opt_example or {})
        except Unreadable as reason:
            return {"": str(reason)}
        return {}


def _of_the_model(name: str) -> Callable[..., Any]:
    """A method that calls the model's, and returns the wrapper in place of the model."""

    @functools.wraps(vars(torch.nn.Module)[name])
    def method(self: OptimizedModel, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self._orig_mod, name)(*args, **kwargs)
        return self if found is self._orig_mod else found

    return method


for _name, _value in vars(torch.nn.Module).items():
    if callable(_value) and not _name.startswith("__") and _name not in _OWN_METHODS:
        setattr(OptimizedModel, _name, _of_the_model(_name))


def rewritten_layers(fast: OptimizedModel) -> dict[str, RewrittenLayer]:
    """Return what runs the layers of an optimised model, by path."""
    found = {path: fast._opt_layers.get(module) for path, module in fast.named_modules()}
    return {path: layer for path, layer in found.items() if isinstance(layer, RewrittenLayer)}


def _runners(model: torch.nn.Module, options: Options) -> Runners:
    """What is called in place of layers and embeddings, but for those inside of layers."""
    found: dict[torch.nn.Module, Callable[..., Any]] = {}
    todo = [model]
    for module in todo:  # as it grows
        if isinstance(module, MessagePassing):
            found.setdefault(module, RewrittenLayer(module, options))
        elif type(module) is torch.nn.Embedding:
            found[module] = _Embedding(module)
        elif isinstance(module, OptimizedModel):
            found.update(module._opt_layers)
        else:
            todo += module.children()
    return found


class _Embedding:
    """``torch.nn.Embedding`` with the gradient that ``patch()`` gives it."""

    def __init__(self, module: torch.nn.Embedding) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or has_hooks(self.module) or len(args) != 1 or kwargs:
            return self.module(*args, **kwargs)
        return embedding.forward(torch.nn.Embedding.forward, self.module, *args, always=True)


def _forward(
    model: torch.nn.Module, layers: Runners, static: tuple[str, ...]
) -> Callable[..., Any]:
    """Return a function that runs a model with its own layers; its signature is the model's."""

    def fixed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = signature(model.forward).bind_partial(*args, **kwargs).arguments
        values = [given.get(name) for name in static]
        return tuple(t for v in values for t in (v if isinstance(v, (tuple, list)) else (v,)))

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before = RUNNING.layers, RUNNING.static
        RUNNING.layers = layers
        RUNNING.static = fixed(args, kwargs) if static else ()
        try:
            return model(*args, **kwargs)
        finally:
            RUNNING.layers, RUNNING.static = before

    return forward
