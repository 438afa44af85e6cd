"""``graphed_step()``: a whole step of training as one CUDA graph."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, update_wrapper
from inspect import getclosurevars, isfunction, ismethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pyg_accel.cuda_graphs.call import Subject, flatten, names_of, naming, replaced
from pyg_accel.cuda_graphs.engine import Engine, HasCaptures
from pyg_accel.cuda_graphs.model import Graphed

__all__ = ["GraphedStep", "graphed_step"]

_SETTINGS = 8  # more different settings of an optimizer mean a schedule


def graphed_step(
    step_function: Callable[..., Any], *, modules: Iterable[torch.nn.Module] | None = None,
    dynamic: bool | None = None, max_captures: int = 8, roles: Mapping[str, str] | None = None,
) -> "GraphedStep":  # fmt: skip
    """Replay a function that does forward, backward and optimizer from a CUDA graph.

    It works like :func:`pyg_accel.graphed`: the first calls run eagerly, kinds of calls are
    captured and compared, and other calls stay eager, with the reason in
    :func:`pyg_accel.report`. Optimizers with a ``capturable`` option need it; a learning rate that
    changes must be a tensor, or each change is another kind. Losses of ``torch.nn.functional`` and
    means over rows do not count padding.

    Args:
        step_function: takes tensors and returns values to log, such as the loss.
        modules: the models that it trains; by default the modules that it refers to.
        dynamic: True pads from the start, False never does; None pads once sizes have changed.
        max_captures: number of stored captures; the least recently used is dropped.
        roles: roles of arguments by name; see :func:`pyg_accel.graphed`.

    Returns:
        A function that is called like ``step_function``; its results have no gradients.

    Raises:
        ValueError: if ``step_function`` is not callable, or for unknown roles.
    """
    if not callable(step_function) or isinstance(step_function, torch.nn.Module):
        raise ValueError(f"expected 'step_function' to be a function (got {step_function!r})")
    trained = list(_modules_in(_refers_to(step_function)) if modules is None else modules)
    return GraphedStep(step_function, trained, dynamic=dynamic, max_captures=max_captures,
                       roles=dict(roles or {}))  # fmt: skip


def _refers_to(function: Any) -> list[Any]:
    """Return the objects that a function can refer to: closure, globals, bound arguments."""
    if isinstance(function, partial):
        return [function.args, function.keywords, *_refers_to(function.func)]
    if ismethod(function):
        return [vars(function.__self__), *_refers_to(function.__func__)]
    return [*getclosurevars(function)[:2]] if isfunction(function) else [vars(function)]


def _modules_in(value: Any) -> Iterator[torch.nn.Module]:
    if isinstance(value, torch.nn.Module):
        yield value._original if isinstance(value, Graphed) else value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(item)


class GraphedStep(HasCaptures):
    """A step, and the captures of its calls; made by :func:`graphed_step`."""

    def __init__(
        self, function: Callable[..., Any], modules: Sequence[torch.nn.Module], **options: Any
    ) -> None:
        """Wrap a function."""
        update_wrapper(self, function, updated=())
        step = _Step(function, modules)
        self._engine = Engine(step, names_of(function), differentiable=False, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step."""
        return self._engine(args, kwargs)


class _Step(Subject):
    """A step to capture."""

    def __init__(self, function: Callable[..., Any], roots: Sequence[torch.nn.Module]) -> None:
        super().__init__(self._step, roots, getattr(function, "__name__", type(function).__name__))
        self._function = function
        self._optimizers: dict[Optimizer, None] = {}
        self._settings: dict[Any, None] = {}
        self._fresh: dict[Tensor, bool] = {}  # whether a step replaces the gradient

    @property
    def _parameters(self) -> list[Tensor]:
        return self.of_modules("_parameters")

    @property
    def _groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        return [(o, group) for o in self._optimizers for group in o.param_groups]

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        def note(optimizer: Optimizer, *_: Any) -> None:
            self._optimizers[optimizer] = None

        before = [(p, p.grad) for p in self._parameters]
        handle = register_optimizer_step_post_hook(note)
        try:
            with naming(self._function, args, kwargs):
                value = self._function(*args, **kwargs)
        finally:
            handle.remove()
        self._fresh = {p: grad is not None and p.grad is not grad for p, grad in before}
        return replaced(value, iter([out.detach() for out in flatten(value)]))

    def reasons(self) -> list[str]:
        if not self.roots:
            return ["it refers to no module: pass modules="]
        parameters = set(self._parameters)
        for optimizer, group in self._groups:
            name, params = type(optimizer).__name__, group["params"]
            if any(p.is_cuda for p in params) and group.get("capturable") is False:
                return [f"{name} is not capturable: make it with capturable=True"]
            if any(p not in parameters for p in params):
                return [f"{name} has parameters of other modules: pass modules="]
        if len(self._settings) > _SETTINGS:
            return ["the settings of an optimizer change all the time: make lr a tensor"]
        return []

    def key(self) -> Any:
        settings = tuple(
            tuple((k, id(v) if isinstance(v, Tensor) else tuple(v) if type(v) is list else v)
                  for k, v in group.items() if k not in ("params", "param_names"))
            for _, group in self._groups
        )  # fmt: skip
        self._settings[settings] = None
        grads = tuple(
            True if self._fresh.get(p) else None if p.grad is None else id(p.grad)
            for p in self._parameters
        )
        return settings, grads, tuple(id(t) for _, _, t in self._optimizer_state())

    def _optimizer_state(self) -> list[tuple[Tensor, str, Tensor]]:
        """Return the state of optimizers: parameter, name and tensor."""
        return [
            (p, name, value)
            for optimizer, group in self._groups
            for p in group["params"]
            for name, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        ]

    def tensors(self) -> list[Tensor]:
        grads = [p.grad for p in self._parameters if p.grad is not None and not self._fresh.get(p)]
        state = [value for _, _, value in self._optimizer_state()]
        return list(dict.fromkeys([*self._parameters, *grads, *state]))

    def evidence(self) -> dict[str, list[Tensor]]:
        """Return the state of optimizers, and parameters without averages in such a state.

        Adam turns a gradient of rounding errors into a full step, so parameters may differ while
        averages of gradients agree.
        """
        evidence, averaged = super().evidence(), set()
        for p, name, value in self._optimizer_state():
            evidence.setdefault(f"'{name}' of a parameter", []).append(value)
            if value.shape == p.shape and value.dim():
                averaged.add(p)
        evidence["parameter"] = [p for p in self._parameters if p not in averaged]
        return evidence

    def prepare(self) -> None:
        for p in self._parameters:
            if self._fresh.get(p):
                p.grad = None  # the step allocates a new one

    def recorded(self) -> Any:
        return [(p, p.grad) for p in self._parameters], self._optimizer_state()

    def finish(self, left: Any) -> None:
        for p, grad in left[0]:
            if p.grad is not grad:
                p.grad = grad
