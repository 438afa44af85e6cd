"""Runs the calls of a layer in the fastest order of its products."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn import MessagePassing

from pyg_accel.call_report import record
from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from pyg_accel.memo import running
from pyg_accel.patching.api import OverrideHandle
from pyg_accel.patching.programs import Attempt, Programs, attempt, find
from pyg_accel.patching.reasons import forced, is_active
from pyg_accel.patching.sampling import in_force, refuse_training
from pyg_accel.record.about import ABOUT
from pyg_accel.record.dims import Unexpected
from pyg_accel.record.program import LayerProgram
from pyg_accel.rewrite.builder import Builder
from pyg_accel.rewrite.halos import EXCHANGES, Halos
from pyg_accel.rewrite.lift import NotLifted, Region, regions_of
from pyg_accel.rewrite.lower import lower
from pyg_accel.rewrite.nodes import Learning
from pyg_accel.rewrite.override import RUNNING
from pyg_accel.rewrite.select import DRIFT, Decision, Options, assumptions_of, make_decision
from pyg_accel.settings import settings

__all__ = ["RewrittenLayer", "recorded_call"]

UNSEEN = 2  # calls in a row whose graphs are new, after which every call is taken to have a new one
MOST = 16  # decisions that are shown
_MAXK = (MaxKGCNConv, MaxKSAGEConv, MaxKGINConv)


@dataclass
class _Rewritten:
    """What runs for the calls of one program.

    Attributes:
        regions: what it computes.
        static: arguments were the same tensors as in the call before.
        fresh: graphs were new in every call.
        sizes: of arguments that differ between calls, when it was decided: place, dimension, size.
        program: runs; None if the layer itself does.
        reason: why that is so.
    """

    regions: list[Region]
    static: bool = False
    fresh: bool = False
    sizes: tuple[tuple[int, int, int], ...] = ()
    program: LayerProgram | None = None
    reason: str = ""

    def holds(self, leaves: tuple[Tensor, ...]) -> bool:
        """Whether sizes are near enough to those that were decided for."""
        for place, dim, size in self.sizes:
            now = leaves[place].size(dim)
            if max(now, size) > DRIFT * min(now, size):
                return False
        return True


class RewrittenLayer(torch.nn.Module):
    """What :class:`~pyg_accel.rewrite.optimized.OptimizedModel` runs in place of a layer.

    A call that cannot be lifted is made by the layer itself. It is a module, but part of no model.

    Attributes:
        conv: the layer.
        options: of ``optimize()``.
        decisions: what was decided so far, the latest last.
        reasons: why calls were left to the layer.
    """

    def __init__(self, conv: MessagePassing, options: Options) -> None:
        """Start without decisions."""
        super().__init__()
        self.conv = conv
        self.options = options
        self.decisions: list[Decision] = []
        self.reasons: dict[str, int] = {}
        self._known: weakref.WeakKeyDictionary[Any, Programs] = weakref.WeakKeyDictionary()
        self._rewritten: dict[LayerProgram, _Rewritten] = {}
        weakref.finalize(self, OverrideHandle({}).remove)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        if torch.compiler.is_compiling():  # layers that exchange halos end the compiler's graphs
            return self._disabled(args, kwargs) if EXCHANGES else self.conv(*args, **kwargs)
        if torch._C._is_tracing():
            return self.conv(*args, **kwargs)
        return self._run(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _disabled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(args, kwargs)

    def decide(self, *args: Any, **kwargs: Any) -> Decision:
        """Choose an association for a call, whatever was chosen before.

        Raises:
            NotLifted: if the layer itself makes such calls.
        """
        known = self._programs(self)
        if find(known, args, kwargs) is None:
            self._run(args, kwargs)
        found = find(known, args, kwargs)
        rewritten = None if found is None else self._rewritten.get(found[0])
        if found is None or rewritten is None or rewritten.program is None:
            raise NotLifted(next(reversed(self.reasons), "it cannot be recorded"))
        self._decide(*found, rewritten, None, static=rewritten.static, fresh=rewritten.fresh)
        return self.decisions[-1]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        halos = EXCHANGES[0]((*args, *kwargs.values())) if EXCHANGES else None
        if isinstance(halos, str):
            return self._left(halos, args, kwargs)
        if in_force() is not None and isinstance(self.conv, _MAXK):
            return self._left("sampled() does not apply to layers with MaxK", args, kwargs)
        known = self._programs(self if halos is None else halos.halo)
        found = find(known, args, kwargs)
        if found is None:
            return self._first(known, halos, args, kwargs)
        program, leaves = found
        rewritten = self._rewritten.get(program)
        if rewritten is None:  # another thread is about to read it
            return self.conv(*args, **kwargs)
        static = _are_static(leaves, halos)
        if rewritten.program is not None:
            # On several ranks, all decide or none does, and a halo has one size.
            fresh = halos is None and rewritten.program.unseen > UNSEEN
            holds = halos is not None or rewritten.holds(leaves)
            if (static, fresh) != (rewritten.static, rewritten.fresh) or not holds:
                self._decide(program, leaves, rewritten, halos, static=static, fresh=fresh)
        if rewritten.program is None:
            return self._left(rewritten.reason, args, kwargs)
        start = perf_counter()
        try:
            out = rewritten.program.run(*leaves)
        except Unexpected as error:
            if halos is None:
                return self._first(known, halos, args, kwargs)
            return self._left(f"sizes of another kind: {error}", args, kwargs)  # on this rank alone
        text, backends = rewritten.program.formulas, rewritten.program.backends
        record(type(self.conv).__name__, text, backends, "", perf_counter() - start)
        return out

    def _programs(self, owner: Any) -> Programs:
        """The programs of the calls with a halo, or of those without one, which the layer owns."""
        known = self._known.get(owner)
        if known is None or known.changes != settings.changes:
            for program in known.programs if known is not None else ():
                self._rewritten.pop(program, None)
            known = self._known[owner] = Programs(changes=settings.changes)
        return known

    def _left(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the layer itself make a call."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        start = perf_counter()
        out = self.conv(*args, **kwargs)
        if not is_active(self.conv):  # else patch() has counted the call
            record(type(self.conv).__name__, "", "PyG", reason, perf_counter() - start)
        return out

    def _first(
        self, known: Programs, halos: Halos | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call of a new kind, and record it."""
        refuse_training(self.conv)
        before = [*known.programs]
        start = perf_counter()
        made = recorded_call(known, self.conv, args, kwargs, halos)
        if isinstance(made, str):
            return self._left(made, args, kwargs)
        program, reason = made.program, ""
        rewritten = _Rewritten([])
        if program is None:
            reason = known.reason
        else:
            try:
                rewritten.regions = regions_of(
                    program.graph, program.constants, type(self.conv).__name__
                )
            except NotLifted as why:
                reason = str(why)
        if halos is not None:
            text = "; ".join(str(region.expr) for region in rewritten.regions)
            reason = halos.agree(reason, text)
            if reason:  # no rank makes another attempt alone
                known.give_up(reason)
                program = None
        for other in before:
            if other not in known.programs:
                self._rewritten.pop(other, None)
        if program is not None:
            self._rewritten[program] = rewritten
            rewritten.reason = reason
            if not reason:
                leaves = program.admit(args, kwargs)
                assert leaves is not None
                static = _are_static(leaves, halos)
                self._decide(program, leaves, rewritten, halos, static=static, fresh=False)
        if reason:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if made.formulas:  # else propagate has counted the call
            record(type(self.conv).__name__, made.formulas, made.backends, "",
                   perf_counter() - start)  # fmt: skip
        return made.out

    def _decide(
        self,
        program: LayerProgram,
        leaves: tuple[Tensor, ...],
        rewritten: _Rewritten,
        halos: Halos | None,
        *,
        static: bool,
        fresh: bool,
    ) -> None:
        """Choose an association for each region of a program, and write the program of these."""
        text, graph, decisions = rewritten_graph(
            program, rewritten.regions, self.options, leaves, halos, static=static, fresh=fresh
        )
        before = rewritten.program
        rewritten.program = program.with_graph(graph, text)
        rewritten.program.unseen = 0 if before is None else before.unseen
        rewritten.static, rewritten.fresh = static, fresh
        rewritten.sizes = tuple(
            (place, dim, t.size(dim))
            for place, (t, shape) in enumerate(zip(leaves, program.signature.shapes, strict=True))
            for dim, size in enumerate(shape) if size is None
        )  # fmt: skip
        self.decisions = [*self.decisions, *decisions][-MOST:]


