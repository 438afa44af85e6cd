"""Functions that mix rows, told to leave padding out, while a padded call is made.

Whatever mixes rows and is not known here is found when results are compared with those of the
unpadded call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import GraphNorm, GraphSizeNorm, InstanceNorm

from pyg_accel.cuda_graphs.batch_norm import masked_batch_norm
from pyg_accel.cuda_graphs.inputs import Uncapturable
from pyg_accel.cuda_graphs.padding import Padding

__all__ = ["Constants", "Known", "Masked", "masked_modules"]

# What rows of padding are set to before a function takes all rows together.
_FILL = {
    "sum": 0.0, "nansum": 0.0, "norm": 0.0, "vector_norm": 0.0, "count_nonzero": 0.0,
    "max": -torch.inf, "amax": -torch.inf, "argmax": -torch.inf, "logsumexp": -torch.inf,
    "softmax": -torch.inf, "min": torch.inf, "amin": torch.inf, "argmin": torch.inf,
    "prod": 1.0, "any": False, "all": True,
}  # fmt: skip
_MOMENTS = ("mean", "var", "std", "var_mean", "std_mean")
_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.cross_entropy, F.nll_loss,
)  # fmt: skip
_BY_INDEX = (
    "index_select", "index_add", "index_add_", "index_reduce", "index_reduce_", "scatter",
    "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
)  # fmt: skip


class Constants(TorchFunctionMode):
    """Makes tensors of Python numbers on the device, without a copy that the host waits for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and len(args) == 1 and type(args[0]) in (bool, int, float):
            return torch.full((), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Known(TorchFunctionMode):
    """Answers for the largest id in a tensor that is the same in every replay.

    PyG asks for it to learn the number of nodes or graphs, and would wait for the device.
    """

    def __init__(self, largest: Sequence[tuple[Tensor, int]]) -> None:
        super().__init__()
        self._largest = largest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.max, Tensor.max) and len(args) == 1 and not kwargs:
            for tensor, most in self._largest:
                if args[0] is tensor:
                    return torch.tensor(most, dtype=tensor.dtype)
        return func(*args, **(kwargs or {}))


