"""Attention as it is recorded: the softmax of scores is a barrier, what it weighs is not.

Scores are a formula, as ``patch()`` reads it; its operands are made again in every call
(:mod:`.replay`). Those that are linear in ``X W`` are read from ``X (W a)`` where nothing else
needs the product (paper, section 5.2).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric import utils

from pyg_accel.formula import Operand, map_operands
from pyg_accel.patching.lazy import IDENTITY, LazyTensor
from pyg_accel.patching.running import running
from pyg_accel.record.edge_tensors import plain_shape
from pyg_accel.rewrite.algebra import Call, NotLifted
from pyg_accel.rewrite.ir import Attend, Expr, Leaf
from pyg_accel.rewrite.matrices import Matrix, Scores, derived, in_order_of, looped
from pyg_accel.rewrite.recorder import EdgeFactor, Reading
from pyg_accel.rewrite.rules.replay import Replay, ReplayRecorder
from pyg_accel.rewrite.terms import Term, terms_of

__all__ = ["AttentionRecorder"]


@dataclass(frozen=True)
class ScoreOperand:
    """An operand of the formula of scores.

    Attributes:
        side: of the edge.
        repeated: one row serves all targets.
        place: of the features that it is made of, behind the last one for attributes of edges; -1
            if it is made of parameters alone.
        make: makes it of these.
        linear: it is linear in them: made of a weight it may be multiplied with features.
    """

    side: str
    repeated: bool
    place: int
    make: Replay
    linear: bool


@dataclass(frozen=True)
class Attention:
    """How scores of edges are computed.

    Attributes:
        formula: of the scores.
        operands: of the formula.
        heads: scores per edge.
        loops: weight of the self-loops that every node has; None for the edges as they are.
        rate: of dropout.
    """

    formula: str
    operands: tuple[ScoreOperand, ...]
    heads: int
    loops: Any = None
    rate: float = 0.0

    def __call__(self, call: Call, matrix: Matrix, *features: Any) -> Scores:
        """Return the scores of features [N, heads, H], or of [N, F] and the weight [F, heads H]."""
        found: dict[int, Tensor] = {}
        for place, value in enumerate(features):
            mine = [n for n, operand in enumerate(self.operands) if operand.place == place]
            data, weight = value if isinstance(value, tuple) else (None, value)
            parts = [self.operands[n].make(call, self._in_heads(weight)) for n in mine]
            if data is not None:  # all of them in one product
                product = data @ torch.cat(parts, dim=1)
                parts = list(product.split([part.size(1) for part in parts], dim=1))
            found.update(zip(mine, parts, strict=True))
        for n, operand in enumerate(self.operands):
            if operand.place < 0:
                found[n] = operand.make(call, None)
            elif operand.place == len(features):
                attr = edge_attributes(call, matrix, self.loops)
                eye = torch.eye(attr.size(1), dtype=attr.dtype, device=attr.device)
                found[n] = operand.make(call, eye if operand.linear else attr)
                found[n] = attr @ found[n] if operand.linear else found[n]
            if operand.repeated:
                found[n] = found[n].expand(matrix.graph.num_rows, *found[n].shape[1:])
            elif operand.side == "v":
                found[n] = matrix.targets(found[n])
        operands = tuple(found[n] for n in range(len(self.operands)))
        return Scores(self.formula, operands, self.rate, call.conv.training)

    def _in_heads(self, value: Tensor) -> Tensor:
        if value.dim() == 3:
            return value
        return value.reshape(value.size(0), self.heads, value.size(1) // self.heads)


def edge_attributes(call: Call, matrix: Matrix, loops: Any) -> Tensor:
    """Return attributes [entries, D] in the order of a matrix, with those of self-loops."""
    given = call.given["edge_attr"]

    def stored() -> Tensor:
        attr: Tensor = given.view(-1, 1) if given.dim() == 1 else given
        if loops is not None:  # theirs are means, say, of the others, without those that are there
            rest, attr = utils.remove_self_loops(call.edge_index, attr)
            attr = utils.add_self_loops(rest, attr, loops, call.num_rows)[1]
        return in_order_of(matrix.graph, attr)

    if given.requires_grad:
        return stored()
    return derived(matrix.graph, ("edge_attr", str(loops)), (given,), stored)


class AttentionWeights(EdgeFactor):
    """Softmax weights; the facts: the expression that they are, and how scores are computed."""

    what = "attention weights"
    facts: tuple[Attend, Attention]

    def after(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See :meth:`DeferredOperand.after`; dropout is drawn in every call."""
        if name != "dropout":
            return super().after(name, func, args, kwargs)
        (attend, attention), rate = self.facts, args[0] if args else kwargs.get("p", 0.5)
        return self.of(self, tuple(plain_shape(self)), (attend, replace(attention, rate=rate)))


