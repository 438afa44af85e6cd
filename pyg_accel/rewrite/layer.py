"""A layer that runs the fastest association of its products."""

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.backends.sampling import Sampling
from pyg_accel.patching.sampling import in_force, refuse_training
from pyg_accel.rewrite.bill import Given
from pyg_accel.rewrite.cost import CostModel, GraphFeatures, cost_model
from pyg_accel.rewrite.decide import Choice, Choose, decide, seconds_of, source_for
from pyg_accel.rewrite.enumerate import associations_of
from pyg_accel.rewrite.ir import Expr, leaves_of
from pyg_accel.rewrite.lift import Algebra, Call, NotLifted, bind, lift
from pyg_accel.rewrite.lower import Program
from pyg_accel.rewrite.matrices import Matrix
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.simplification import merge, simplify
from pyg_accel.rewrite.tree import is_sparse

__all__ = ["Associated", "Decision", "Options", "given_of"]

DRIFT = 2  # a decision holds while no size has changed by more than this factor (section 6.4)
MOST = 16  # decisions a layer keeps
RECENT = 8  # graphs that a layer knows again


@dataclass(frozen=True)
class Options:
    """What :func:`~pyg_accel.optimize` was asked for.

    Attributes:
        train: forward and backward are to be fast, else forward alone.
        static: the features of this layer are the same in every call.
        upstream: parameters that learn come before this layer, so its features have gradients;
            None if nobody knows, and the features themselves have to be asked.
        choose: decides in place of sizes and cost models.
        cost: the cost model; by default that of the device.
        price_all: predict the time of every tree, also where sizes suffice: to explain.
    """

    train: bool = False
    static: bool = False
    upstream: bool | None = None
    choose: Choose | None = None
    cost: CostModel | None = None
    price_all: bool = False


@dataclass(frozen=True)
class Decision:
    """What a layer does with calls of some kind and size.

    Attributes:
        algebra: what it computes.
        pruned: all trees.
        given: what was known of the leaves.
        sizes: by symbol, those that were decided for.
        entries: number of edges.
        fresh: graphs were new in every call.
        sampling: what ``sampled()`` asked for, if it applies.
        choice: the tree, and why.
        program: the tree, ready to run.
    """

    algebra: Algebra
    pruned: Associations
    given: Given
    sizes: Mapping[str, int]
    entries: int
    fresh: bool
    sampling: Sampling | None
    choice: Choice
    program: Program

    @property
    def form(self) -> Expr:
        """What the layer computes, simplified."""
        return merge(simplify(self.algebra.expr))

    def holds(self, sizes: Mapping[str, int], entries: int) -> bool:
        """Whether sizes are near enough to those that were decided for."""
        pairs = [(entries, self.entries), *((sizes[s], self.sizes[s]) for s in sizes)]
        return all(a == b or max(a, b) <= DRIFT * min(a, b) for a, b in pairs)


