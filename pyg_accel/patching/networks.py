"""Networks on messages: their functions are recorded, and run later.

A message without a formula, since it has a linear layer of several operands, is a :class:`Network`:
an edge operand with the functions that compute it, as a node of a torch.fx graph. They must work
row by row (:mod:`pyg_accel.patching.rules.rowwise`). A GPU with enough memory runs them on all
edges at once: formulas by one kernel each, other functions by torch. Otherwise a reduction over the
targets runs them on the edges of a block, reduces, and frees the results; see
:mod:`pyg_accel.ops.blocked`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pyg_accel import ops
from pyg_accel.formula import NETWORK, OUTER, Computation, Formula, Operand, operands_of
from pyg_accel.graph import Graph
from pyg_accel.ops.blocked import in_blocks
from pyg_accel.ops.blocks import Block, fits_whole, free_bytes
from pyg_accel.ops.edge_product import edge_product, summed_products
from pyg_accel.patching.lazy import LazyTensor, Tracer, first_operand, is_single_side
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.sampling import in_force
from pyg_accel.record.edge_tensors import DeferredOperand, materialize, plain_shape
from pyg_accel.record.recorder import perform, quiet
from pyg_accel.record.steps import Steps
from pyg_accel.runtime.hooks import has_hooks
from pyg_accel.runtime.module_state import modules_in
from pyg_accel.runtime.state import running
from pyg_accel.settings import settings

__all__ = [
    "Network", "calls", "has_network", "hooked_inside", "is_of_edges", "is_written_whole", "leaf",
    "node_of", "reads", "reasons_against", "reduce_in_blocks", "viewed", "written",
]  # fmt: skip


_NARROW = 8  # numbers of a node
_FACTOR = 8  # most tensors of messages that PyG's path holds at a time
_OUTPUTS = 16  # typical outputs of a product
_TENSOR, _SIDE = "tensor", "side"  # keys of the metadata of placeholders


class Network(DeferredOperand):
    """The deferred output of a network on every edge, [E, ...].

    The rules of lazy tensors record the functions of networks.

    Attributes:
        node: computes it.
        call: the call of its messages.
    """

    node: fx.Node
    call: Tracer

    def ordinary(self) -> Tensor:
        """See :meth:`DeferredOperand.ordinary`."""
        operand = Operand("e", 0)
        return _run(self.call, operand, [self], (), self.call.num_targets(), of_edges=True)[0]

    def differentiable(self) -> bool:
        """See :meth:`DeferredOperand.differentiable`."""
        return any(read.meta[_TENSOR].requires_grad for read in _inputs(self.node))

    def hoisted(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See :meth:`DeferredOperand.hoisted`."""
        lazy = self.call.leaf("e", self, plain_shape(self), 0)
        result = self.call.rules.record(func, (lazy, *args), kwargs)
        if isinstance(result, (tuple, list)):
            return type(result)(first_operand(part) for part in result)
        return first_operand(result)


def has_network(lazy: LazyTensor) -> bool:
    """Whether a lazy tensor has a network among its operands."""
    parts = lazy.parts or ()
    return any(isinstance(part, LazyTensor) and has_network(part) for part in parts) or any(
        isinstance(lazy.tracer.operands[o.index], Network) for o in operands_of(lazy.formula)
    )


def is_of_edges(lazy: LazyTensor) -> bool:
    """Whether a network only reads tensors of edges, which are in memory anyway."""
    if not is_single_side(lazy):
        return False
    operand = first_operand(lazy)
    return isinstance(operand, Network) and all(
        read.meta[_SIDE] in "ew" for read in _inputs(operand.node)
    )


def is_written_whole(lazy: LazyTensor) -> bool:
    """Whether a recording materialises messages: on a GPU with enough memory.

    PyG's path does so too, for functions of all edges such as a batch norm in training. Features of
    nodes alone are left to PyG.
    """
    recorder, trace = running.recorder, lazy.tracer
    of_nodes = isinstance(lazy.formula, Operand) and lazy.formula.side != "e"
    if recorder is None or recorder.reason or of_nodes:
        return False
    size, width = _FACTOR * lazy.numel() * lazy.dtype.itemsize, lazy.shape[1:].numel()
    if reasons_against(trace) or not fits_whole(size, trace.device):
        return False
    trace.network_bytes = max(trace.network_bytes, width * lazy.dtype.itemsize)
    return True


def written(trace: Tracer, messages: Tensor) -> LazyTensor:
    """Return materialised messages of a recording as a lazy tensor."""
    return leaf(trace, reads(trace, messages, "e"), messages.shape, messages.dtype)


