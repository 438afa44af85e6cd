"""Roles of arguments (rows of nodes, edges or graphs), and their padding to a bucket.

Why padding changes no results. A capture has tensors of one size, so a batch is copied into larger
tensors. Their other rows are a separate graph: edges of padding join nodes of padding only, and in
``batch`` padding is the last graph. Message passing, softmax over neighbours and pooling never mix
it with real rows. Functions that mix rows are replaced (:mod:`.masking`), and rows of padding are
cut off results or set to zero, so that they get no gradient.

Why rows of padding are copies of the first row. Functions of rows, such as an embedding or a
logarithm, accept a copy, but may not accept zeros or noise. In trials the copy is multiplied by a
large factor, so that a leak shows.

How sizes are chosen. Buckets grow geometrically, so that few buckets serve all batches with little
padding. In a model, the number of rows of a tensor tells whether they are nodes, edges or graphs;
so all numbers of rows in a bucket differ from each other and from the sizes of parameters.

Why integers are axes. ``model(x, edge_index, batch_size)`` takes ``x[:batch_size]`` after its
layers. An integer that always equals the number of nodes, edges or graphs is replaced by the number
in the bucket. Another integer that changes becomes an axis with a bucket: its first ``batch_size``
rows are real, for masks, results and gradients as with other axes. A model with another use of the
integer fails its trial and stays eager.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.cuda_graphs.batch_norm import RealRows
from pyg_accel.cuda_graphs.call import Arguments, Uncapturable

__all__ = [
    "SLACK", "CallSizes", "Layout", "Padding", "Part", "Sizes", "check_roles", "fixed_layout",
    "labels_of", "layout_of", "padding_like", "primary", "sizes_of",
]  # fmt: skip

SLACK = 1.5  # a bucket that is larger by this factor has too much padding
_HEADROOM, _STEPS = 1.0625, 16
_NODES = ("x", "pos", "z", "h", "feat", "features", "node_attr", "node_type")
_LABELS = ("y", "label", "labels", "target", "targets")
Sizes = Mapping[str, int]  # by axis or integer
Part = tuple[int, int, int]  # of a tensor: dimension, first row, number of rows
_KINDS = ("nodes", "edges", "graphs", "edge_index", "batch", "ptr", "fixed")
# Names in PyG of integers that count nodes or graphs.
_NUMBERS = {"num_nodes": "nodes", "batch_size": "graphs", "num_graphs": "graphs", "size": "graphs"}


def _capacity(size: int) -> int:
    """Return the size of a bucket: 16 steps between powers of two, in multiples of 8."""
    least = int(size * _HEADROOM) + 1
    step = max((1 << (least - 1).bit_length() - 1) // _STEPS, 8)
    return -(-least // step) * step


def _rows_of(axis: str, capacity: int) -> int:
    """Return the number of rows of tensors of an axis: padding is one more graph."""
    return capacity + (axis == "graphs")


def _bucket_for(sizes: Sizes, reserved: Iterable[int]) -> dict[str, int]:
    """Return a bucket with numbers of rows that are distinct and not reserved."""
    used, bucket = set(reserved), {}
    for axis, size in sizes.items():
        most, step = (size, 1) if axis == "graphs" else (_capacity(size), 8)
        while _rows_of(axis, most) in used:
            most += step
        bucket[axis] = most
        used.add(_rows_of(axis, most))
    return bucket


class Role(NamedTuple):
    """The role of an argument.

    Attributes:
        kind: ``"rows"``, ``"edge_index"``, ``"batch"``, ``"ptr"`` or ``"fixed"``.
        axis: of its rows (the columns of an edge_index): ``"nodes"``, ``"graphs"``, the name of an
            edge_index for its edges, or the name of an integer that counts rows.
    """

    kind: str
    axis: str = ""

    @property
    def dim(self) -> int:
        """The dimension that is padded."""
        return int(self.kind == "edge_index")

    def sized(self, shape: torch.Size, rows: Sizes) -> torch.Size:
        """Return a shape with other numbers of rows."""
        if self.kind == "fixed":
            return shape
        size = rows[self.axis] + (self.kind == "ptr")
        return torch.Size((*shape[: self.dim], size, *shape[self.dim + 1 :]))


def _is_edge_index(name: str, tensor: Tensor, roles: Mapping[str, str]) -> bool:
    if name in roles:
        return roles[name] == "edge_index"
    is_id = tensor.dtype in (torch.int32, torch.int64)
    return is_id and tensor.dim() == 2 and tensor.size(0) == 2 and name.endswith("_index")


def _is_batch(name: str, tensor: Tensor, roles: Mapping[str, str]) -> bool:
    return roles.get(name, name) == "batch" and tensor.dim() == 1 and not tensor.is_floating_point()


def check_roles(roles: Mapping[str, str]) -> None:
    """Raise a ValueError for unknown roles."""
    if unknown := sorted(set(roles.values()) - set(_KINDS)):
        raise ValueError(f"expected roles among {', '.join(_KINDS)} (got {unknown})")


def primary(arguments: Arguments, roles: Mapping[str, str]) -> dict[str, int]:
    """Return the place of an argument with the number of rows of each axis."""
    places: dict[str, int] = {}
    for place, (name, tensor) in enumerate(zip(arguments.names, arguments.tensors, strict=True)):
        if _is_edge_index(name, tensor, roles):
            places.setdefault(name, place)
        elif _is_batch(name, tensor, roles):
            places.setdefault("nodes", place)
            places["graphs"] = place
        elif roles.get(name) == "nodes" or (name not in roles and name in _NODES and tensor.dim()):
            places.setdefault("nodes", place)
    return places


def sizes_of(arguments: Arguments, places: Sizes, labels: int | None = None) -> dict[str, int]:
    """Return the number of rows of each axis, and the integers of the call.

    The number of graphs is an integer of the call, or the number of rows of the argument at the
    place ``labels``, or follows from the largest id in ``batch``; then the host waits, as in PyG.
    """
    sizes: dict[str, int] = {}
    for axis, place in places.items():
        tensor = arguments.tensors[place]
        if axis != "graphs":
            sizes[axis] = tensor.size(int(axis != "nodes"))
            continue
        counts = [n for name, n in arguments.numbers.items() if _NUMBERS.get(name) == "graphs"]
        if counts:
            sizes[axis] = counts[0]
        elif labels is not None:
            sizes[axis] = arguments.tensors[labels].size(0)
        else:
            sizes[axis] = int(tensor.max()) + 1 if tensor.numel() else 0
    return sizes | arguments.numbers


class CallSizes(NamedTuple):
    """The sizes of a call: shapes of its tensors, and the result of :func:`sizes_of`."""

    shapes: tuple[torch.Size, ...]
    sizes: tuple[tuple[str, int], ...]


def _role(
    name: str, tensor: Tensor, shapes: Sequence[torch.Size], axes: Mapping[str, list[int]],
    edges: Sequence[str], roles: Mapping[str, str],
) -> Role:  # fmt: skip
    """Infer the role of an argument from its sizes and the sizes of the axes in earlier calls."""
    assigned = roles.get(name)
    if _is_edge_index(name, tensor, roles):
        role = Role("edge_index", name)
    elif _is_batch(name, tensor, roles):
        role = Role("batch", "nodes")
    elif assigned in ("nodes", "graphs"):
        role = Role("rows", assigned)
    elif assigned == "fixed" or tensor.dim() == 0:
        role = Role("fixed")
    elif assigned == "ptr" or (name == "ptr" and "graphs" in axes):
        role = Role("ptr", "graphs")
    else:
        first = edges if name.startswith("edge") or assigned == "edges" else ("nodes", "graphs")
        rows = [shape[0] for shape in shapes]
        matching = [axis for axis in (*first, *axes) if axes.get(axis) == rows]
        role = Role("rows", matching[0]) if matching else Role("fixed")
    if role.kind == "fixed":
        if len(set(shapes)) > 1:
            raise Uncapturable(f"'{name}' changes its size, but not with nodes, edges or graphs")
    elif len({(*shape[: role.dim], *shape[role.dim + 1 :]) for shape in shapes}) > 1:
        raise Uncapturable(f"'{name}' changes the size of its rows")
    elif axes.get(role.axis) != [shape[role.dim] - (role.kind == "ptr") for shape in shapes]:
        raise Uncapturable(f"'{name}' does not have one row for each of the {role.axis}")
    return role


def labels_of(arguments: Arguments, layout: "Layout") -> int | None:
    """Return the place of an argument with a label per graph."""
    named, rows = enumerate(zip(arguments.names, layout.roles, strict=True)), Role("rows", "graphs")
    return next((i for i, (name, role) in named if role == rows and name in _LABELS), None)


@dataclass(frozen=True)
class Layout:
    """How the calls of a bucket are padded.

    Attributes:
        roles: of each tensor.
        bucket: capacity of each axis.
        axes: for integers that are replaced by a number of rows, the axis.
        numbers: the integers in the padded call.
        shapes: of the padded arguments.
    """

    roles: tuple[Role, ...]
    bucket: dict[str, int]
    axes: dict[str, str]
    numbers: dict[str, int]
    shapes: list[torch.Size]

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows of tensors of each axis."""
        return {axis: _rows_of(axis, most) for axis, most in self.bucket.items()}

    def takes(self, shapes: Sequence[torch.Size], sizes: Sizes, slack: float | None = None) -> bool:
        """Whether a call fits the bucket with at most ``slack`` times as many rows."""
        if not self.bucket.keys() <= sizes.keys():
            return False
        for axis, most in self.bucket.items():
            size = sizes[axis]
            if not 0 <= size + (axis == "nodes") <= most:  # edges of padding need a node
                return False
            if slack is not None and axis != "graphs" and most > max(slack * size, 64):
                return False
        expected = self.numbers | {name: sizes[axis] for name, axis in self.axes.items()}
        return all(sizes.get(name) == number for name, number in expected.items()) and all(
            shape == role.sized(padded, sizes)
            for role, padded, shape in zip(self.roles, self.shapes, shapes, strict=True)
        )

    def parts(self, unpadded: Collection[Part], sizes: Sizes) -> set[Part]:
        """Return the slices that a call takes without padding, and the same slices with padding.

        The first ``n`` of ``n`` rows are a slice only with padding.
        """
        rows = [sizes[axis] for axis in self.bucket if axis not in self.numbers]
        padded = {(dim, 0, self.rows[n]) for n in self.numbers if n in self.bucket for dim in (0, 1)
                  if sizes[n] in rows or (dim, 0, sizes[n]) in unpadded}  # fmt: skip
        return padded.union(unpadded)