class Associated(torch.nn.Module):
    """Stands in for a layer of a model, with the layer's own parameters.

    A call that cannot be lifted is made by the layer itself.

    Attributes:
        conv: the layer.
        decisions: what was decided so far, the latest last.
        reasons: why calls were left to the layer.
    """

    conv: MessagePassing

    def __init__(self, conv: MessagePassing, options: Options) -> None:
        """Share everything with the layer, so that either changes with the other."""
        super().__init__()
        own = vars(self)
        own["_parameters"], own["_buffers"] = conv._parameters, conv._buffers
        own["_modules"] = conv._modules
        own["conv"] = conv  # not a child: names of parameters stay what they are
        self.training = conv.training
        self.options = options
        self.decisions: list[Decision] = []
        self.reasons: dict[str, int] = {}
        self._start()

    def _start(self) -> None:
        self._algebras: dict[Any, tuple[Algebra, dict[str, int]] | str] = {}
        self._recent: deque[weakref.ref[Tensor]] = deque(maxlen=RECENT)
        self._unseen = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be found again: functions that belong to this very layer."""
        state = dict(vars(self))
        for name in ("_algebras", "_recent", "_unseen"):
            state.pop(name)
        return state | {"decisions": [], "reasons": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with the same layer and no decisions."""
        vars(self).update(state)
        self._start()

    def train(self, mode: bool = True) -> "Associated":
        """Set the mode of the layer too."""
        super().train(mode)
        self.conv.training = mode
        return self

    def extra_repr(self) -> str:
        """Name the layer and what it runs."""
        chosen = str(self.decisions[-1].choice.tree) if self.decisions else "not decided yet"
        return f"{type(self.conv).__name__}: {chosen}"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; torch.compile leaves that to Python, and compiles what is around it."""
        try:
            if reasons := hooks_of(self.conv):
                raise NotLifted("; ".join(reasons))
            given = bind(self.conv, args, kwargs)
            call = Call(self.conv, given)
            decision = self.decision(call)
        except NotLifted as reason:
            self.reasons[str(reason)] = self.reasons.get(str(reason), 0) + 1
            return self.conv(*args, **kwargs)
        return decision.program.run(call)

    def decision(self, call: Call) -> Decision:
        """Return what to do with a call: what was decided before, if it holds.

        Raises:
            NotLifted: if the layer has to do it itself.
        """
        fresh = self._is_fresh(call.edge_index)
        algebra, widths = self._algebra(call)
        sampling = in_force() if algebra.sampled else None
        if sampling is not None:
            refuse_training(self.conv)
            widths = widths | {"S": sampling.width}
        sizes = {"N": call.num_rows, "M": call.num_cols, **widths}
        entries = call.edge_index.size(1)
        for known in reversed(self.decisions):
            same = known.algebra is algebra and (known.fresh, known.sampling) == (fresh, sampling)
            if same and known.holds(sizes, entries):
                return known
        decision = make_decision(algebra, call, self.options, sizes=sizes, fresh=fresh,
                                 sampling=sampling)  # fmt: skip
        self.decisions = [*self.decisions[1 - MOST :], decision]
        return decision

    def _algebra(self, call: Call) -> tuple[Algebra, dict[str, int]]:
        """What a call computes, and how wide it is: the same for all calls of a kind."""
        kinds = tuple(map(_kind, call.given.values()))
        found = self._algebras.get(kinds)
        if found is None:
            try:
                algebra = lift(self.conv, call)
                found = algebra, widths_of(algebra, call)
            except NotLifted as reason:
                found = str(reason)
            self._algebras[kinds] = found
        if isinstance(found, str):
            raise NotLifted(found)
        return found

    def _is_fresh(self, edge_index: Tensor) -> bool:
        """Whether graphs come and go, as batches do: two in a row that were never seen before."""
        if any(ref() is edge_index for ref in self._recent):
            self._unseen = 0
        else:
            self._recent.append(weakref.ref(edge_index))
            self._unseen += 1
        return self._unseen > 2


def make_decision(
    algebra: Algebra,
    call: Call,
    options: Options,
    *,
    sizes: Mapping[str, int],
    fresh: bool = False,
    sampling: Sampling | None = None,
) -> Decision:
    """Choose a tree for a call."""
    given = given_of(algebra, call, options)
    if sampling is not None:
        given = replace(given, sampled=True, static=given.static - {"X", "Y"})
    pruned = associations_of(algebra.expr, algebra.also, given)
    model = options.cost or cost_model(call.x.device)

    def graphs(name: str, transposed: bool) -> GraphFeatures:
        matrix = algebra.values[name](call)
        assert isinstance(matrix, Matrix)
        return GraphFeatures.of(matrix.graph, transposed=transposed)

    choice = decide(pruned, sizes, graphs, model, fresh=fresh, choose=options.choose)
    if options.price_all:
        prices = {
            tree: seconds_of(bill, sizes, graphs, model, fresh=fresh)
            for tree, bill in pruned.bills.items()
        }
        choice = replace(choice, seconds=prices, source=source_for(prices, pruned, model))
    program = Program(choice.tree, algebra, given.static)
    return Decision(algebra, pruned, given, sizes, call.edge_index.size(1), fresh, sampling,
                    choice, program)  # fmt: skip


def given_of(algebra: Algebra, call: Call, options: Options) -> Given:
    """Return which leaves learn and which stay the same."""
    upstream = options.upstream
    if upstream is None:  # without gradients every tensor looks like one that has none
        upstream = not torch.is_grad_enabled()
    learned: set[str] = set()
    static: set[str] = set()
    with torch.enable_grad():
        for leaf in dict.fromkeys(leaves_of(algebra.expr)):
            if leaf.name in algebra.constants:
                continue
            if is_sparse(leaf) or leaf.kind == "diagonal":
                weight = call.given.get("edge_weight")
                grows = isinstance(weight, Tensor) and weight.requires_grad
                grows = (grows and is_sparse(leaf)) or leaf.name in algebra.learned
                (learned if grows else static).add(leaf.name)
                continue
            value = algebra.values[leaf.name](call)
            assert isinstance(value, Tensor)
            if leaf.kind == "data":
                if options.static and not value.requires_grad:
                    static.add(leaf.name)
                elif upstream or value.requires_grad:
                    learned.add(leaf.name)
            elif value.requires_grad:
                learned.add(leaf.name)
    return Given(options.train, frozenset(learned), frozenset(static))


def widths_of(algebra: Algebra, call: Call) -> dict[str, int]:
    """Return the sizes of an expression that are no numbers of nodes, by symbol."""
    sizes = {"1": 1, "F": call.x.size(1), **algebra.sizes}
    if call.x_dst is not None:
        sizes["G"] = call.x_dst.size(1)
    for leaf in dict.fromkeys(leaves_of(algebra.expr)):
        if leaf.kind == "weight":
            value = algebra.values[leaf.name](call)
            assert isinstance(value, Tensor)
            sizes.setdefault(leaf.cols, value.size(1) // leaf.heads)
    return sizes


def _kind(value: Any) -> Any:
    """What of an argument a rule may look at."""
    if isinstance(value, Tensor):
        width = value.size(-1) if value.dim() > 1 and value.is_floating_point() else 0
        return type(value), value.dtype, value.dim(), width, value.requires_grad, value.device.type
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value)


def hooks_of(conv: MessagePassing) -> list[str]:
    """Return why a layer has to be called itself: somebody watches."""
    return [
        f"a {kind}" for kind, hooks in (
            ("forward hook", conv._forward_hooks),
            ("forward pre-hook", conv._forward_pre_hooks),
            ("backward hook", conv._backward_hooks),
        ) if hooks
    ]  # fmt: skip
