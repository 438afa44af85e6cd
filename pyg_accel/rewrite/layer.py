"""Runs the calls of a layer with its matrix products in the fastest order."""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn import MessagePassing

from pyg_accel.graph.halos import LOOKUPS, Halos
from pyg_accel.graph.memo import running
from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from pyg_accel.patching.api import OverrideHandle
from pyg_accel.patching.programs import OfClass, Programs, find
from pyg_accel.patching.reasons import forced, is_active
from pyg_accel.patching.recording import Attempt, attempt
from pyg_accel.patching.sampling import in_force, refuse_training
from pyg_accel.record.about import ABOUT
from pyg_accel.record.dims import Unexpected
from pyg_accel.record.program import LayerProgram
from pyg_accel.rewrite.builder import Builder
from pyg_accel.rewrite.lift import NotLifted, Region, regions_of
from pyg_accel.rewrite.lower import lower
from pyg_accel.rewrite.nodes import Learning
from pyg_accel.rewrite.override import RUNNING
from pyg_accel.rewrite.select import DRIFT, Decision, Options, assumptions_of, make_decision
from pyg_accel.runtime.report import record

__all__ = ["RewrittenLayer"]

UNSEEN = 2  # after so many calls in a row with a new graph, every call is assumed to have one
MOST = 16  # decisions that a layer remembers
_MAXK = (MaxKGCNConv, MaxKSAGEConv, MaxKGINConv)


@dataclass
class _Rewritten:
    """What runs for the calls of one program.

    Attributes:
        regions: of the graph of the program.
        static: whether it was decided for features that are the same in every call.
        fresh: whether it was decided for calls that each have a new graph.
        sizes: (argument, dimension, size) that it was decided for, where they may differ.
        program: the rewritten program; None if the layer itself runs.
        reason: why the layer itself runs.
    """

    regions: list[Region]
    static: bool = False
    fresh: bool = False
    sizes: tuple[tuple[int, int, int], ...] = ()
    program: LayerProgram | None = None
    reason: str = ""

    def fits(self, leaves: tuple[Tensor, ...]) -> bool:
        """Whether the sizes of a call are near those that it was decided for."""
        for argument, dim, size in self.sizes:
            now = leaves[argument].size(dim)
            if max(now, size) > DRIFT * min(now, size):
                return False
        return True