class Masked(TorchFunctionMode):
    """Leaves the padding of a call out of batch normalisation, reductions over rows, and losses."""

    def __init__(self, padding: Padding) -> None:
        super().__init__()
        self._padding = padding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        if func is F.batch_norm:
            return self._batch_norm(func, *args, **kwargs)
        if func in _LOSSES:
            return self._loss(func, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._padding.batch is not None and name in (*_BY_INDEX, "__getitem__", "max"):
            if name == "max" and len(args) == 1 and not kwargs and self._is_batch(args[0]):
                return torch.tensor(self._padding.layout.bucket["graphs"], dtype=args[0].dtype)
            self._check(name, args, kwargs)
        if name in _FILL or name in _MOMENTS:
            return self._reduction(func, name, args, kwargs)
        if name in ("scatter_reduce", "scatter_reduce_"):
            return self._scatter_reduce(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _is_batch(self, value: Any) -> bool:
        batch = self._padding.batch
        return (
            isinstance(value, Tensor)
            and batch is not None
            and value.dtype == batch.dtype
            and value.numel() >= batch.numel()
            and value.device == batch.device
            and value.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
        )

    def _check(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a number of graphs that is no argument: ids of padding would lie outside of it."""
        given = [*args[1:], *kwargs.values()]
        if not any(self._is_batch(value) for value in given):
            return
        dim = 0 if name == "__getitem__" else next((v for v in given if type(v) is int), 0)
        if args[0].size(dim) <= self._padding.layout.bucket["graphs"]:
            raise Uncapturable("it has a number of graphs of its own")

    def _batch_norm(
        self,
        func: Callable[..., Any],
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        axis = self._padding.axis_of(x)
        if axis is None or x.dim() < 2 or not (training or running_mean is None):
            return func(x, running_mean, running_var, weight, bias, training, momentum, eps)
        rows = self._padding.rows(axis)
        return masked_batch_norm(x, rows, running_mean, running_var, weight, bias, momentum, eps)

    def _scatter_reduce(
        self, func: Callable[..., Any], out: Tensor, dim: int, index: Tensor, src: Tensor,
        reduce: str, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Let padding be ones in products: of many rows they might be infinite."""
        axis = self._padding.axis_of(src)
        if reduce == "prod" and axis is not None and dim % src.dim() == 0:
            src = src.masked_fill(self._padding.void(axis, src), 1)
        return func(out, dim, index, src, reduce=reduce, **kwargs)

    def _reduction(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        x = args[0]
        axis = self._padding.axis_of(x)
        if axis is None or (len(args) > 1 and isinstance(args[1], Tensor)):
            return func(*args, **kwargs)
        place = 2 if name in ("norm", "vector_norm") else 1
        dims: Any = kwargs.get("dim", args[place] if len(args) > place else None)
        if isinstance(dims, bool):  # var(unbiased)
            dims, kwargs, args = None, kwargs | {"correction": int(dims)}, args[:1]
        listed = list(range(x.dim())) if dims is None else [dims] if type(dims) is int else dims
        listed = [dim % x.dim() for dim in listed] or list(range(x.dim()))
        if 0 not in listed:
            return func(*args, **kwargs)
        void = self._padding.void(axis, x)
        if name in _FILL:
            return func(_filled(x, void, _FILL[name]), *args[1:], **kwargs)
        others = 1
        for dim in listed:
            others *= x.size(dim) if dim else 1
        count = self._padding.rows(axis).count * others
        return _moments(name, x, void, count, listed, args, kwargs)

    def _loss(
        self, func: Callable[..., Any], input: Tensor, target: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        axis = self._padding.axis_of(input)
        reduction = kwargs.get("reduction", "mean")
        positional = args and any(isinstance(a, str) for a in args)
        if axis is None or positional or reduction == "none":
            return func(input, target, *args, **kwargs)
        void = self._padding.void(axis, target)
        if func in (F.cross_entropy, F.nll_loss) and not target.is_floating_point():
            ignored = kwargs.get("ignore_index", -100)
            return func(input, target.masked_fill(void, ignored), *args, **kwargs)
        each = func(input, target, *args, **(kwargs | {"reduction": "none"}))
        total = each.masked_fill(self._padding.void(axis, each), 0).sum()
        if reduction == "sum":
            return total
        return total / (self._padding.rows(axis).count * each[0].numel())


def _filled(x: Tensor, void: Tensor, value: float) -> Tensor:
    if x.dtype == torch.bool:
        return x | void if value else x & ~void
    if not x.is_floating_point() and abs(value) == torch.inf:
        bounds = torch.iinfo(x.dtype)
        value = bounds.max if value > 0 else bounds.min
    return x.masked_fill(void, value)


def _moments(
    name: str,
    x: Tensor,
    void: Tensor,
    count: Tensor,
    dims: list[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return a mean, a variance or a deviation of the real rows."""
    keep = bool(kwargs.get("keepdim", args[2] if name == "mean" and len(args) > 2 else False))
    dtype = kwargs.get("dtype") or x.dtype
    wide = x.float() if dtype in (torch.half, torch.bfloat16) else x.to(dtype)
    mean = wide.masked_fill(void, 0).sum(dims, keepdim=True) / count

    def shaped(value: Tensor) -> Tensor:
        return (value if keep else value.squeeze(dims)).to(dtype)

    if name == "mean":
        return shaped(mean)
    correction = kwargs.get("correction", 1)
    correction = int(kwargs["unbiased"]) if "unbiased" in kwargs else correction
    squares = (wide - mean).masked_fill(void, 0).square().sum(dims, keepdim=True)
    spread = squares / (count - (1 if correction is None else correction))
    if name.startswith("std"):
        spread = spread.sqrt()
    return (shaped(spread), shaped(mean)) if name.endswith("mean") else shaped(spread)


# Their way without a batch vector makes one of zeros.
_ONE_GRAPH = (GraphNorm, GraphSizeNorm, InstanceNorm)


@contextmanager
def masked_modules(modules: Sequence[torch.nn.Module], padding: Padding) -> Iterator[None]:
    """Let layers that take all rows for one graph know that padding is another."""

    def two_graphs(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        x = args[0] if args else kwargs.get("x")
        batch = args[1] if len(args) > 1 else kwargs.get("batch")
        axis = padding.axis_of(x)
        if batch is not None or axis is None:
            return None
        ids = padding.rows(axis).padding.long()
        return (x,), {"batch": ids, "batch_size": 2}

    with ExitStack() as hooks:
        for module in modules:
            if isinstance(module, _ONE_GRAPH):
                hook = module.register_forward_pre_hook(two_graphs, with_kwargs=True)
                hooks.callback(hook.remove)
        yield
