"""The transform of ``optimize()``: programs of a layer with their products in the fastest order."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.nn import Module

from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from pyg_accel.patching.context import context
from pyg_accel.patching.programs import OfClass, Programs, matching
from pyg_accel.patching.sampling import in_force
from pyg_accel.record.metadata import FACTS
from pyg_accel.record.program import LayerProgram
from pyg_accel.rewrite.builder import Builder
from pyg_accel.rewrite.lift import NotLifted, Region, regions_of
from pyg_accel.rewrite.lower import lower
from pyg_accel.rewrite.nodes import learning
from pyg_accel.rewrite.select import DRIFT, Decision, Options, assumptions_of, make_decision
from pyg_accel.runtime.state import running

__all__ = ["Reassociation"]

MOST = 16  # decisions stored per layer
_MAXK = (MaxKGCNConv, MaxKSAGEConv, MaxKGINConv)


class Reassociation(Programs):
    """Programs of a layer, with their products in the fastest order.

    In a distributed model all processes make the same choice, once for each halo.

    Attributes:
        options: of ``optimize()``.
        wire: to the other processes; None in one process.
        decisions: the last decisions, the latest last.
        reasons: why calls ran the original layer.
        calls: the lines of code that called the layer during ``optimize()``.
    """

    drift = DRIFT

    def __init__(self, conv: Module, options: Options, wire: Any = None) -> None:
        """Start without decisions."""
        super().__init__(conv, OfClass())
        self.options, self.wire = options, wire
        self.decisions: list[Decision] = []
        self.reasons: dict[str, None] = {}
        self.calls: dict[str, None] = {}
        self._of_halos: WeakKeyDictionary[Any, dict[bool, Reassociation]] = WeakKeyDictionary()

    def of_halo(self, halo: Any, leaves: list[Tensor]) -> "Reassociation":
        """Return the programs for a halo and static features, or for a halo and other features."""
        programs, static = self._of_halos.setdefault(halo, {}), _are_static(leaves)
        if static not in programs:
            programs[static] = Reassociation(self.layer, self.options, halo.wire)
            programs[static].decisions, programs[static].reasons = self.decisions, self.reasons
        return programs[static]

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why a call is not transformed; empty if it is."""
        if in_force() is not None and isinstance(self.layer, _MAXK):
            return "sampled() does not apply to layers with MaxK"
        admits = self.wire is not None and any(
            program.admit(args, kwargs) for program in matching(self, context())
        )
        # A record needs the agreement of all ranks, and other ranks may not record this call.
        return "sizes of another kind" if admits else ""

    def transformed(
        self, program: LayerProgram | None, kind: Any, leaves: list[Tensor]
    ) -> LayerProgram | None:
        """Return the program of a recorded call with its products in the fastest order."""
        reason = self.of_class.reason if program is None else ""
        regions: list[Region] = []
        if program is not None:
            try:
                regions = self._regions_of(program)
            except NotLifted as why:
                reason = str(why)
        if self.wire is not None:
            products = "; ".join(str(region.expr) for region in regions)
            every = self.wire.values((reason, products))
            if len({text for _, text in every}) > 1:
                every.append(("ranks read different products in it", ""))
            reason = next(filter(None, (why for why, _ in every)), "")
        if program is not None and not reason:
            return self._reordered(program, leaves, regions, new_graphs=False)
        self.reasons[reason] = None
        if self.wire is not None:  # a single rank must not record again
            self.give_up(reason)
        elif program is not None:
            self.of_class.fail(kind, reason)
        return None

    def again(self, program: LayerProgram, leaves: tuple[Tensor, ...]) -> LayerProgram:
        """Choose again, because calls began to have new graphs, or to repeat earlier ones."""
        new_graphs = not program.state.new_graphs
        new = self._reordered(program, leaves, self._regions_of(program), new_graphs=new_graphs)
        self.store(new, program)
        return new

    def _regions_of(self, program: LayerProgram) -> list[Region]:
        return regions_of(program.graph, program.constants, type(self.layer).__name__)

    def _reordered(
        self,
        program: LayerProgram,
        leaves: list[Tensor] | tuple[Tensor, ...],
        regions: list[Region],
        *,
        new_graphs: bool,
    ) -> LayerProgram:
        """Return a program that runs the chosen association of each region.

        Args:
            program: the recorded call.
            leaves: the tensors among the arguments of the call.
            regions: of the recorded graph.
            new_graphs: whether every call has a new graph.
        """
        inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
        pairs = zip(inputs, leaves, strict=True) if _are_static(leaves) else ()
        static = frozenset(node for node, tensor in pairs if _is_static(tensor))
        matrices = {node for region in regions for node in region.graphs.values()}
        learns, values = learning(), _values_of(program, matrices, leaves)
        decided: dict[fx.Node, Decision] = {}
        for region in regions:
            assumed = assumptions_of(region, learns, train=self.options.train, static=static)
            graphs = {name: values[node] for name, node in region.graphs.items()}
            decided[region.root] = make_decision(
                region, assumed, self.options, graphs, fresh=new_graphs,
                slowest=None if self.wire is None else self.wire.slowest,
            )  # fmt: skip
        # With several precisions, or under autocast, the dtype of the result may change.
        dtypes = {node.meta[FACTS].dtype for node in program.graph.nodes if FACTS in node.meta}
        cast = sum(dtype.is_floating_point for dtype in dtypes) > 1
        builder = Builder()
        for node in program.graph.nodes:
            if (decision := decided.get(node)) is None:
                builder.copy(node)
            else:
                out = lower(builder, decision.region, decision.choice.tree, decision.assumed.static,
                            cast=cast)  # fmt: skip
                if len(node.meta[FACTS].shape) > 2:  # the layer may call view() to join the heads
                    out = builder.call(Tensor.contiguous, out)
                builder.replace(node, out)
        text = "; ".join(str(decision.choice.tree) for decision in decided.values())
        new = program.transformed(builder.finish(program.graph), text)
        if self.wire is None:
            new.state.new_graphs = new_graphs
        self.decisions += decided.values()
        del self.decisions[:-MOST]
        return new


def _values_of(program: LayerProgram, nodes: set[fx.Node], leaves: Any) -> Any:
    """Return the values of nodes of a program in a call, by node."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    part.graph_copy(program.graph, copies)
    part.output(tuple(copies[node] for node in nodes))
    part.eliminate_dead_code()
    with torch.no_grad():
        return dict(zip(nodes, program.transformed(part, "").run(*leaves), strict=True))


def _is_static(tensor: Tensor) -> bool:
    return any(tensor is t for t in running.static)


def _are_static(leaves: Any) -> bool:
    """Whether all calls of the model have the same features."""
    features = [t for t in leaves if t.is_floating_point() and t.dim() == 2]
    return bool(features) and all(map(_is_static, features))