def rewritten_graph(
    program: LayerProgram,
    regions: list[Region],
    options: Options,
    leaves: tuple[Tensor, ...],
    halos: Halos | None,
    *,
    static: bool = False,
    fresh: bool = False,
) -> tuple[str, fx.Graph, list[Decision]]:
    """Choose an association for each region of a program, and write the graph of these.

    Args:
        program: of a call.
        regions: of its graph.
        options: of ``optimize()``.
        leaves: the tensors among the arguments of the call.
        halos: of the call; all processes decide alike.
        static: those of them that are the same in every call are known.
        fresh: every call has a graph of its own.

    Returns:
        The associations as text, the graph, and the decisions.
    """
    places = [n for n in program.graph.nodes if n.op == "placeholder"]
    both = zip(places, leaves, strict=True)
    same = frozenset(n for n, t in both if static and _is_static(t, halos))
    upstream, learning, values = not torch.is_grad_enabled(), Learning(), _Values(program, leaves)
    decided: dict[fx.Node, Decision] = {}
    for region in regions:
        assumed = assumptions_of(region, learning, train=options.train, static=same,
                               upstream=upstream)  # fmt: skip
        graphs = {name: values.of(node) for name, node in region.graphs.items()}
        decided[region.root] = make_decision(
            region, assumed, options, graphs, fresh=fresh,
            slowest=None if halos is None else halos.slowest,
        )  # fmt: skip
    cast = len(_precisions(program)) > 1
    builder = Builder()
    for node in program.graph.nodes:
        if (decision := decided.get(node)) is None:
            builder.copy(node)
        else:
            out = lower(builder, decision.region, decision.choice.tree, decision.assumed.static,
                        cast=cast)  # fmt: skip
            if len(node.meta[ABOUT].shape) > 2:  # heads, which the layer may view as one row
                out = builder.call(Tensor.contiguous, out)
            builder.replace(node, out)
    text = "; ".join(str(decision.choice.tree) for decision in decided.values())
    return text, builder.finish(program.graph), [*decided.values()]


