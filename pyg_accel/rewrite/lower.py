"""Runs association trees: every primitive becomes a call of :mod:`pyg_accel.ops` or of torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_accel import ops
from pyg_accel.cache import Snapshot, changes_unseen
from pyg_accel.cbsr import CBSR
from pyg_accel.formula import parse
from pyg_accel.graph import Graph
from pyg_accel.patching.sampling import aggregate
from pyg_accel.rewrite.algebra import Algebra, Call
from pyg_accel.rewrite.ir import Leaf
from pyg_accel.rewrite.matrices import Matrix, Scores, derived
from pyg_accel.rewrite.tree import (
    WRITTEN,
    Node,
    Tree,
    folded_nodes,
    is_sparse,
    leaves_in,
    nodes_of,
    static_nodes,
)

__all__ = ["Program"]


class Program:
    """A tree, ready to run.

    Attributes:
        tree: what it computes.
    """

    def __init__(
        self,
        tree: Tree,
        algebra: Algebra,
        static: frozenset[str] = frozenset(),
        *,
        sampled: bool = False,
    ) -> None:
        """Number the nodes.

        Args:
            tree: an association of the expression of ``algebra``.
            algebra: where the values of leaves come from.
            static: leaves that are the same in every call with the same graph: what depends on
                them alone is computed once a graph.
            sampled: it is run inside ``sampled()``.
        """
        self.tree, self._algebra, self._sampled = tree, algebra, sampled
        items: dict[Tree, int] = {}
        for node in nodes_of(tree):
            for item in (*node.args, node):
                if item is not None:
                    items.setdefault(item, len(items))
        items.setdefault(tree, len(items))
        self._items = list(items)
        self._args = [
            tuple(None if a is None else items[a] for a in i.args) if isinstance(i, Node) else ()
            for i in self._items
        ]
        self._root = items[tree]
        matrices = [i for i in self._items if isinstance(i, Leaf) and is_sparse(i)]
        self._matrix = items[matrices[0]] if matrices else -1
        readers = [a for args in self._args for a in args]
        self._lone = [readers.count(number) <= 1 for number in range(len(items))]
        same = static_nodes(tree, static, sampled=sampled)
        changing = [i for i in self._items if isinstance(i, Node) and i not in same]
        # What only other values of that kind are made of need not be kept beside them.
        kept = {i for i in same if i is tree or any(i in node.args for node in changing)}
        folded = folded_nodes(tree)
        # The text of what is kept, and the leaves that it is made of.
        self._kept = [(str(i), frozenset(x.name for x in leaves_in(i))) if i in kept else None
                      for i in self._items]  # fmt: skip
        self._numbers = [_numbers(item, items) if item in kept else () for item in self._items]
        self._folded = [item in folded for item in self._items]
        self._values: dict[int, tuple[Snapshot, tuple[Any, ...], Any]] = {}

    def run(self, call: Call) -> Tensor:
        """Compute the tree for a call."""
        return _Run(self, call).value(self._root)  # type: ignore[no-any-return]


class _Run:
    """One run of a program: values that were computed, by number."""

    def __init__(self, program: Program, call: Call) -> None:
        self.program, self.call = program, call
        self.values: list[Any] = [None] * len(program._items)

    def value(self, number: int) -> Any:
        if self.values[number] is None:
            item = self.program._items[number]
            if isinstance(item, Leaf):
                found: Any = self.program._algebra.values[item.name](self.call)
            elif self.program._kept[number] is not None:
                found = self.keep(number, item)
            else:
                found = self.compute(number, item)
            self.values[number] = found
        return self.values[number]

    def keep(self, number: int, node: Node) -> Any:
        """Compute what is the same for every call with this graph, once."""
        matrix: Matrix = self.value(self.program._matrix)
        given = self.call.given
        owners = [
            given[n] for n in self.program._algebra.owners if isinstance(given.get(n), Tensor)
        ]
        features = {"X": self.call.x, "Y": self.call.x_dst}
        kept = self.program._kept[number]
        assert kept is not None
        text, names = kept
        owners += [t for name, t in features.items() if name in names and t is not None]
        numbers = [self.value(n) for n in self.program._numbers[number]]
        owners += [n for n in numbers if isinstance(n, Tensor)]  # an expression names them only
        plain = tuple(n for n in numbers if not isinstance(n, Tensor))
        if self.call.halos is not None:
            return self.keep_here(number, node, (self.call.edge_index, *owners), plain)
        key = (text, self.call.x.dtype, self.program._algebra.facts, plain)
        return derived(matrix.graph, key, tuple(owners), lambda: self.compute(number, node))

    def keep_here(
        self, number: int, node: Node, owners: tuple[Tensor, ...], plain: tuple[Any, ...]
    ) -> Any:
        """Keep a value with the program: if one process forgot it, the others would not exchange.

        So it must not depend on how many graphs a process has met.
        """
        if torch.is_inference_mode_enabled() or any(map(changes_unseen, owners)):
            return self.compute(number, node)
        found = self.program._values.get(number)
        if found is None or found[1] != plain or not found[0].fits(owners):
            with torch.no_grad():
                found = Snapshot(owners), plain, self.compute(number, node)
            self.program._values[number] = found
        return found[2]

    def compute(self, number: int, node: Node) -> Any:
        args = self.program._args[number]
        if node.op == "add":
            return self.add(node, args)
        if node.op == "attend":
            return self.attend(node, number, args)
        values: list[Any] = [None if a is None else self.value(a) for a in args]
        if node.op == "gemm":
            return gemm(values[0], values[1], node.heads)
        if node.op == "spmm":
            data = self.call.whole(values[1])
            return spmm(values[0], data, mean=node.mean, sampled=self.program._sampled)
        if node.op == "scale_rows":
            leaf = node.args[0]
            assert isinstance(leaf, Leaf)
            return scale_rows(values[0], values[1], leaf)
        if node.op == "scale_edges":
            left, matrix, right = values
            return scale_edges(left, matrix, None if right is None else self.call.whole(right))
        if node.op == "map" and node.name == WRITTEN:
            return values[0].dense()
        algebra = self.program._algebra
        if node.name in algebra.calls:
            return algebra.calls[node.name](self.call, values[0])
        return algebra.maps[node.name](values[0])

    def add(self, node: Node, args: tuple[int | None, ...]) -> Tensor:
        """Add the terms: products are accumulated by the matrix product itself."""
        program = self.program
        total: Tensor | None = None
        others: list[Tensor] = []
        products: list[tuple[Tensor, Tensor]] = []
        ones: int | None = None
        for a in args:
            assert a is not None
            item = program._items[a]
            if item.kind == "bias":
                total = self.value(a) if total is None else total + self.value(a)
            elif isinstance(item, Node) and item.op == "gemm" and program._lone[a]:
                left, right = program._args[a]
                assert left is not None and right is not None
                if program._items[left].name in program._algebra.constants:
                    ones, row = left, self.value(right).squeeze(0)  # ones times a row: a bias
                    total = row if total is None else total + row
                    continue
                data = self.value(left)
                if isinstance(data, Tensor) and data.dim() == 2:
                    products.append((data, self.value(right)))
                else:
                    others.append(self.value(a))
            else:
                others.append(self.value(a))
        for data, weight in products:
            total = data @ weight if total is None else torch.addmm(total, data, weight)
        if node.heads > 1 and total is not None:
            total = total.unflatten(-1, (node.heads, total.size(-1) // node.heads))
        if ones is not None and total is not None and not products and not others:
            total = total.expand(self.value(ones).size(0), *total.shape)
        for other in others:
            total = other if total is None else total + other
        assert total is not None
        return total

    def attend(self, node: Node, number: int, args: tuple[int | None, ...]) -> Matrix:
        """Make the values of a matrix, or leave them to the one product that reads it."""
        program = self.program
        matrix: Matrix = self.value(args[0])  # type: ignore[arg-type]
        features: list[Any] = []
        for a in args[1:]:
            assert a is not None
            if program._folded[a]:
                data, weight = program._args[a]
                features.append((self.value(data), self.value(weight)))  # type: ignore[arg-type]
            else:
                features.append(self.value(a))
        scores = program._algebra.scores[node.name](self.call, matrix, *features)
        if isinstance(scores, Scores):
            alone = program._lone[number] and not program._sampled
            if alone and not torch.compiler.is_compiling():  # the one kernel is not read by it
                return replace(matrix, scores=scores)
            scores = scores.values(matrix.graph)
        return replace(matrix, weight=scores, edge_order=False)


def _numbers(tree: Tree, items: Mapping[Tree, int]) -> tuple[int, ...]:
    """The numbers that a tree multiplies with, by their own number."""
    return tuple(items[leaf] for leaf in dict.fromkeys(leaves_in(tree)) if leaf.number)


def gemm(data: Tensor | CBSR, weight: Tensor, heads: int = 1) -> Tensor:
    """Multiply features with a weight.

    Args:
        data: [N, F], also as CBSR, or [N, heads, F] with each head its own part of the weight.
        weight: [F, heads x H].
        heads: heads.

    Returns:
        [N, H], or [N, heads, H] for several heads.
    """
    if isinstance(data, CBSR):
        return ops.cbsr_linear(data, weight.t())
    if data.dim() == 3:
        parts = weight.view(weight.size(0), heads, -1)
        return torch.einsum("nhf,fhc->nhc", data, parts)
    out = data @ weight
    return out if heads == 1 else out.view(out.size(0), heads, out.size(1) // heads)


def spmm(
    matrix: Matrix, data: Tensor | CBSR, *, mean: bool = False, sampled: bool = False
) -> Tensor:
    """Multiply a matrix of edges with features [N, F] or [N, heads, F], or with CBSR."""
    reduce = "mean" if mean else "sum"
    if matrix.scores is not None:
        assert isinstance(data, Tensor)
        return matrix.rows(matrix.scores.sum(matrix.graph, data))
    if isinstance(data, CBSR):
        out = ops.cbsr_spmm(
            matrix.graph, data, matrix.weight, reduce=reduce, edge_order=matrix.edge_order
        )
        return matrix.rows(out)
    if sampled:
        return _sampled_spmm(matrix, data, reduce)
    if matrix.weight is None:
        plain: Tensor = ops.spmm(matrix.graph, data, reduce=reduce)
        return matrix.rows(plain)
    data, weight = _beside(matrix.weight, data)
    if weight.dtype != data.dtype and not weight.requires_grad:
        weight = weight.to(data.dtype)
    operands = [data, weight]
    weighted: Tensor = ops.gspmm(
        matrix.graph, "mul(u0,e1)", operands, reduce=reduce, edge_order=matrix.edge_order
    )
    return matrix.rows(weighted)


def _beside(weight: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
    """Features and weights of edges in as many dimensions."""
    if weight.dim() == 2 and weight.size(1) == 1:
        weight = weight.squeeze(1)
    if weight.dim() == 2 and data.dim() == 2:
        data = data.unsqueeze(1)  # every head weighs the same features
    return data, weight.view(*weight.shape, *[1] * (data.dim() - weight.dim()))


def _sampled_spmm(matrix: Matrix, data: Tensor, reduce: str) -> Tensor:
    """The product over a sample of each row, as ``sampled()`` asks for it."""
    formula, operands = "u0", [data]
    if matrix.weight is not None:
        data, weight = _beside(matrix.weight, data)
        if weight.dim() == 3 and data.size(1) == 1:
            data = data.expand(-1, weight.size(1), -1)
        formula, operands = "mul(u0,e1)", [data, weight]
    outs, _ = aggregate(
        matrix.graph, parse(formula), operands, [reduce], edge_order=matrix.edge_order
    )
    return outs[0]


def scale_rows(diagonal: Tensor | float, data: Tensor | CBSR, leaf: Leaf) -> Tensor | CBSR:
    """Multiply every row with its element of a vector, or all with a number."""
    if isinstance(data, CBSR):
        values = scale_rows(diagonal, data.values, leaf)
        assert isinstance(values, Tensor)
        return CBSR(values, data.indices, data.width)
    if isinstance(diagonal, (int, float)):
        return data * diagonal**leaf.power
    if leaf.power > 1:
        diagonal = diagonal.pow(leaf.power)
    if (diagonal.dim() == 1 and diagonal.numel() > 1) or data.size(0) == diagonal.numel():
        diagonal = diagonal.view(-1, *[1] * (data.dim() - 1))
    return data * diagonal.to(data.dtype)


def scale_edges(left: Tensor | None, matrix: Matrix, right: Tensor | None) -> Matrix:
    """Multiply the entries of a matrix with diagonals on its sides: one number per edge."""
    graph: Graph = matrix.graph
    operands: list[Tensor] = []
    formula = ""
    for side, value in (("v", left), ("u", right)):
        if value is not None:
            rows = graph.num_rows - matrix.spare if side == "v" else graph.num_cols
            value = value.expand(rows) if value.numel() == 1 else value
            operands.append((matrix.targets(value) if side == "v" else value).unsqueeze(-1))
            leaf = f"{side}{len(operands) - 1}"
            formula = f"mul({formula},{leaf})" if formula else leaf
    if matrix.weight is not None:
        operands.append(matrix.weight.unsqueeze(-1))
        formula = f"mul({formula},e{len(operands) - 1})"
    values: Tensor = ops.gspmm(
        graph, formula, operands, reduce="none", edge_order=matrix.edge_order
    )
    return replace(matrix, weight=values.squeeze(-1))
