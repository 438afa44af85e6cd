"""Records what a layer's own code does with features, ``propagate`` included, as an expression.

The message of a ``propagate`` is read by the tracer of ``patch()``, and becomes products where it
is linear in the features. A layer whose code does the same in every call of a kind is recorded once
(:mod:`.rules.recorded`); any other is run in every call (:mod:`.running`).
"""

from collections.abc import Callable
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.cache import version_of
from pyg_accel.formula import Operand, operands_of
from pyg_accel.patching.lazy import IDENTITY, LazyTensor
from pyg_accel.patching.rules import reduce_over_targets
from pyg_accel.patching.trace import Trace
from pyg_accel.record.edge_tensors import DeferredOperand, plain_shape
from pyg_accel.rewrite.algebra import Call, NotLifted
from pyg_accel.rewrite.deferred import Deferred
from pyg_accel.rewrite.features import Features, is_same
from pyg_accel.rewrite.guards import RENDERED, is_rendered
from pyg_accel.rewrite.ir import Broadcast, Expr, Leaf
from pyg_accel.rewrite.matrices import Matrix, degree_of
from pyg_accel.rewrite.rules.common import (
    inverse_count_of,
    need_sum_or_mean,
    plain_matrix,
    with_weight,
)
from pyg_accel.rewrite.terms import MOST, Term, terms_of

__all__ = ["EdgeFactor", "Reading", "Recorder", "Scaled"]

_FIXED = ("aggregate", "update")  # methods that have to be PyG's own


_Factor = TypeVar("_Factor", bound="EdgeFactor")


class EdgeFactor(DeferredOperand):
    """Factors of messages [E] or [E, heads], which no code but a message may ask for.

    Attributes:
        facts: what they are.
    """

    what = "normalised edge weights"
    facts: Any

    @classmethod
    def of(cls: type[_Factor], like: Tensor, shape: tuple[int, ...], facts: Any) -> _Factor:
        """Make some of the dtype and device of another tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            made: _Factor = Tensor._make_wrapper_subclass(
                cls, shape, dtype=like.dtype, device=like.device
            )
        made.facts = facts
        return made

    def ordinary(self) -> Tensor:
        """See :meth:`DeferredOperand.ordinary`."""
        raise NotLifted(f"{self.what} that the layer uses otherwise too")

    def differentiable(self) -> bool:
        """See :meth:`DeferredOperand.differentiable`."""
        return False

    def after(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See :meth:`DeferredOperand.after`."""
        if name not in ("view", "reshape", "unsqueeze"):
            return None
        old = torch.empty(plain_shape(self), device="meta")
        with torch._C.DisableTorchFunction():
            new = func(old, *args, **kwargs)
        same = [n for n in new.shape if n != 1] == [n for n in old.shape if n != 1]
        return self.of(self, tuple(new.shape), self.facts) if same else None


class Scaled(EdgeFactor):
    """The weights of a normalised adjacency; the facts: what multiplies an expression with it."""


class Reading(Trace):
    """The trace of a message, on features that may be deferred."""

    def reduced(self, message: LazyTensor, reduce: str, num_rows: int) -> Tensor:
        """Compute the reduction."""
        for number, operand in enumerate(self.operands):
            if isinstance(operand, Deferred):
                self.operands[number] = data = operand.settle()
                self._versions[number] = version_of(data)
        with torch._C.DisableTorchFunction():
            return reduce_over_targets(message, [reduce], num_rows)[0]


@lru_cache(maxsize=256)
def _parameters(method: Any) -> tuple[Parameter, ...]:
    return tuple(signature(method).parameters.values())[1:]


