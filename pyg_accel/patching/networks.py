"""Networks on messages: their functions are recorded, and run on blocks of target rows.

A message that no formula expresses, because a linear layer follows something of several operands,
is a :class:`Network`: an operand of edges with the functions that compute it. They must work row by
row (:mod:`pyg_accel.patching.rules.rowwise`). A reduction over the targets runs them on the edges
of a block, reduces, and frees the results; see :mod:`pyg_accel.ops.blocked`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_accel import ops
from pyg_accel.formula import Formula, Operand, operands_of
from pyg_accel.ops.blocked import at_once, in_blocks
from pyg_accel.ops.blocks import Block, blocks_of, edges_of_a_block, fits_whole, free_bytes
from pyg_accel.ops.edge_product import edge_product, summed_products
from pyg_accel.patching.lazy import LazyTensor, Tracer, first_operand, is_single_side
from pyg_accel.patching.reasons import has_hooks, modules_in
from pyg_accel.patching.running import Unrecognised
from pyg_accel.patching.sampling import in_force
from pyg_accel.record.edge_tensors import DeferredOperand, materialize, plain_shape
from pyg_accel.record.recorder import quiet, running_recorder
from pyg_accel.settings import settings

__all__ = [
    "Network", "Product", "Step", "has_network", "hooked_inside", "is_of_edges", "leaf", "node_of",
    "reasons_against", "reduce_in_blocks",
]  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """A formula of operands, written out.

    Attributes:
        formula: its operands are numbered from 0.
        operands: tensors, or other nodes at the edges.
        sides: of every operand, ``"w"`` for one row that all targets share.
    """

    formula: Formula
    operands: "tuple[Tensor | Node, ...]"
    sides: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """A function that works row by row, with nodes among its arguments.

    Attributes:
        function: of torch.
        args: nodes at the edges; tensors that all edges share; and what is no tensor.
        kwargs: likewise.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """Features of every edge, [E, I], times a matrix that a linear layer makes of others, [E, H].

    Attributes:
        x: the features.
        hidden: the others.
        weight: [I * O, H].
        bias: [I * O], or None.
    """

    x: "Node"
    hidden: "Node"
    weight: Tensor
    bias: Tensor | None


Node = Message | Step | Product
_NARROW = 8  # numbers of a node
_FACTOR = 8  # tensors of messages that PyG's path has at a time, at most
_OUTPUTS = 16  # of a product, about
_KINDS = (Message, Step, Product)


