"""Steps with a layer, and a comparison of what they give with what stock PyG gives."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_accel.settings import settings

N, E, WIDTH = 10, 40, 8
Step = Callable[[Any], Any]
Context = Callable[[Any], AbstractContextManager[Any]]


def graph(edges: int = E, nodes: int = N, seed: int = 0) -> Tensor:
    return torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (N, WIDTH)), generator=torch.Generator().manual_seed(seed))


EDGES, OTHER_EDGES, FEW = graph(), graph(seed=1), graph(7)
X, MORE_NODES = features(), features(N + 3, WIDTH)
WEIGHT, COLUMN = features(E, seed=1).abs(), features(E, 1, seed=2).abs()
THREE = features(E, 3, seed=4)
ROW, OTHER_ROW = features(1, WIDTH), features(1, WIDTH, seed=1)


class Outcome:
    """Results and gradients of a step, and the next random number; or the error that it raised."""

    def __init__(self, layer: nn.Module, step: Step) -> None:
        torch.manual_seed(5)
        for p in layer.parameters():
            p.grad = None
        self.error: type[Exception] | None = None
        self.tensors: list[Tensor] = []
        try:
            outs = step(layer)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            self.error = type(error)
            return
        self.after = torch.rand(1)
        outs = [t for t in tree_leaves(outs) if isinstance(t, Tensor)]
        if any(t.requires_grad for t in outs):
            sum((t * t.detach().cos()).sum() for t in outs if t.requires_grad).backward()
        self.tensors = [t.detach().clone() for t in outs if t.is_floating_point()]
        self.tensors += [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    def equals(self, right: "Outcome", step: str) -> None:
        assert self.error == right.error, step
        assert len(self.tensors) == len(right.tensors), step
        for mine, t in zip(self.tensors, right.tensors, strict=True):
            assert mine.dtype == t.dtype, step
            finite = t[t.isfinite()].abs().double()
            scale = max(float(finite.max()) if finite.numel() else 0.0, 1.0)
            near = 2e-5 if t.dtype in (torch.float32, torch.float64) else 2e-2
            torch.testing.assert_close(mine, t, rtol=0, atol=near * scale, equal_nan=True,
                                       msg=lambda m: f"{step}: {m}")  # fmt: skip
        if self.error is None:
            assert torch.equal(self.after, right.after), f"{step}: random numbers"


def call(*args: Any, **kwargs: Any) -> Step:
    return lambda layer: layer(*(args or (X, EDGES)), **kwargs)


def setting(name: str, value: Any, then: Step | None = None) -> Step:
    """Assign to an attribute, given by its path, and call."""

    def step(layer: Any) -> Any:
        path, _, last = name.rpartition(".")
        setattr(layer.get_submodule(path), last, value)
        return (then or call())(layer)

    return step


def first(change: Callable[[Any], Any], then: Step | None = None) -> Step:
    """Change a layer, without gradients, and call."""

    def step(layer: Any) -> Any:
        with torch.no_grad():
            change(layer)
        return (then or call())(layer)

    return step


def under(*contexts: Context, run: Step | None = None, times: int = 2) -> Step:
    """Call in contexts that a layer is given to."""

    def step(layer: Any) -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(layer))
            return [(run or call())(layer) for _ in range(times)]

    return step


def replaced(owner: Any, name: str, value: Any) -> Context:
    """Another attribute or item meanwhile; of a part of the layer if its path is given."""

    @contextmanager
    def context(layer: Any) -> Iterator[None]:
        if not isinstance(owner, str):
            with pytest.MonkeyPatch.context() as patch:
                if isinstance(owner, dict):
                    patch.setitem(owner, name, value)
                else:
                    patch.setattr(owner, name, value, raising=False)
                yield
            return
        part = layer.get_submodule(owner)
        before = part._modules.get(name)
        setattr(part, name, value)
        yield
        setattr(part, name, before) if before is not None else delattr(part, name)

    return context


def multiplied(owner: Any, name: str, factor: float) -> Context:
    """A method that returns more meanwhile."""

    def context(layer: Any) -> AbstractContextManager[None]:
        method = getattr(layer.get_submodule(owner) if isinstance(owner, str) else owner, name)
        more = lambda *args, **kwargs: method(*args, **kwargs) * factor  # noqa: E731
        return replaced(owner, name, more)(layer)

    return context


def hooked(path: str = "", hook: Callable[..., Any] = lambda m, i, out: out * 3,
           kind: str = "forward") -> Context:  # fmt: skip
    @contextmanager
    def context(layer: Any) -> Iterator[None]:
        handle = getattr(layer.get_submodule(path), f"register_{kind}_hook")(hook)
        yield
        handle.remove()

    return context


@contextmanager
def hooked_everywhere(layer: Any) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, out: out * 2)
    yield
    handle.remove()


@contextmanager
def default_device(layer: Any) -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


def frozen(path: str) -> Context:
    @contextmanager
    def context(layer: Any) -> Iterator[None]:
        layer.get_submodule(path).requires_grad_(False)
        yield
        layer.get_submodule(path).requires_grad_(True)

    return context


def of(context: Callable[..., AbstractContextManager[Any]], *args: Any, **kwargs: Any) -> Context:
    """A context that has nothing to do with the layer."""
    return lambda layer: context(*args, **kwargs)


def set_to(name: str, value: Any) -> Context:
    @contextmanager
    def context(layer: Any) -> Iterator[None]:
        setattr(settings, name, value)
        yield
        setattr(settings, name, "auto" if name == "backend" else None)

    return context


def autocast(dtype: torch.dtype, *more: Tensor) -> Step:
    run = lambda layer: layer(X, EDGES, *more).to(dtype)  # noqa: E731
    return under(of(torch.autocast, "cpu", dtype), of(torch.no_grad), run=run, times=1)


def inference(*more: Tensor) -> Step:
    run = lambda layer: layer(X.clone(), EDGES, *more)  # noqa: E731
    inside = under(of(torch.inference_mode), run=run, times=1)
    return lambda layer: inside(layer)[0].clone()


def gradient_of(place: int, *args: Tensor) -> Step:
    """A result, and the gradient of an argument."""

    def step(layer: Any) -> Any:
        leaf = args[place].clone().requires_grad_()
        out = layer(*args[:place], leaf, *args[place + 1 :])
        return out, *torch.autograd.grad(out.square().sum(), [leaf], retain_graph=True)

    return step