def leaf(trace: Tracer, node: fx.Node, shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
    """Return the lazy tensor of a node; raise if the call must not have networks."""
    for reason in reasons_against(trace):
        raise Unrecognised(reason, permanent=False)
    network = Network(shape, dtype, trace.device, node=node, call=trace)
    return trace.leaf("e", network, shape, 0)


def reasons_against(trace: Tracer) -> list[str]:
    """The reasons against networks in a call."""
    if not trace.runs_networks:
        return ["a network on every edge, under torch.compile"]
    if in_force() is not None:
        return ["a network on every edge, of which some are sampled"]
    if torch.is_autocast_enabled(trace.device.type):
        return ["a network on every edge, under autocast"]
    return [] if trace.layer is None else hooked_inside(trace.layer)


def hooked_inside(layer: torch.nn.Module) -> list[str]:
    """The reasons against networks of a layer: hooks inside of it."""
    hooked = any(map(has_hooks, modules_in(*layer.children())))
    return ["a hook inside of the network on every edge"] if hooked else []


def reads(trace: Tracer, tensor: Tensor, side: str = "w") -> fx.Node:
    """Return the node of a tensor.

    Args:
        trace: of the call.
        tensor: that a network reads.
        side: of its rows, ``"w"`` for a tensor that all edges share.
    """
    node: fx.Node
    placeholders = trace.networks.find_nodes(op="placeholder")
    for node in placeholders:
        if node.meta and node.meta[_TENSOR] is tensor and node.meta[_SIDE] == side:
            return node
    node = trace.networks.placeholder(f"t{len(placeholders)}")
    node.meta = {_TENSOR: tensor, _SIDE: side}
    return node


def calls(trace: Tracer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Return the node of a function that works row by row, with nodes among its arguments."""
    return trace.networks.call_function(function, args, kwargs)


def node_of(trace: Tracer, value: Tensor) -> fx.Node:
    """Return the node of a lazy tensor, or of a tensor of edges."""
    if not isinstance(value, LazyTensor):
        return reads(trace, value, "e")
    if value.parts is not None:
        return calls(trace, torch.cat, [node_of(trace, part) for part in value.parts], dim=-1)
    formula, numbers = trace.own_numbers(value)
    operands = [trace.operands[n] for n in numbers]
    if is_single_side(value) and isinstance(operands[0], Network):
        return operands[0].node
    sides = tuple("w" if trace.repeated[n] else trace.sides[n] for n in numbers)
    return _message(trace, _written_out, formula, operands, sides)


def _message(
    trace: Tracer,
    function: Callable[..., Any],
    formula: Formula,
    operands: Sequence[Tensor],
    sides: Sequence[str],
    **kwargs: Any,
) -> fx.Node:
    """The node of a function of a block and the formula, sides and operands of a message."""
    nodes = [t.node if isinstance(t, Network) else reads(trace, materialize(t), side)
             for t, side in zip(operands, sides, strict=True)]  # fmt: skip
    return calls(trace, function, _block(trace), formula, tuple(sides), *nodes, **kwargs)


def _block(trace: Tracer) -> fx.Node:
    block: fx.Node = next(iter(trace.networks.nodes))
    return block


class _Whole(NamedTuple):
    """All edges in place of a block, in the order of the edge list.

    The recorder computes the number of targets in each call of a program.
    """

    graph: Graph
    num_rows: int


def _written_out(
    block: Block | _Whole, formula: Formula, sides: Sequence[str], *operands: Tensor
) -> Tensor:
    if isinstance(formula, Operand) and sides[0] == "e":
        return operands[0]
    expanded = _repeated(block, sides, operands)
    out: Tensor = perform(ops.gspmm, block.graph, formula, expanded, reduce="none", edge_order=True)
    return out


def _repeated(
    block: Block | _Whole, sides: Sequence[str], operands: Sequence[Tensor]
) -> list[Tensor]:
    """Operands, with shared rows repeated for every target."""
    return [t.expand(block.num_rows, *t.shape[1:]) if side == "w" else t
            for t, side in zip(operands, sides, strict=True)]  # fmt: skip


# -- running --------------------------------------------------------------------------------------


def reduce_in_blocks(
    trace: Tracer, lazy: LazyTensor, reduces: Sequence[str], num_rows: int
) -> list[Tensor]:
    """Reduce messages over the targets: a result for each reduction."""
    formula, numbers = trace.own_numbers(lazy)
    operands = [trace.operands[n] for n in numbers]
    sides = ["w" if trace.repeated[n] else trace.sides[n] for n in numbers]
    product = _product(formula, operands, reduces) is not None
    if not (product or torch.is_grad_enabled() or settings.always):
        _decline_narrow_ends(trace, lazy.shape, lazy.dtype)
    read, operator = (Operand("u", 0), OUTER) if product else (None, NETWORK)
    computed = Computation(read, tuple(reduces), operator=operator)
    outs = _run(trace, formula, operands, tuple(reduces), num_rows, sides=sides, computed=computed)
    return [lazy.later.apply(out) for out in outs]


def _decline_narrow_ends(trace: Tracer, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise if blocks would only save memory, and there is enough of it.

    Without gradients nothing runs twice, but a network of differences of a few numbers only gains
    from the cache: it took 1.06 to 1.14 times as long as PyG's path.
    """
    numbers = [plain_shape(t)[1:].numel() for t, _ in trace.gathered]
    if max(numbers, default=0) > _NARROW:
        return
    if _FACTOR * shape.numel() * dtype.itemsize < free_bytes(trace.device):
        raise Unrecognised("a network on a few numbers of the nodes, without gradients",
                           permanent=False)  # fmt: skip


def _run(
    trace: Tracer,
    formula: Formula,
    operands: Sequence[Tensor],
    reduces: tuple[str, ...],
    num_rows: int,
    *,
    sides: Sequence[str] = ("e",),
    of_edges: bool = False,
    computed: Computation | None = None,
) -> list[Tensor]:
    """Return the results: of all edges at once, or block by block."""
    product = _product(formula, operands, reduces)
    widths = [plain_shape(t)[1:].numel() * t.itemsize for t in operands if isinstance(t, Network)]
    if product is not None:  # of the matrix of each edge
        weight = product.args[2].meta[_TENSOR]  # type: ignore[union-attr]
        widths.append(weight.size(0) * weight.itemsize)
    trace.network_bytes = max(trace.network_bytes, *widths)
    if product is not None:
        root = _summed_product(trace, product, reduces[0], plain_shape(operands[0]))
    elif of_edges:
        root = operands[0].node  # type: ignore[attr-defined]
    else:
        root = _message(trace, _reduced, formula, operands, sides, reduces=reduces)
    tensors = _inputs(root)
    inputs = [_block(trace), *tensors]
    size = _bytes(tensors, product, num_rows, trace.num_edges)
    whole = product is None and fits_whole(size * trace.num_edges, trace.device)
    if computed is not None:
        computed = replace(computed, in_blocks=not whole)
        trace.formulas.append(computed)

    with quiet():
        graph = trace.graph_of(num_rows)
        values, sides = ([node.meta[key] for node in tensors] for key in (_TENSOR, _SIDE))
        steps = Steps.of(inputs, [node for node in _needed(root) if node.op != "placeholder"])
        if whole:
            return steps(_Whole(graph, num_rows), values)
        rows, by_degree = trace.num_edges if of_edges else num_rows, product is not None
        return perform(in_blocks, graph, size, steps, values, sides, rows,
                       of_edges=of_edges, by_degree=by_degree)  # fmt: skip


def _product(
    formula: Formula, operands: Sequence[Tensor], reduces: Sequence[str]
) -> fx.Node | None:
    """The product that a message consists of, if it can be reduced by outer products."""
    if not isinstance(formula, Operand) or tuple(reduces) not in (("sum",), ("mean",)):
        return None
    node = viewed(operands[0].node) if isinstance(operands[0], Network) else None
    return node if node is not None and node.target is edge_product else None


def viewed(node: fx.Node) -> fx.Node:
    """Return the base of a view."""
    while node.target is torch.reshape:
        (node, _) = node.args  # type: ignore[assignment]
    return node


def _summed_product(trace: Tracer, product: fx.Node, reduce: str, shape: torch.Size) -> fx.Node:
    """The sums or means of products over the targets of a block."""
    x, *others = product.args
    assert isinstance(x, fx.Node)
    x = viewed(x)
    of_sources = x.target is _written_out and x.args[2] == ("u",) and isinstance(x.args[1], Operand)
    features = x.args[3] if of_sources else x
    return calls(trace, _summed, _block(trace), reduce, shape[1:], features, *others,
                 of_sources=of_sources)  # fmt: skip


def _summed(
    block: Block, reduce: str, shape: torch.Size, features: Tensor, *others: Any, of_sources: bool
) -> Tensor:
    out = summed_products(block, features.flatten(1), *others, of_sources=of_sources)
    if reduce == "mean":
        out = out / block.graph.degree.clamp(min=1).to(out.dtype).unsqueeze(1)
    return out.view(out.size(0), *shape)


def _reduced(
    block: Block | _Whole,
    formula: Formula,
    sides: Sequence[str],
    *operands: Tensor,
    reduces: Sequence[str],
) -> list[Tensor]:
    expanded = _repeated(block, sides, operands)
    return list(
        perform(ops.gspmm, block.graph, formula, expanded, reduce=list(reduces), edge_order=True)
    )


def _needed(node: fx.Node) -> list[fx.Node]:
    """The ancestors of a node, and itself, in order."""
    ancestors, pending = {node}, [node]
    for one in pending:  # as it grows
        more = [source for source in one.all_input_nodes if source not in ancestors]
        ancestors.update(more)
        pending += more
    return [one for one in node.graph.nodes if one in ancestors]


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The placeholders among the ancestors of a node."""
    return [one for one in _needed(node) if _TENSOR in one.meta]


def _bytes(
    tensors: Sequence[fx.Node], product: fx.Node | None, num_rows: int, num_edges: int
) -> int:
    """Approximate bytes of intermediate results per edge: inputs, and a row per matrix."""
    numbers = 0
    weight = None if product is None else product.args[2]
    for node in tensors:
        t = node.meta[_TENSOR]
        if node.meta[_SIDE] != "w":
            numbers += 2 * t.shape[1:].numel()
        elif t.dim() > 1 and node is not weight:
            numbers += 3 * t.size(0)
    if isinstance(weight, fx.Node):  # an outer product per target
        numbers += 3 * weight.meta[_TENSOR].numel() * num_rows // max(num_edges, 1) // _OUTPUTS
    return numbers * max(int(node.meta[_TENSOR].itemsize) for node in tensors)