def _precisions(program: LayerProgram) -> set[torch.dtype]:
    """The precisions that meet in a call: the order of products may change that of the result."""
    given = {n.meta[ABOUT].dtype for n in program.graph.nodes
             if n.op in ("placeholder", "get_attr") and ABOUT in n.meta}  # fmt: skip
    cast = {torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
    return {dtype for dtype in given if dtype.is_floating_point} | cast


class _Values:
    """Computes nodes of the graph of a program for a call."""

    def __init__(self, program: LayerProgram, leaves: tuple[Tensor, ...]) -> None:
        self._constants = program.constants
        inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
        self._known: dict[fx.Node, Any] = dict(zip(inputs, leaves, strict=True))

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node."""
        if node not in self._known:
            with torch.no_grad():
                self._known[node] = self._computed(node)
        return self._known[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._constants[str(node.target)]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_static(tensor: Tensor, halos: Halos | None) -> bool:
    return any(tensor is t for t in RUNNING.static) or (halos is not None and halos.stays(tensor))


def _are_static(leaves: tuple[Tensor, ...], halos: Halos | None) -> bool:
    """Whether all features of a call are the same in every call of the model."""
    if halos is None and not RUNNING.static:
        return False
    features = [t for t in leaves if t.is_floating_point() and t.dim() == 2]
    return bool(features) and all(_is_static(t, halos) for t in features)


@contextmanager
def forcing() -> Iterator[None]:
    """Accelerate the calls of this thread inside the block, whatever is patched."""
    before, forced.on = forced.on, True
    try:
        yield
    finally:
        forced.on = before


def recorded_call(
    known: Programs,
    conv: MessagePassing,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    halos: Halos | None = None,
) -> Attempt | str:
    """Make a call of a layer and record it, or return why that is not tried."""

    def make(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if halos is None else halos.running():
            return torch.nn.Module._call_impl(conv, *args, **kwargs)

    before = running.begin(conv)
    try:
        with forcing():
            return attempt(known, conv, "call", make, args, kwargs)
    finally:
        running.end(before)
