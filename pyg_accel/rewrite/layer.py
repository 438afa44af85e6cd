"""The transform of ``optimize()``: programs of a layer with their products in the fastest order."""

import linecache
import os
import sys
import weakref
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch_geometric.nn import MessagePassing

import pyg_accel
from pyg_accel.graph.memo import running as borrowing
from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from pyg_accel.patching.api import installed
from pyg_accel.patching.context import context
from pyg_accel.patching.gate import Call, leave
from pyg_accel.patching.layers import forward_of
from pyg_accel.patching.programs import OfClass, Programs
from pyg_accel.patching.reasons import forced, is_active
from pyg_accel.patching.recording import attempt, held
from pyg_accel.patching.running import running
from pyg_accel.patching.sampling import in_force, refuse_training
from pyg_accel.record.about import ABOUT
from pyg_accel.record.program import LayerProgram
from pyg_accel.rewrite.builder import Builder
from pyg_accel.rewrite.lift import NotLifted, Region, regions_of
from pyg_accel.rewrite.lower import lower
from pyg_accel.rewrite.nodes import Learning
from pyg_accel.rewrite.select import DRIFT, Decision, Options, assumptions_of, make_decision
from pyg_accel.runtime.report import record

__all__ = ["Reassociation"]

UNSEEN = 2  # after so many calls in a row with a new graph, every call is assumed to have one
MOST = 16  # decisions that a layer remembers
_MAXK = (MaxKGCNConv, MaxKSAGEConv, MaxKGINConv)
# Folders whose code stands between a model's and its layers.
_PASSED = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, pyg_accel.__file__))


class _Decided(NamedTuple):
    """For which calls the orders of a program were chosen.

    Attributes:
        regions: of the recorded graph.
        static: whether features are the same in every call.
        fresh: whether each call has a new graph.
        sizes: (argument, dimension, size), where sizes may differ between calls.
    """

    regions: list[Region]
    static: bool
    fresh: bool
    sizes: tuple[tuple[int, int, int], ...]

    def fits(self, leaves: tuple[Tensor, ...]) -> bool:
        """Return whether the sizes of a call are near those of the decision."""
        for argument, dim, size in self.sizes:
            now = leaves[argument].size(dim)
            if max(now, size) > DRIFT * min(now, size):
                return False
        return True