class Network(DeferredOperand):
    """What a network makes of every edge, [E, ...], later.

    Functions of networks are recorded by the rules of lazy tensors.

    Attributes:
        node: how.
        call: that it belongs to.
    """

    node: Node
    call: Tracer

    @staticmethod
    def __new__(cls, trace: Tracer, node: Node, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """Put it off."""
        made = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=trace.device)
        made.node, made.call = node, trace
        return made

    def ordinary(self) -> Tensor:
        """See :meth:`DeferredOperand.ordinary`."""
        operand = Operand("e", 0)
        outs, _ = _run(self.call, operand, [self], (), self.call.rows_of_side("v"), of_edges=True)
        return outs[0]

    def differentiable(self) -> bool:
        """See :meth:`DeferredOperand.differentiable`."""
        return any(t.requires_grad for t, _ in _tensors(self.node))

    def hoisted(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See :meth:`DeferredOperand.hoisted`."""
        lazy = self.call.leaf("e", self, plain_shape(self), 0)
        made = self.call.rules.record(func, (lazy, *args), kwargs)
        if isinstance(made, (tuple, list)):
            return type(made)(first_operand(part) for part in made)
        return first_operand(made)


def has_network(lazy: LazyTensor) -> bool:
    """Whether a network makes an operand of a lazy tensor."""
    parts = lazy.parts or ()
    return any(isinstance(part, LazyTensor) and has_network(part) for part in parts) or any(
        isinstance(lazy.tracer.operands[o.index], Network) for o in operands_of(lazy.formula)
    )


def is_of_edges(lazy: LazyTensor) -> bool:
    """Whether a network reads tensors of edges alone: in PyG its numbers are there as well."""
    if not is_single_side(lazy):
        return False
    operand = first_operand(lazy)
    return isinstance(operand, Network) and all(side in "ew" for _, side in _tensors(operand.node))


def leaf(trace: Tracer, node: Node, shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
    """Return a lazy tensor that a node makes; raise where this call must not have one."""
    for reason in reasons_against(trace):
        raise Unrecognised(reason, permanent=False)
    return trace.leaf("e", Network(trace, node, shape, dtype), shape, 0)


def reasons_against(trace: Tracer) -> list[str]:
    """Why a network is not run in blocks."""
    if not trace.runs_networks:
        return ["a network on every edge, under torch.compile"]
    if in_force() is not None:
        return ["a network on every edge, of which some are sampled"]
    if torch.is_autocast_enabled(trace.device.type):
        return ["a network on every edge, under autocast"]
    return [] if trace.layer is None else hooked_inside(trace.layer)


def hooked_inside(layer: torch.nn.Module) -> list[str]:
    """Why no network of a layer is recorded: a part of it has hooks."""
    hooked = any(map(has_hooks, modules_in(*layer.children())))
    return ["a hook inside of the network on every edge"] if hooked else []


def node_of(value: Tensor) -> Node:
    """Return the node that makes a lazy tensor, or reads a tensor of edges."""
    if not isinstance(value, LazyTensor):
        return Message(Operand("e", 0), (value,), ("e",))
    if value.parts is not None:
        return Step(torch.cat, ([node_of(part) for part in value.parts],), {"dim": -1})
    trace = value.tracer
    formula, numbers = trace.own_numbers(value)
    operands = [trace.operands[n] for n in numbers]
    if is_single_side(value) and isinstance(operands[0], Network):
        return operands[0].node
    return Message(
        formula,
        tuple(t.node if isinstance(t, Network) else materialize(t) for t in operands),
        tuple("w" if trace.repeated[n] else trace.sides[n] for n in numbers),
    )


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
        with torch._C.DisableTorchFunctionSubclass():
            _decline_narrow_ends(trace, lazy.shape, lazy.dtype)
    outs, whole = _run(trace, formula, operands, tuple(reduces), num_rows, sides=sides)
    text = "outer(u0,e1) @ weight" if product else "network(edges)"
    trace.formulas.append(f"{'+'.join(reduces)}_j {text}" + ("" if whole else ", in blocks"))
    return [lazy.later.apply(out) for out in outs]


def _decline_narrow_ends(trace: Tracer, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise where blocks bring nothing but memory, and there is enough of it.

    Without gradients nothing runs twice, but all that a network of differences of a few numbers
    gains is the cache: it took 1.06 to 1.14 times as long as PyG's path.
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
) -> tuple[list[Tensor], bool]:
    """Return the results, and whether all edges were there at once."""
    if running_recorder.recorder is not None:
        running_recorder.recorder.stop("a network on the features of edges")
    given: list[Any] = [t.node if isinstance(t, Network) else materialize(t) for t in operands]
    root = Message(formula, tuple(given), tuple(sides))
    product = _product(formula, operands, reduces)
    shapes = [plain_shape(t) for t in operands]
    tensors = list(dict.fromkeys(_Known(t, side) for t, side in _tensors(root)))
    with quiet():
        graph = trace.graph_of(num_rows)
        size = _bytes(tensors, product, num_rows, trace.num_edges)
        whole = product is None and fits_whole(size * trace.num_edges, trace.device)

        def function(block: Block, parts: list[Tensor]) -> list[Tensor]:
            known = {known.key: part for known, part in zip(tensors, parts, strict=True)}
            values = _Values(block, known)
            if product is not None:
                out = values.summed(product, reduces[0])
                return [out.view(out.size(0), *shapes[0][1:])]
            if of_edges:
                return [values.of(root.operands[0])]
            made, names = values.operands(root)
            out = ops.gspmm(block.graph, names, made, reduce=list(reduces))
            return list(out)

        given, sides = [k.tensor for k in tensors], [k.side for k in tensors]
        if whole:
            return at_once(graph, function, given, sides, of_edges=of_edges), True
        most = edges_of_a_block(size, trace.device)
        blocks = blocks_of(graph, most, by_degree=product is not None)
        rows = trace.num_edges if of_edges else num_rows
        return in_blocks(blocks, function, given, sides, rows, of_edges=of_edges), False


def _product(
    formula: Formula, operands: Sequence[Tensor], reduces: Sequence[str]
) -> Product | None:
    """The product that is all there is of a message, if its reduction is one of outer products."""
    if not isinstance(formula, Operand) or tuple(reduces) not in (("sum",), ("mean",)):
        return None
    return _product_of(operands[0].node) if isinstance(operands[0], Network) else None


def _product_of(node: Node) -> Product | None:
    while isinstance(node, Step) and node.function is torch.reshape:
        node = node.args[0]
    return node if isinstance(node, Product) else None


class _Known:
    """A tensor that a network reads, by identity."""

    def __init__(self, tensor: Tensor, side: str) -> None:
        self.tensor, self.side = tensor, side
        self.key = (id(tensor), side)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.key == self.key


def _tensors(node: Node) -> Iterator[tuple[Tensor, str]]:
    """The tensors that a node reads, with their sides."""
    if isinstance(node, Message):
        for operand, side in zip(node.operands, node.sides, strict=True):
            if isinstance(operand, Tensor):
                yield operand, side
            else:
                yield from _tensors(operand)
        return
    if isinstance(node, Product):
        values: list[Any] = [node.x, node.hidden, node.weight, node.bias]
    else:
        values = [*node.args, *node.kwargs.values()]
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, _KINDS):
                yield from _tensors(item)
            elif isinstance(item, Tensor):
                yield item, "w"


class _Values:
    """What nodes make on a block; each is made once."""

    def __init__(self, block: Block, known: dict[tuple[int, str], Tensor]) -> None:
        self.block, self._known = block, known
        self._made: dict[int, Tensor] = {}

    def of(self, node: Any) -> Any:
        """The value of an argument: of a node, of a tensor that edges share, or itself."""
        if isinstance(node, (list, tuple)):
            return type(node)(self.of(item) for item in node)
        if isinstance(node, Tensor):
            return self._known[id(node), "w"]
        if not isinstance(node, _KINDS):
            return node
        if id(node) not in self._made:
            self._made[id(node)] = self._make(node)
        return self._made[id(node)]

    def _make(self, node: Node) -> Any:
        if isinstance(node, Step):
            kwargs = {name: self.of(value) for name, value in node.kwargs.items()}
            return node.function(*self.of(node.args), **kwargs)
        if isinstance(node, Product):
            return edge_product(*map(self.of, (node.x, node.hidden, node.weight, node.bias)))
        if isinstance(node.formula, Operand) and node.sides == ("e",):
            (operand,) = node.operands
            return (
                self._known[id(operand), "e"] if isinstance(operand, Tensor) else self.of(operand)
            )
        operands, formula = self.operands(node)
        return ops.gspmm(self.block.graph, formula, operands, reduce="none")

    def operands(self, node: Message) -> tuple[list[Tensor], Formula]:
        """The operands of a formula on the block's graph."""
        made = []
        for operand, side in zip(node.operands, node.sides, strict=True):
            if not isinstance(operand, Tensor):
                made.append(self.of(operand))
                continue
            part = self._known[id(operand), side]
            rows = self.block.graph.num_rows
            made.append(part.expand(rows, *part.shape[1:]) if side == "w" else part)
        return made, node.formula

    def summed(self, product: Product, reduce: str) -> Tensor:
        """The sums or means of products over the block's targets."""
        x, of_sources = product.x, False
        if isinstance(x, Step) and x.function is torch.reshape:
            x = x.args[0]
        if isinstance(x, Message) and x.sides == ("u",) and isinstance(x.formula, Operand):
            operand = x.operands[0]
            assert isinstance(operand, Tensor)
            features, of_sources = self._known[id(operand), "u"], True
        else:
            features = self.of(x)
        hidden, weight, bias = map(self.of, (product.hidden, product.weight, product.bias))
        features = features.flatten(1)
        out = summed_products(self.block, features, hidden, weight, bias, of_sources=of_sources)
        if reduce == "mean":
            out = out / self.block.graph.degree.clamp(min=1).to(out.dtype).unsqueeze(1)
        return out


def _bytes(
    tensors: Sequence[_Known], product: Product | None, num_rows: int, num_edges: int
) -> int:
    """About as many bytes as a network makes of an edge: what it reads, and a row a matrix."""
    numbers = 0
    for known in tensors:
        t = known.tensor
        if known.side != "w":
            numbers += 2 * t.shape[1:].numel()
        elif t.dim() > 1 and (product is None or t is not product.weight):
            numbers += 3 * t.size(0)
    if product is not None:  # an outer product a target
        numbers += 3 * product.weight.numel() * num_rows // max(num_edges, 1) // _OUTPUTS
    return numbers * max(known.tensor.itemsize for known in tensors)