class AttentionRecorder(ReplayRecorder):
    """A recorder of layers whose messages may be weighted by a softmax of scores."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._removed = False
        self._loops: Any = None  # weight of the self-loops that the code adds
        self._attr: Tensor | None = None

    def stand_ins(self) -> dict[str, tuple[Any, Callable[..., Any]]]:
        """Return functions of PyG that code may call, and what takes their place."""
        return {
            "softmax": (utils.softmax, self._softmax),
            "remove_self_loops": (utils.remove_self_loops, self._remove_loops),
            "add_self_loops": (utils.add_self_loops, self._add_loops),
        }

    def edge_attributes(self, attr: Any) -> Any:
        """Return attributes of the edges as the layer is given them."""
        if not isinstance(attr, Tensor):
            return attr
        if not attr.is_floating_point() or attr.dim() not in (1, 2):
            raise NotLifted("edge attributes that are not [E, D]")
        self._attr = self.without_data(tuple(attr.shape))
        return self._attr

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """Stand in for the layer's ``edge_updater``."""
        if edge_index is not self.call.edge_index:
            raise NotLifted(f"{self._name} makes another graph in every call")
        return self.traced("edge_update", {"size": size, **kwargs})[1]

    def opened(self, value: Tensor) -> Tensor:
        """See :meth:`Recorder.opened`; what is followed stays as it is."""
        return value if id(value) in self.followed else super().opened(value)

    def aggregated(self, trace: Reading, message: Any, mean: bool) -> Expr | None:
        """See :meth:`Recorder.aggregated`; attention has messages [E, heads, width]."""
        if not any(isinstance(t, AttentionWeights) for t in trace.operands):
            if self._removed:
                raise NotLifted(f"{self._name} makes another graph in every call")
            return super().aggregated(trace, message, mean)
        if any(self._attr is s for t in trace.operands for s in self.sources_of(t)):
            raise NotLifted("edge attributes that are a part of what is summed up")
        if not isinstance(message, LazyTensor) or message.later is not IDENTITY or mean:
            return None
        match terms_of(message.formula, lambda o: id(trace.operands[o.index]) in self.exprs):
            case (Term(number=1.0, factors=((Operand(side="e", index=own), False),),
                       features=Operand(side="u", index=source)),):  # fmt: skip
                weights, features = trace.operands[own], trace.operands[source]
            case _:
                return None
        if not isinstance(weights, AttentionWeights) or weights.dim() != features.dim():
            return None
        if plain_shape(weights)[1:] != (features.size(1), 1):
            return None
        attend, attention = weights.facts
        if self.parts.scores.setdefault(attend.name, attention) is not attention:
            raise NotLifted(f"{self._name} has attention weights of two kinds")
        return attend @ self.exprs[id(features)]

    def _softmax(
        self, src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: int = 0
    ) -> AttentionWeights:
        """Stand in for PyG's ``softmax``."""
        trace, shape = running.traces[-1] if running.traces else None, tuple(plain_shape(src))
        if not isinstance(trace, Reading) or not isinstance(src, LazyTensor):
            raise NotLifted(f"{self._name} normalises what is no score of its edges")
        if trace.row_of(index) != trace.target or len(shape) not in (1, 2) or dim:
            raise NotLifted(f"{self._name} normalises scores otherwise than for each target")
        if self.call.bipartite and self.call.x_dst is None:
            raise NotLifted("attention without targets")
        formula, numbers = trace.own_numbers(src)
        sources = [[*self.sources_of(trace.operands[n])] for n in numbers]
        features = {id(t): t for found in sources for t in found if id(t) in self.exprs}
        places = {key: place for place, key in enumerate(features)}
        operands, shared = [], set[int]()
        for place, (n, found) in enumerate(zip(numbers, sources, strict=True)):
            if len(found) > 1 or any(id(t) not in places and t is not self._attr for t in found):
                raise NotLifted(f"{self._name} makes scores of several features at once")
            tensor, source = trace.operands[n], found[0] if found else None
            side, repeated = trace.sides[n], trace.repeated[n]
            if source is None and side == "e" and trace.num_edges == 1:
                # A parameter of one row: that of the only edge, and of all edges in other calls.
                side, repeated = "v", True
                shared.add(place)
            origin = -1 if source is None else places.get(id(source), len(places))
            if source is not None and source is self._attr and self._loops is not None:
                self.parts.compiles = False  # how many loops there are is known after looking
            linear = tensor.dim() == 2 and source is not None and self.is_linear(tensor)
            operands.append(ScoreOperand(side, repeated, origin, self.replay(tensor, source),
                                         linear))  # fmt: skip
        formula = map_operands(formula, lambda o: Operand("v", o.index) if o.index in shared else o)
        heads = shape[1] if len(shape) == 2 else 1
        folds = all(o.linear for o in operands if 0 <= o.place < len(places))
        args = tuple(self.exprs[key] for key in places)
        attend = Attend("softmax", self._edges(), args, heads, folds)
        attention = Attention(str(formula), tuple(operands), heads, self._loops)
        return AttentionWeights.of(src, shape, (attend, attention))

    def _edges(self) -> Leaf:
        if self._loops is None:
            return self.matrix([])
        return self.leaf(
            "loops", "A", "N", "N", "sparse",
            lambda call: looped(call.edge_index, None, call.num_rows, call.target, 1.0),
        )  # fmt: skip

    def _remove_loops(self, edge_index: Any, edge_attr: Any = None) -> tuple[Any, Any]:
        """Stand in for PyG's function."""
        self._removed = True
        return edge_index, edge_attr

    def _add_loops(
        self, edge_index: Any, edge_attr: Any = None, fill_value: Any = None, num_nodes: Any = None
    ) -> tuple[Any, Any]:
        """Stand in for PyG's function."""
        if self.call.bipartite or self.call.given.get("size") is not None:
            raise NotLifted("self-loops of a bipartite graph")
        if edge_index is not self.call.edge_index or not self._removed:
            raise NotLifted(f"{self._name} makes another graph in every call")
        self._loops = 1.0 if fill_value is None else fill_value
        return edge_index, edge_attr