class Reassociation:
    """Transforms the programs of a layer; see :class:`pyg_accel.patching.running.Transform`.

    Calls that cannot be lifted run the layer itself.

    Attributes:
        conv: the layer.
        options: of ``optimize()``.
        decisions: the last decisions, the latest last.
        reasons: why calls ran the layer itself, and how many.
        calls: the lines of code that called the layer while they were noted.
        notes_calls: whether they are noted now.
    """

    def __init__(self, conv: MessagePassing, options: Options) -> None:
        """Start without decisions."""
        self.conv, self.options = conv, options
        self.decisions: list[Decision] = []
        self.reasons: dict[str, int] = {}
        self.calls: dict[str, None] = {}
        self.notes_calls = False
        self._programs = Programs(conv, OfClass())
        self._by_halo: weakref.WeakKeyDictionary[Any, Programs] = weakref.WeakKeyDictionary()

    def programs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Programs | None:
        """Return the programs that a call may fit; None if the layer itself runs."""
        if self.notes_calls:
            self.calls[_calling_line()] = None
        if "halos" not in installed:
            return self._programs
        halos = installed["halos"].of_call((*args, *kwargs.values()))
        if halos is None or isinstance(halos, str):
            return None if halos else self._programs
        known = self._by_halo.get(halos.halo)
        if known is None:
            known = self._by_halo[halos.halo] = Programs(self.conv, OfClass())
        return known

    def revised(
        self, known: Programs, program: LayerProgram, leaves: tuple[Tensor, ...]
    ) -> LayerProgram:
        """Return the program of a call, with other orders if the call differs from the decision."""
        decided: _Decided = program.state.decided
        halos = installed["halos"].of_call(leaves) if "halos" in installed else None
        if halos is None:
            static = bool(running.static) and _are_static(leaves, None)
            fresh = program.state.unseen > UNSEEN
            if (static, fresh) == decided[1:3] and decided.fits(leaves):
                return program
        else:
            # A halo has one size, so ranks do not decide again because of sizes: all of them
            # would have to.
            fresh = False
            if isinstance(halos, str) or (static := _are_static(leaves, halos)) == decided.static:
                return program
        new = self._decided(program, leaves, decided.regions, halos, static=static, fresh=fresh)
        known.store(new, program)
        return new

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that no program fits: record it and transform the program, if it can be."""
        outer, running.transforms = running.transforms, {}
        try:
            known, halos = self.programs(args, kwargs), None
            if "halos" in installed:
                halos = installed["halos"].of_call((*args, *kwargs.values()))
            if isinstance(halos, str):
                return self._left(halos, args, kwargs)
            assert known is not None
            if in_force() is not None and isinstance(self.conv, _MAXK):
                reason = "sampled() does not apply to layers with MaxK"
                return self._left(reason, args, kwargs)
            if halos is not None and any(p.admit(args, kwargs) for p in held(known, context())):
                # Other ranks may not record this call, which they would have to agree on.
                return self._left("sizes of another kind", args, kwargs)
            return self._recorded(known, halos, args, kwargs)
        finally:
            running.transforms = outer

    def _left(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer itself."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        call = Call(type(self.conv)._call_impl, self.conv, args, kwargs)
        return leave(call, [reason], counts=not is_active(self.conv))  # else patch() counts it

    def _recorded(
        self, known: Programs, halos: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        refuse_training(self.conv)
        start = perf_counter()

        def run(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
            if halos is None:
                return forward_of(conv, *args, **kwargs)
            with halos.running():
                return forward_of(conv, *args, **kwargs)

        before, forced.on = (borrowing.begin(), forced.on), True
        try:
            made = attempt(known, self.conv, "call", run, args, kwargs)
        finally:
            outer, forced.on = before
            borrowing.end(outer)
        if isinstance(made, str):
            return self._left(made, args, kwargs)
        program, name = made.program, type(self.conv).__name__
        regions: list[Region] = []
        reason = known.of_class.reason if program is None else ""
        if program is not None:
            try:
                regions = regions_of(program.graph, program.constants, name)
            except NotLifted as why:
                reason = str(why)
        if halos is not None:
            reason = halos.agree(reason, "; ".join(str(region.expr) for region in regions))
        if program is not None and not reason:
            leaves = tuple(program.signature.leaves(args, kwargs))
            static = _are_static(leaves, halos)
            new = self._decided(program, leaves, regions, halos, static=static, fresh=False)
            known.store(new, made.alike)
        else:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
            if halos is not None:  # a single rank must not record again
                known.give_up(reason)
            elif program is not None:
                known.of_class.fail(made.kind, reason)
        if made.formulas:  # otherwise propagate() has counted the call
            record(name, made.formulas, made.backends, "", perf_counter() - start)
        return made.out

    def _decided(
        self,
        program: LayerProgram,
        leaves: tuple[Tensor, ...],
        regions: list[Region],
        halos: Any,
        *,
        static: bool,
        fresh: bool,
    ) -> LayerProgram:
        """Choose an association for each region of a program, and let the program run them.

        Args:
            program: of a call.
            leaves: the tensors among the arguments of the call.
            regions: of the recorded graph.
            halos: of the call in a distributed model, whose processes decide together.
            static: whether all its features are the same in every call.
            fresh: whether every call has a new graph.
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
            assumed = assumptions_of(region, learning, train=self.options.train, static=same)
            graphs = {name: values[node] for name, node in region.graphs.items()}
            decided[region.root] = make_decision(
                region, assumed, self.options, graphs, fresh=fresh,
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
        new = program.transformed(builder.finish(program.graph), text)
        shapes = zip(leaves, program.signature.shapes, strict=True)
        sizes = tuple(
            (argument, dim, t.size(dim))
            for argument, (t, shape) in enumerate(shapes)
            for dim, size in enumerate(shape) if size is None
        )  # fmt: skip
        new.state.decided = _Decided(regions, static, fresh, sizes)
        self.decisions = [*self.decisions, *decided.values()][-MOST:]
        return new


def _values_of(program: LayerProgram, nodes: set[fx.Node], leaves: tuple[Tensor, ...]) -> Any:
    """Return the values of nodes of a program in a call, by node."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    part.graph_copy(program.graph, copies)
    part.output(tuple(copies[node] for node in nodes))
    part.eliminate_dead_code()
    with torch.no_grad():
        return dict(zip(nodes, program.transformed(part, "").run(*leaves), strict=True))


def _is_static(tensor: Tensor, halos: Any) -> bool:
    return any(tensor is t for t in running.static) or (halos is not None and halos.stays(tensor))


def _are_static(leaves: tuple[Tensor, ...], halos: Any) -> bool:
    """Whether all features of a call are the same in every call of the model."""
    if halos is None and not running.static:
        return False
    features = [t for t in leaves if t.is_floating_point() and t.dim() == 2]
    return bool(features) and all(_is_static(t, halos) for t in features)


def _calling_line() -> str:
    """Return the line of code that calls the layer, and where that is."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{linecache.getline(path, number).strip()}  # {Path(path).name}, line {number}"