class RewrittenLayer(torch.nn.Module):
    """What :class:`~pyg_accel.rewrite.optimized.OptimizedModel` runs in place of a layer.

    Calls that cannot be lifted run the layer itself.

    Attributes:
        conv: the layer.
        options: of ``optimize()``.
        decisions: the last decisions, the latest last.
        reasons: why calls ran the layer itself, and how many.
        calls: the lines of code that called the layer with the examples of ``optimize()``.
    """

    def __init__(self, conv: MessagePassing, options: Options) -> None:
        """Start without decisions."""
        super().__init__()
        self.conv = conv
        self.options = options
        self.decisions: list[Decision] = []
        self.reasons: dict[str, int] = {}
        self.calls: tuple[str, ...] = ()
        # By the halo of the calls; by this object for calls without one.
        self._recorded: weakref.WeakKeyDictionary[Any, Programs] = weakref.WeakKeyDictionary()
        self._rewritten: dict[LayerProgram, _Rewritten] = {}
        weakref.finalize(self, OverrideHandle({}).remove)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        if torch.compiler.is_compiling():  # layers that exchange halos end the compiler's graphs
            return self._disabled(args, kwargs) if LOOKUPS else self.conv(*args, **kwargs)
        if torch._C._is_tracing():
            return self.conv(*args, **kwargs)
        return self._run(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _disabled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        halos = LOOKUPS[0].of_call((*args, *kwargs.values())) if LOOKUPS else None
        if isinstance(halos, str):
            return self._left(halos, args, kwargs)
        if in_force() is not None and isinstance(self.conv, _MAXK):
            return self._left("sampled() does not apply to layers with MaxK", args, kwargs)
        programs = self._programs(self if halos is None else halos.halo)
        match = find(programs, args, kwargs)
        if match is None:
            return self._record(programs, halos, args, kwargs)
        program, leaves = match
        rewritten = self._rewritten.get(program)
        if rewritten is None:  # another thread has recorded it, and is still rewriting it
            return self.conv(*args, **kwargs)
        static = _are_static(leaves, halos)
        if rewritten.program is not None:
            # A halo has one size, so ranks do not decide again because of sizes: all of them
            # would have to.
            fresh = halos is None and rewritten.program.state.unseen > UNSEEN
            fits = halos is not None or rewritten.fits(leaves)
            if (static, fresh) != (rewritten.static, rewritten.fresh) or not fits:
                self._decide(program, leaves, rewritten, halos, static=static, fresh=fresh)
        if rewritten.program is None:
            return self._left(rewritten.reason, args, kwargs)
        start = perf_counter()
        try:
            out = rewritten.program.run(*leaves)
        except Unexpected as error:
            if halos is None:
                return self._record(programs, halos, args, kwargs)
            # Other ranks may not record this call, which they would have to agree on.
            return self._left(f"sizes of another kind: {error}", args, kwargs)
        text, backends = rewritten.program.formulas, rewritten.program.backends
        record(type(self.conv).__name__, text, backends, "", perf_counter() - start)
        return out

    def _programs(self, owner: Any) -> Programs:
        """Return the recorded programs of an owner."""
        programs = self._recorded.get(owner)
        if programs is None:
            programs = self._recorded[owner] = Programs(self.conv, OfClass())
        return programs

    def _left(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer itself."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        start = perf_counter()
        out = self.conv(*args, **kwargs)
        if not is_active(self.conv):  # otherwise patch() has counted the call
            record(type(self.conv).__name__, "", "PyG", reason, perf_counter() - start)
        return out

    def _record(
        self, programs: Programs, halos: Halos | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that no program fits: record it, and rewrite the program."""
        refuse_training(self.conv)
        start = perf_counter()
        recording = _recorded_call(programs, self.conv, args, kwargs, halos)
        if isinstance(recording, str):
            return self._left(recording, args, kwargs)
        program, reason = recording.program, ""
        rewritten = _Rewritten([])
        if program is None:
            reason = programs.of_class.reason
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
            if reason:  # a single rank must not record again
                programs.give_up(reason)
                program = None
        known = {known for each in self._recorded.values() for known in each.programs}
        for old in {*self._rewritten} - known:
            self._rewritten.pop(old, None)
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
        if recording.formulas:  # otherwise propagate() has counted the call
            record(type(self.conv).__name__, recording.formulas, recording.backends, "",
                   perf_counter() - start)  # fmt: skip
        return recording.out

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
        """Choose an association for each region of a program, and rewrite the program."""
        text, graph, decisions = rewritten_graph(
            program, rewritten.regions, self.options, leaves, halos, static=static, fresh=fresh
        )
        before = rewritten.program
        rewritten.program = program.with_graph(graph, text)
        rewritten.program.state.unseen = 0 if before is None else before.state.unseen
        rewritten.static, rewritten.fresh = static, fresh
        rewritten.sizes = tuple(
            (argument, dim, t.size(dim))
            for argument, (t, shape) in enumerate(
                zip(leaves, program.signature.shapes, strict=True)
            )
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
    """Choose an association for each region of a program, and build the graph with these.

    Args:
        program: of a call.
        regions: of its graph.
        options: of ``optimize()``.
        leaves: the tensors among the arguments of the call.
        halos: of the call in a distributed model, whose processes decide together.
        static: whether all its features are the same in every call.
        fresh: whether every call has a new graph.

    Returns:
        The associations as text, the graph, and the decisions.
    """
    inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
    same = frozenset(
        node
        for node, tensor in zip(inputs, leaves, strict=True)
        if static and _is_static(tensor, halos)
    )
    matrices = {node for region in regions for node in region.graphs.values()}
    learning, values = Learning(), _values_of(program, matrices, leaves)
    decided: dict[fx.Node, Decision] = {}
    for region in regions:
        assumed = assumptions_of(region, learning, train=options.train, static=same)
        graphs = {name: values[node] for name, node in region.graphs.items()}
        decided[region.root] = make_decision(
            region, assumed, options, graphs, fresh=fresh,
            slowest=None if halos is None else halos.slowest,
        )  # fmt: skip
    # With several precisions, or under autocast, that of the result may change.
    dtypes = {node.meta[ABOUT].dtype for node in program.graph.nodes if ABOUT in node.meta}
    cast = sum(dtype.is_floating_point for dtype in dtypes) > 1
    builder = Builder()
    for node in program.graph.nodes:
        if (decision := decided.get(node)) is None:
            builder.copy(node)
        else:
            out = lower(builder, decision.region, decision.choice.tree, decision.assumed.static,
                        cast=cast)  # fmt: skip
            if len(node.meta[ABOUT].shape) > 2:  # the layer may call view() to join the heads
                out = builder.call(Tensor.contiguous, out)
            builder.replace(node, out)
    text = "; ".join(str(decision.choice.tree) for decision in decided.values())
    return text, builder.finish(program.graph), [*decided.values()]


def _values_of(program: LayerProgram, nodes: set[fx.Node], leaves: tuple[Tensor, ...]) -> Any:
    """Return the values of nodes of a program in a call, by node."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    part.graph_copy(program.graph, copies)
    part.output(tuple(copies[node] for node in nodes))
    part.eliminate_dead_code()
    with torch.no_grad():
        return dict(zip(nodes, program.with_graph(part, "").run(*leaves), strict=True))


def _is_static(tensor: Tensor, halos: Halos | None) -> bool:
    return any(tensor is t for t in RUNNING.static) or (halos is not None and halos.stays(tensor))


def _are_static(leaves: tuple[Tensor, ...], halos: Halos | None) -> bool:
    """Whether all features of a call are the same in every call of the model."""
    if halos is None and not RUNNING.static:
        return False
    features = [t for t in leaves if t.is_floating_point() and t.dim() == 2]
    return bool(features) and all(_is_static(t, halos) for t in features)


def _recorded_call(
    programs: Programs,
    conv: MessagePassing,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    halos: Halos | None,
) -> Attempt | str:
    """Run a call of a layer and record it, even without ``patch()``; or return why not."""

    def make(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if halos is None else halos.running():
            return torch.nn.Module._call_impl(conv, *args, **kwargs)

    before, forced.on = (running.begin(), forced.on), True
    try:
        return attempt(programs, conv, "call", make, args, kwargs)
    finally:
        outer, forced.on = before
        running.end(outer)