def layout_of(
    arguments: Arguments, places: Sizes, seen: Sequence[CallSizes],
    roles: Mapping[str, str], reserved: Iterable[int],
) -> Layout:  # fmt: skip
    """Return the layout of calls of a form.

    Args:
        arguments: one of the calls.
        places: the argument with the number of rows of each axis.
        seen: sizes of calls of the form, the latest last.
        roles: roles of arguments by name, from the user.
        reserved: sizes of other dimensions, which no axis may have.

    Raises:
        Uncapturable: if the size of an argument changes otherwise than with nodes, edges or graphs.
    """
    if "nodes" not in places:
        raise Uncapturable("no argument is known to hold the nodes: say so with roles=")
    sizes = [dict(call.sizes) for call in seen]
    counted = {name: [call[name] for call in sizes] for name in sizes[-1]}
    like: dict[str, str] = {}
    for name, number in arguments.numbers.items():
        along = [axis for axis in places if counted[axis] == counted[name]]
        if _NUMBERS.get(name) in along:
            like[name] = _NUMBERS[name]
        elif len(set(counted[name])) > 1:
            like[name] = along[0] if along else name
            if not along and number < 1:
                raise Uncapturable(f"'{name}' is a number that changes")
    # Integers come first, and so get the smaller buckets: they count rows of other axes.
    axes = {a: counted[a] for a in (*(n for n, axis in like.items() if n == axis), *places)}
    most = {a: max(n for n in each if n <= SLACK * each[-1]) for a, each in axes.items()}
    bucket = _bucket_for(most, reserved)
    numbers = arguments.numbers | {n: _rows_of(a, bucket[a]) for n, a in like.items()}
    edges = [axis for axis in places if axis not in ("nodes", "graphs")]
    own_roles = [
        _role(name, tensor, [call.shapes[place] for call in seen], axes, edges, roles)
        for place, (name, tensor) in enumerate(zip(arguments.names, arguments.tensors, strict=True))
    ]
    rows = {axis: _rows_of(axis, most) for axis, most in bucket.items()}
    shapes = [r.sized(t.shape, rows) for r, t in zip(own_roles, arguments.tensors, strict=True)]
    return Layout(tuple(own_roles), bucket, like, numbers, shapes)