class Recorder(Features):
    """One run of a layer's own code with another ``propagate``."""

    def message(
        self, edge_index: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Reading, Any, bool]:
        """Run the message of a call of ``propagate``; return also whether it is averaged.

        Raises:
            NotLifted: if the call is one that cannot be followed.
        """
        call, cls, name = self.call, type(self.call.conv), self._name
        changed = [m for m in _FIXED if getattr(cls, m) is not getattr(MessagePassing, m)]
        changed += [m for m in RENDERED if not is_rendered(getattr(cls, m), cls)]
        if changed:
            raise NotLifted(f"{name} has its own {', '.join(changed)}")
        mean = need_sum_or_mean(call.conv)
        if edge_index is not call.edge_index:
            raise NotLifted(f"{name} makes another graph in every call")
        if args:
            raise NotLifted(f"{name} calls propagate in an unusual way")
        if not self.steady():
            raise NotLifted(f"{name} changes the mode of autograd or autocast")
        return *self.traced("message", kwargs), mean

    def traced(self, name: str, kwargs: dict[str, Any]) -> tuple[Reading, Any]:
        """Run a method of the layer that PyG collects arguments for."""
        trace = Reading(self.call.edge_index, self.call.conv.flow)
        with trace:
            given = self._arguments(trace, kwargs, name)
            result = self.method(name)(**given)
        trace.gathered.clear()
        return trace, result

    def method(self, name: str) -> Callable[..., Any]:
        """Return a method of the layer."""
        found: Callable[..., Any] = getattr(self.layer, name)
        return found

    def _arguments(self, trace: Reading, kwargs: dict[str, Any], method: str) -> dict[str, Any]:
        """The arguments of a method, as PyG collects them."""
        call, target = self.call, trace.target
        entries, rows = call.edge_index, call.num_rows
        size = kwargs.get("size")
        if size is not None and tuple(size) not in {(call.num_cols, rows), (None, rows)}:
            raise NotLifted(f"{self._name} calls propagate with a size of its own")
        known: dict[str, Callable[[], Any]] = {
            "edge_index": lambda: entries, "ptr": lambda: None, "dim_size": lambda: rows,
            "index": lambda: _row_of(trace, target),
            "edge_index_i": lambda: _row_of(trace, target),
            "edge_index_j": lambda: _row_of(trace, 1 - target), "size_i": lambda: rows,
            "size_j": lambda: call.num_cols,
        }  # fmt: skip
        given: dict[str, Any] = {}
        for parameter in _parameters(getattr(type(call.conv), method)):
            key = parameter.name
            base, row = key[:-2], target if key.endswith("_i") else 1 - target
            if key in known:
                given[key] = known[key]()
            elif parameter.kind is not Parameter.POSITIONAL_OR_KEYWORD:
                raise NotLifted(f"the {method} of {self._name} takes any arguments")
            elif key.endswith(("_i", "_j")) and base in kwargs:
                value = kwargs[base]
                if isinstance(value, (tuple, list)):
                    if target == 0 and value[0] is not value[1]:
                        raise NotLifted("pairs of features against their flow")
                    value = value[row]
                given[key] = value
                if isinstance(value, Tensor):
                    nodes = rows if row == target else call.x.size(0)  # without those of halos
                    dims = (1, 2, 3) if call.conv.node_dim == 0 else (2,)
                    if value.dim() not in dims or value.size(0) != nodes:
                        raise NotLifted(f"{self._name} gathers what is not one row per node")
                    given[key] = trace.gather(self.opened(value), 0, row)
            elif key in kwargs:
                given[key] = kwargs[key]
            elif parameter.default is Parameter.empty:
                raise NotLifted(f"the {method} of {self._name} takes {key}")
        trace.sizes[target] = rows
        return given

    def opened(self, value: Tensor) -> Tensor:
        """Return features that a message may multiply, deferred."""
        with torch._C.DisableTorchFunction():
            wide = value.dim() == 2 and (value.size(1) > 1 or value is self.call.x)
            if isinstance(value, Deferred) or not wide:
                return value
            expr, dtype = self.expr_of(value), value.dtype
            made = self.defer(expr, tuple(value.shape), lambda: value, (value,), dtype)
            return value if made is None else made

    def aggregated(self, trace: Reading, message: Any, mean: bool) -> Expr | None:
        """Return the sum or mean of a message, if that is linear in features."""
        if not isinstance(message, LazyTensor) or message.dim() != 2 or message.edge_dim:
            return None
        if message.summed or message.parts is not None or message.later is not IDENTITY:
            return None
        width = message.size(1)

        def is_wide(operand: Operand) -> bool:
            value = trace.operands[operand.index]
            return value.size(-1) == width and (
                width > 1 or isinstance(value, Deferred) or value is self.call.x
            )

        terms = terms_of(message.formula, is_wide)
        if terms is None or len(terms) > MOST:
            return None
        operands = [trace.operands[o.index] for o in operands_of(message.formula)]
        if any(t.dim() != 2 for t in operands) or not self.dtype_of(message, *operands):
            return None
        ends: dict[str, set[int]] = {"u": set(), "v": set(), "e": set()}
        for term in terms:
            if term.features is not None:
                ends[term.features.side].add(id(trace.operands[term.features.index]))
        if ends["u"] & ends["v"]:  # the sum of x_i - x_j is more precise than that of each
            return None
        found = [self._term(trace, term, mean) for term in terms]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        return parts[0] if len(parts) == 1 else self.total(*parts)

    def _term(self, trace: Reading, term: Term, mean: bool) -> Expr | None:
        if term.features is None or term.features.side == "e":
            return None
        repeated = [trace.repeated[o.index] for o, _ in term.factors]
        if any(repeated) or trace.repeated[term.features.index]:
            return None
        expr = self.expr_of(trace.operands[term.features.index])
        sides: dict[str, list[tuple[Tensor, bool]]] = {"u": [], "v": [], "e": []}
        for operand, inverse in term.factors:
            sides[operand.side].append((trace.operands[operand.index], inverse))
        if expr is None or any(isinstance(t, Deferred) for s in sides.values() for t, _ in s):
            return None
        if term.features.side == "v":
            return self._targets(term, expr, sides) if not mean else None
        out: Expr | None = self.movable(expr)
        for vector, inverse in sides["u"]:
            out = None if out is None else self.vector(vector, out, inverse=inverse)
        if out is None or expr.rows != ("M" if self.call.bipartite else "N"):
            return None
        weights = sides["e"]
        if len(weights) == 1 and isinstance(weights[0][0], Scaled):
            if weights[0][1] or mean:
                return None
            out = weights[0][0].facts(out)
        elif any(isinstance(t, Scaled) for t, _ in weights):
            return None
        else:
            matrix = self.matrix(weights)
            out = matrix @ out
            if mean:
                inverse_count = self.leaf(("count", matrix.name), "D⁻¹", "N", "N", "diagonal",
                                          inverse_count_of, mean_of=matrix.name)  # fmt: skip
                out = Broadcast(inverse_count, out)
        for vector, inverse in sides["v"]:
            out = None if out is None else self.vector(vector, out, inverse=inverse)
        return None if out is None else self.number(term.number, out)

    def _targets(
        self, term: Term, expr: Expr, sides: dict[str, list[tuple[Tensor, bool]]]
    ) -> Expr | None:
        """Features of the targets, once for each edge of theirs."""
        if sides["u"] or sides["v"] or any(isinstance(t, Scaled) for t, _ in sides["e"]):
            return None
        matrix = self.matrix(sides["e"])
        entry = next(e for e in self.entries.values() if e.leaf is matrix)

        def degree(call: Call, *tensors: Tensor) -> Tensor:
            found = entry.make(call, *tensors)
            assert isinstance(found, Matrix)
            return degree_of(found, call.x.dtype)

        leaf = self.leaf(("degree", matrix.name), "D", "N", "N", "diagonal", degree, *entry.tensors)
        if expr.rows != "N":
            return None
        return self.number(term.number, Broadcast(leaf, self.movable(expr)))

    def matrix(self, weights: list[tuple[Tensor, bool]]) -> Leaf:
        """Return the matrix of the edges, with the products of weights [E, 1]."""
        columns = "M" if self.call.bipartite else "N"
        if not weights:
            return self.leaf("A", "A", "N", columns, "sparse", plain_matrix)
        given = self.call.given.get("edge_weight")
        (first, inverse), *others = weights
        if not others and not inverse and is_same(first, given):
            return self.leaf(
                "edge_weight", "A", "N", columns, "weighted",
                lambda call: with_weight(call, call.given["edge_weight"].view(-1)),
            )  # fmt: skip
        below = tuple(inverse for _, inverse in weights)

        def weighted(call: Call, *tensors: Tensor) -> Matrix:
            total = tensors[0].reciprocal() if below[0] else tensors[0]
            for tensor, divides in zip(tensors[1:], below[1:], strict=True):
                total = total / tensor if divides else total * tensor
            return Matrix(plain_matrix(call).graph, total.squeeze(1), edge_order=True)

        tensors = tuple(t for t, _ in weights)
        key = ("weights", tuple(map(id, tensors)), below)
        return self.leaf(key, "A", "N", columns, "weighted", weighted, *tensors)


def _row_of(trace: Reading, row: int) -> Tensor:
    return trace.edge_index[row]  # seen by the trace, which knows it again
