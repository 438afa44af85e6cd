"""``graphed()``: a model whose calls are replayed from CUDA graphs."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_accel.cuda_graphs.engine import Engine
from pyg_accel.cuda_graphs.inputs import names_of
from pyg_accel.cuda_graphs.state import modules_of

__all__ = ["Graphed", "graphed"]

_OWN = frozenset({"_original", "_options", "_engine"})
# What torch.nn.Module keeps of the parts of a module: the same objects in the wrapper.
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def graphed(
    model: torch.nn.Module,
    *,
    dynamic: bool | None = None,
    max_captures: int = 8,
    roles: Mapping[str, str] | None = None,
) -> "Graphed":
    """Replay the calls of a model, forward and backward, from CUDA graphs.

    The first calls of a kind run eagerly; then the call is captured, compared with eager calls, and
    replayed. A kind is made of shapes, dtypes, ``train()`` or ``eval()``, grad mode, autocast and
    the model's parameters as objects; another kind is captured anew. Where sizes change from batch
    to batch, nodes, edges and graphs are padded to a few sizes, and padding is kept out of
    normalisation, pooling and results. What cannot be captured runs eagerly, and
    :func:`pyg_accel.report` says why; so does everything without a CUDA device.

    Args:
        model: any module; it is not changed, and its parameters are shared.
        dynamic: True pads from the start, False never does; None pads once sizes have changed.
        max_captures: how many captures are kept; the least recently used goes.
        roles: what arguments are, by name, where names and sizes do not tell: ``"nodes"``,
            ``"edges"`` or ``"graphs"`` (a row for each), ``"edge_index"``, ``"batch"``, ``"ptr"``
            or ``"fixed"``.

    Returns:
        A module that is called like ``model``, with its attributes and ``state_dict()``.

    Raises:
        ValueError: if ``model`` is no module, or for unknown roles.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"expected 'model' to be a torch.nn.Module (got {model!r})")
    if isinstance(model, Graphed):
        model = model._original
    return Graphed(model, dynamic=dynamic, max_captures=max_captures, roles=dict(roles or {}))


class _Model:
    """A model as what is captured."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self.name, self.roots = model, type(model).__name__, (model,)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def reasons(self) -> list[str]:
        return []

    def key(self) -> None:
        return None

    def tensors(self) -> list[Tensor]:
        return list(dict.fromkeys(b for m in modules_of(self.roots) for b in m._buffers.values()
                                  if b is not None))  # fmt: skip

    def evidence(self) -> dict[str, list[Tensor]]:
        return {"buffer": self.tensors()}

    def prepare(self) -> None:
        """Nothing to do."""

    def recorded(self) -> None:
        return None

    def finish(self, left: Any) -> None:
        """Nothing to do."""


class Graphed(torch.nn.Module):
    """A model, and the captures of its calls; made by :func:`graphed`."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        """Wrap a model."""
        super().__init__()
        own = vars(self)
        own.update({name: vars(model)[name] for name in _SHARED})
        own.update(_original=model, _options=options)
        del own["training"]  # that of the model is found by __getattr__
        own["_engine"] = Engine(
            _Model(model), names_of(model.forward), differentiable=True, **options
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self._original(*args, **kwargs)
        return self._engine(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            vars(self)[name] = value
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._original)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._original!r})"

    def train(self, mode: bool = True) -> "Graphed":
        """Set the mode of the model."""
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return that of the model."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load it into the model."""
        return self._original.load_state_dict(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Return those of the model, itself first."""
        found: Iterator[tuple[str, torch.nn.Module]] = self._original.named_modules(*args, **kwargs)
        return found

    def _apply(self, *args: Any, **kwargs: Any) -> "Graphed":
        self._original._apply(*args, **kwargs)
        return self

    def __reduce__(self) -> Any:
        return _again, (self._original, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Graphed":
        import copy

        return graphed(copy.deepcopy(self._original, memo), **self._options)

    @property
    def captures(self) -> list[str]:
        """What has been captured and is still kept."""
        found: list[str] = vars(self)["_engine"].captures
        return found

    def release(self) -> None:
        """Free all captures; calls that come again are captured again."""
        vars(self)["_engine"].release()


def _again(model: torch.nn.Module, options: Mapping[str, Any]) -> Graphed:
    return graphed(model, **options)