def fixed_layout(arguments: Arguments, sizes: Sizes, batch: int | None) -> Layout:
    """Return the layout of calls without padding.

    Args:
        arguments: one of the calls.
        sizes: of the call.
        batch: the place of the vector of graph ids if it changes: the number of graphs must not.
    """
    shapes = [t.shape for t in arguments.tensors]
    roles = tuple(Role("fixed", "graphs" if i == batch else "") for i in range(len(shapes)))
    numbers = arguments.numbers | ({} if batch is None else {"graphs": sizes["graphs"]})
    return Layout(roles, {}, {}, numbers, shapes)


def padding_like(rows: Tensor, dim: int = 0) -> Tensor:
    """Return padding of features of edges like existing rows.

    A single number per edge is a weight. It is made positive: normalisations take roots of sums of
    weights, also of nodes that only have edges of padding.
    """
    return rows.abs() if rows.numel() == rows.size(dim) else rows


class Padding:
    """The padding of one call: masks of real rows, as tensors on the device.

    It is created inside the call, so that a replay computes it again.

    Attributes:
        layout: capacities and roles.
        counts: [], the number of real rows of each axis.
        batch: the padded vector of graph ids, if there is one.
        edges: padded edge_index tensors.
        poison: [], factor on padding of features: 1, except in tests for leaks.
    """

    def __init__(self, layout: Layout, counts: Mapping[str, Tensor], poison: Tensor) -> None:
        """Start with the axes of the layout."""
        self.layout, self.counts, self.poison = layout, counts, poison
        self.batch: Tensor | None = None
        self.edges: list[Tensor] = []
        self._rows = {rows: axis for axis, rows in layout.rows.items()}
        self._real: dict[str, RealRows] = {}
        self._new_edges: dict[str, Tensor] = {}

    def axis_of(self, value: object) -> str | None:
        """Return the axis of the rows of a tensor, by their number; None if it has no padding."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return None
        return self._rows.get(value.size(0))

    def rows(self, axis: str) -> RealRows:
        """Return the masks of the rows of an axis."""
        if axis not in self._real and axis in self._new_edges:
            padding = (self._new_edges[axis] >= self.counts["nodes"]).any(0)
            self._real[axis] = RealRows(len(padding), len(padding) - padding.sum(), padding)
        elif axis not in self._real:
            self._real[axis] = RealRows(self.layout.rows[axis], self.counts[axis])
        return self._real[axis]

    def void(self, axis: str, like: Tensor) -> Tensor:
        """Return a mask of the padding that broadcasts to a tensor of such rows."""
        return self.rows(axis).padding.view(-1, *[1] * (like.dim() - 1))

    def ends(self, count: int) -> Tensor:
        """Return the ends of ``count`` edges of padding: the nodes of padding in turn."""
        nodes = self.counts["nodes"]
        ids = torch.arange(count, device=nodes.device)
        return nodes + ids % (self.layout.bucket["nodes"] - nodes)

    def spare(self, rows: int, least: int) -> int:
        """Return a number to add to ``rows`` so that no axis has the sum."""
        used = self.layout.rows.values()
        return next(more for more in itertools.count(least, 2) if rows + more not in used)

    def note(self, ids: Tensor) -> None:
        """Recognise features of new edges [2, R] by their number of rows."""
        axis = f"{ids.size(1)} edges"
        if self._rows.setdefault(ids.size(1), axis) == axis:
            self._new_edges[axis] = ids
            self._real.pop(axis, None)

    def fill(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return static arguments with padding in the rows that are not real."""
        return [self._filled(r, t) for r, t in zip(self.layout.roles, tensors, strict=True)]

    def _filled(self, role: Role, tensor: Tensor) -> Tensor:
        bucket, counts = self.layout.bucket, self.counts
        if role.kind == "fixed":
            return tensor
        if role.kind == "ptr":
            nodes = counts["nodes"]
            ids = torch.arange(tensor.numel(), device=tensor.device)
            behind = nodes.expand_as(ids).masked_fill(ids > bucket["graphs"], bucket["nodes"])
            return torch.where(ids <= counts["graphs"], tensor, behind.to(tensor))
        if role.kind == "edge_index":
            void = self.rows(role.axis).padding
            self._check(tensor, void, counts["nodes"], "node")
            ends = self.ends(tensor.size(1)).to(tensor.dtype)
            self.edges.append(torch.where(void, ends, tensor))
            return self.edges[-1]
        void = self.void(role.axis, tensor)
        if role.kind == "batch":
            self._check(tensor, void, counts["graphs"], "graph")
            self.batch = tensor.masked_fill(void, bucket["graphs"])
            return self.batch
        if tensor.dtype == torch.bool:
            return tensor.masked_fill(void, False)
        padding = tensor[:1].detach()
        if tensor.is_floating_point():
            if role.axis not in ("nodes", "graphs"):
                padding = padding_like(padding)
            padding = padding * self.poison.to(tensor.dtype)
        return torch.where(void, padding, tensor)

    def _check(self, ids: Tensor, void: Tensor, count: Tensor, what: str) -> None:
        """Fail on real ids that are out of range: they would refer to padding."""
        inside = (void | (ids < count)).all()
        torch._assert_async(inside, f"found a {what} id that is as large as the number of {what}s")

    def clear(self, out: Tensor) -> Tensor:
        """Return a result with zeros for padding, which then gets no gradient."""
        axis = self.axis_of(out)
        if axis is None or not out.is_floating_point():
            return out
        return out.masked_fill(self.void(axis, out), 0)
