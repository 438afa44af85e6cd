"""Keeps padding out of functions that mix rows, in a padded call.

Why a table of functions. A padded call runs the code of the model, which is not written for
padding. One mode (:class:`~.functions.Functions`) sees every call of a torch function, and the
number of rows of an argument tells whether they are nodes, edges or graphs (:mod:`.padding`).
Functions that mix rows skip padding: batch normalisation counts real rows, reductions read their
neutral element, means divide by the number of real rows, losses ignore padding. Modules of PyG that
treat all rows as one graph get a second graph with the padding.

Why the table need not be complete. A function that mixes rows and is not in the table (a sort, a
cumulative sum, a product with a matrix over all rows) changes the result. Trials compare padded and
unpadded calls, with padding unlike real rows, before a recording is used (:mod:`.trial`). A call
that differs stays eager.

Why slices are checked before they are read. A model that takes half of its nodes takes a different
half of padded nodes, and edges of padding have ids outside of it. On a CUDA device, indexing with
these ids fails an assertion, after which the process cannot use the device any more. So the
unpadded call must take the same slice, or the slice ends at an integer of the call that has a
bucket. Later calls must have as many real rows: with padding there are always enough rows.

Why numbers of graphs are checked. ``global_add_pool(x, batch, size=8)`` has no room for the graph
of padding, whose id would be out of range, so it is refused too.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GraphNorm, GraphSizeNorm, InstanceNorm

from pyg_accel.cuda_graphs.batch_norm import masked_batch_norm, moments
from pyg_accel.cuda_graphs.call import Uncapturable
from pyg_accel.cuda_graphs.functions import Functions, Handler
from pyg_accel.cuda_graphs.padding import Padding, Part
from pyg_accel.cuda_graphs.self_loops import SelfLoops
from pyg_accel.record.edge_tensors import name_of
from pyg_accel.runtime.cache import memory_of

__all__ = ["masked", "parts_taken"]

_PARTS = ("__getitem__", "chunk", "narrow", "split", "split_with_sizes", "tensor_split",
          "unsafe_chunk", "unsafe_split")  # fmt: skip
_Cuts = set[tuple[str, str]]  # an integer that counts the first rows of an axis, and the axis
# The value of rows of padding for functions that reduce all rows.
_FILL: dict[str, float] = {
    **dict.fromkeys(("sum", "nansum", "norm", "vector_norm", "count_nonzero", "any"), 0.0),
    **dict.fromkeys(("max", "amax", "argmax", "logsumexp", "softmax"), -torch.inf),
    **dict.fromkeys(("min", "amin", "argmin"), torch.inf), "prod": 1.0, "all": 1.0,
}  # fmt: skip
_MOMENTS = ("mean", "var", "std", "var_mean", "std_mean")
_LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
           F.binary_cross_entropy_with_logits, F.cross_entropy, F.nll_loss)  # fmt: skip
_BY_INDEX = ("index_select", "index_add", "index_add_", "index_reduce", "index_reduce_", "scatter",
             "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
             "scatter_reduce_")  # fmt: skip
# Without a batch vector, they treat all rows as one graph.
_ONE_GRAPH = (GraphNorm, GraphSizeNorm, InstanceNorm)


class _Masks:
    """The handlers of one padded call; see :func:`masked`."""

    def __init__(self, padding: Padding, parts: Collection[Part], cuts: _Cuts) -> None:
        self._padding, self._parts, self._cuts = padding, parts, cuts
        self._axes = {rows: axis for axis, rows in padding.layout.rows.items()}

    def table(self) -> dict[Any, Handler]:
        loops = SelfLoops(self._padding)
        self._selected = loops.selected
        handlers: dict[Any, Handler] = {
            **loops.table(),
            **dict.fromkeys(_BY_INDEX, self._by_index),
            **dict.fromkeys((*_FILL, *_MOMENTS), self._reduction),
            **dict.fromkeys(_LOSSES, self._loss),
            **dict.fromkeys(_PARTS, self._part),
            F.batch_norm: self._batch_norm,
        }
        return {key: _with_tensor_first(handler) for key, handler in handlers.items()}

    def _part(self, func: Handler, whole: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = name_of(func)
        if name == "__getitem__":
            self._check(whole, 0, args)
            out = self._selected(func, whole, *args)
        else:
            out = func(whole, *args, **kwargs)
        for part, rows in _parts(whole, out):
            axis, number = self._axes.get(rows), self._axes.get(part[2], "")
            if axis is None:
                continue
            if part not in self._parts:
                raise Uncapturable(
                    f"it takes a part of its nodes or edges by their position ({name})"
                )
            if number in self._padding.layout.numbers:
                self._cuts.add((number, axis))
        return out

    def _is_batch(self, value: Any) -> bool:
        batch = self._padding.batch
        if batch is None or not isinstance(value, Tensor) or value.dtype != batch.dtype:
            return False
        return value.numel() >= batch.numel() and memory_of(value) == memory_of(batch)

    def _check(self, out: Tensor, dim: int, args: Sequence[Any]) -> None:
        """Refuse a result indexed with graph ids that has no row for the graph of padding."""
        graphs = self._padding.layout.bucket.get("graphs", 0)
        if out.size(dim) <= graphs and any(map(self._is_batch, args)):
            raise Uncapturable("it has a number of graphs of its own")

    def _by_index(self, func: Handler, out: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Set padding to 1 in products: products of many rows might overflow."""
        values = [*args, *kwargs.values()]
        dim = next((v for v in values if type(v) is int), 0)
        self._check(out, dim, values)
        if len(args) > 2 and name_of(func).startswith("scatter_reduce"):
            src, reduce = args[2], kwargs.get("reduce", args[3] if len(args) > 3 else "")
            axis = self._padding.axis_of(src)
            if reduce == "prod" and axis is not None and dim % src.dim() == 0:
                src = src.masked_fill(self._padding.void(axis, src), 1)
                args = (*args[:2], src, *args[3:])
        return func(out, *args, **kwargs)

    def _batch_norm(
        self, func: Handler, x: Tensor, running_mean: Tensor | None = None,
        running_var: Tensor | None = None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        axis = self._padding.axis_of(x)
        if axis is None or x.dim() < 2 or not (training or running_mean is None):
            return func(x, running_mean, running_var, weight, bias, training, momentum, eps)
        rows = self._padding.rows(axis)
        return masked_batch_norm(x, rows, running_mean, running_var, weight, bias, momentum, eps)

    def _reduction(self, func: Handler, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = name_of(func)
        if name == "max" and not args and not kwargs and self._is_batch(x):
            return torch.tensor(self._padding.layout.bucket["graphs"], dtype=x.dtype)
        axis = self._padding.axis_of(x)
        if axis is None or (args and isinstance(args[0], Tensor)):
            return func(x, *args, **kwargs)
        position = 1 if name in ("norm", "vector_norm") else 0
        dims: Any = kwargs.get("dim", args[position] if len(args) > position else None)
        if isinstance(dims, bool):  # var(unbiased)
            dims, kwargs, args = None, kwargs | {"correction": int(dims)}, ()
        listed = list(range(x.dim())) if dims is None else [dims] if type(dims) is int else dims
        listed = [dim % x.dim() for dim in listed] or list(range(x.dim()))
        if 0 not in listed:
            return func(x, *args, **kwargs)
        void = self._padding.void(axis, x)
        if name in _FILL:
            return func(x.masked_fill(void, _FILL[name]), *args, **kwargs)
        others = torch.Size([x.size(dim) for dim in listed if dim]).numel()
        count = self._padding.rows(axis).count * others
        return _moments(name, x, void, count, listed, args, kwargs)

    def _loss(self, func: Handler, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        axis = self._padding.axis_of(input)
        reduction = kwargs.get("reduction", "mean")
        if axis is None or reduction == "none" or any(isinstance(a, str) for a in args):
            return func(input, target, *args, **kwargs)
        if func in (F.cross_entropy, F.nll_loss) and not target.is_floating_point():
            ignored = kwargs.get("ignore_index", -100)
            void = self._padding.void(axis, target)
            return func(input, target.masked_fill(void, ignored), *args, **kwargs)
        losses = func(input, target, *args, **(kwargs | {"reduction": "none"}))
        total = losses.masked_fill(self._padding.void(axis, losses), 0).sum()
        if reduction == "sum":
            return total
        return total / (self._padding.rows(axis).count * losses[0].numel())


def _with_tensor_first(handler: Handler) -> Handler:
    """Return a handler that skips calls without a positional tensor."""

    def handle(func: Handler, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (Tensor, tuple, list)):
            return handler(func, *args, **kwargs)
        return func(*args, **kwargs)

    return handle


def _moments(
    name: str, x: Tensor, void: Tensor, count: Tensor, dims: list[int], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Return a mean, a variance or a deviation of the real rows."""
    keep = bool(kwargs.get("keepdim", args[1] if name == "mean" and len(args) > 1 else False))
    dtype = kwargs.get("dtype") or x.dtype
    mean, _, squares = moments(x.to(dtype), void, count, dims)

    def shaped(value: Tensor) -> Tensor:
        return (value if keep else value.squeeze(dims)).to(dtype)

    if name == "mean":
        return shaped(mean)
    correction = kwargs.get("correction", 1)
    correction = int(kwargs["unbiased"]) if "unbiased" in kwargs else correction
    spread = squares / (count - (1 if correction is None else correction))
    if name.startswith("std"):
        spread = spread.sqrt()
    return (shaped(spread), shaped(mean)) if name.endswith("mean") else shaped(spread)


def _parts(whole: Tensor, result: Any) -> Iterator[tuple[Part, int]]:
    """Yield the part of a tensor for each slice in a result, and the size of the dimension."""
    for out in result if isinstance(result, (tuple, list)) else (result,):
        if not isinstance(out, Tensor) or out.dim() != whole.dim() or (
            memory_of(out) != memory_of(whole)  # a copy: selected by a mask or by ids
        ):  # fmt: skip
            continue
        for dim, (size, rows) in enumerate(zip(out.shape[:2], whole.shape[:2], strict=True)):
            if size != rows:
                stride = max(whole.stride(dim), 1)
                first = (out.storage_offset() - whole.storage_offset()) // stride
                yield (dim, first, size), rows


@contextmanager
def parts_taken() -> Iterator[set[Part]]:
    """Collect the slices that an unpadded call takes."""
    parts: set[Part] = set()

    def collect(func: Handler, whole: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = func(whole, *args, **kwargs)
        parts.update(part for part, _ in _parts(whole, out))
        return out

    with Functions(dict.fromkeys(_PARTS, _with_tensor_first(collect))):
        yield parts


@contextmanager
def masked(
    modules: Sequence[torch.nn.Module], padding: Padding, parts: Collection[Part], cuts: _Cuts,
    more: Mapping[Any, Handler],
) -> Iterator[None]:  # fmt: skip
    """Keep padding out of batch normalisation, reductions over rows, and losses.

    Args:
        modules: the modules that run.
        padding: of the call.
        parts: the slices that the call may take.
        cuts: is filled with integers, and the axes whose first rows they count.
        more: handlers of other functions.
    """

    def two_graphs(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs.get("x")
        batch = args[1] if len(args) > 1 else kwargs.get("batch")
        axis = padding.axis_of(x)
        if batch is not None or axis is None:
            return None
        ids = padding.rows(axis).padding.long()
        return (x,), {"batch": ids, "batch_size": 2}

    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, _ONE_GRAPH):
                hook = module.register_forward_pre_hook(two_graphs, with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(Functions({**_Masks(padding, parts, cuts).table(), **more}))
        yield
