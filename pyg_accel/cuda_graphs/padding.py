"""Which arguments hold rows of nodes, edges and graphs, and how they are padded to a bucket.

Why padding is right. A capture has tensors of one size, so a batch is copied into larger ones.
What is left over is a graph of its own: edges of padding join nodes of padding alone, and in
``batch`` it is the last graph. Message passing, softmax over neighbours and pooling never mix it
with real rows. What does mix rows is told to leave it out (:mod:`.masking`), and rows of padding
are cut off results, or zero in them, so that no gradient comes from them.

Why rows of padding are copies of the first row: whatever a model can do with rows, look up an
embedding, take a logarithm, it can do with that one. Zeros or noise might not be numbers that it
is able to work with. In trials the copy is multiplied by a large factor, so that a leak shows.

Why sizes are what they are. Buckets grow geometrically, so that few of them serve all batches and
little of them is padding. The number of rows tells what the rows of a tensor are, wherever in a
model it appears; so all numbers of rows in a bucket differ, from each other and from the sizes of
parameters.

Why integers are axes. ``model(x, edge_index, batch_size)`` takes ``x[:batch_size]`` after its
layers. An integer that goes along with the number of nodes, edges or graphs becomes that of the
bucket. Another one that changes becomes an axis with a bucket of its own: the first
``batch_size`` rows of so many are real, for masks, results and gradients as with other axes. A
model that does something else with the integer gives another result in its trial and stays eager.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.cuda_graphs.batch_norm import RealRows
from pyg_accel.cuda_graphs.call import Arguments, Uncapturable

__all__ = ["SLACK", "Layout", "Padding", "Part", "Seen", "Sizes", "check_roles", "fixed_layout",
           "labels_of", "layout_of", "padding_like", "primary", "sizes_of"]  # fmt: skip

SLACK = 1.5  # a bucket larger than this is not worth its padding
_HEADROOM, _STEPS = 1.0625, 16
_NODES = ("x", "pos", "z", "h", "feat", "features", "node_attr", "node_type")
_LABELS = ("y", "label", "labels", "target", "targets")
Sizes = Mapping[str, int]  # by axis or integer
Part = tuple[int, int, int]  # of a tensor: dimension, first row, number of rows
_KINDS = ("nodes", "edges", "graphs", "edge_index", "batch", "ptr", "fixed")
# Python integers that say how many nodes or graphs there are, by the names that PyG gives them.
_NUMBERS = {"num_nodes": "nodes", "batch_size": "graphs", "num_graphs": "graphs", "size": "graphs"}


def _capacity(size: int) -> int:
    """Return the size of a bucket: sixteen to a factor of two, small ones multiples of eight."""
    wanted = int(size * _HEADROOM) + 1
    step = max((1 << (wanted - 1).bit_length() - 1) // _STEPS, 8)
    return -(-wanted // step) * step


def _rows_of(axis: str, capacity: int) -> int:
    """Return how many rows tensors of an axis have: padding is a graph of its own, the last."""
    return capacity + (axis == "graphs")


def _bucket_for(sizes: Sizes, taken: Iterable[int]) -> dict[str, int]:
    """Return a bucket whose numbers of rows differ from one another and from those taken."""
    used, bucket = set(taken), {}
    for axis, size in sizes.items():
        most, step = (size, 1) if axis == "graphs" else (_capacity(size), 8)
        while _rows_of(axis, most) in used:
            most += step
        bucket[axis] = most
        used.add(_rows_of(axis, most))
    return bucket


class Role(NamedTuple):
    """What an argument is.

    Attributes:
        kind: ``"rows"``, ``"edge_index"``, ``"batch"``, ``"ptr"`` or ``"fixed"``.
        axis: what its rows (the columns of an edge_index) are: ``"nodes"``, ``"graphs"``, the name
            of the edge_index whose edges they are, or that of an integer.
    """

    kind: str
    axis: str = ""

    @property
    def dim(self) -> int:
        """The dimension that is padded."""
        return int(self.kind == "edge_index")

    def sized(self, shape: torch.Size, rows: Sizes) -> torch.Size:
        """Return a shape with so many rows of the axis."""
        if self.kind == "fixed":
            return shape
        size = rows[self.axis] + (self.kind == "ptr")
        return torch.Size((*shape[: self.dim], size, *shape[self.dim + 1 :]))


def _is_edge_index(name: str, tensor: Tensor, roles: Mapping[str, str]) -> bool:
    whole = tensor.dtype in (torch.int32, torch.int64)
    if name in roles:
        return roles[name] == "edge_index"
    return whole and tensor.dim() == 2 and tensor.size(0) == 2 and name.endswith("_index")


def _is_batch(name: str, tensor: Tensor, roles: Mapping[str, str]) -> bool:
    return roles.get(name, name) == "batch" and tensor.dim() == 1 and not tensor.is_floating_point()


def check_roles(roles: Mapping[str, str]) -> None:
    """Raise a ValueError for roles that there are not."""
    if unknown := sorted(set(roles.values()) - set(_KINDS)):
        raise ValueError(f"expected roles among {', '.join(_KINDS)} (got {unknown})")


def primary(arguments: Arguments, roles: Mapping[str, str]) -> dict[str, int]:
    """Return where the number of rows of each axis can be read: the places of those tensors."""
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

    That of graphs is the largest id in ``batch``, which waits for the device, as PyG does; unless
    the call says how many there are, or the argument in the place ``labels`` has a row for each.
    """
    sizes: dict[str, int] = {}
    for axis, place in places.items():
        tensor = arguments.tensors[place]
        if axis != "graphs":
            sizes[axis] = tensor.size(int(axis != "nodes"))
            continue
        said = [n for name, n in arguments.numbers.items() if _NUMBERS.get(name) == "graphs"]
        if said:
            sizes[axis] = said[0]
        elif labels is not None:
            sizes[axis] = arguments.tensors[labels].size(0)
        else:
            sizes[axis] = int(tensor.max()) + 1 if tensor.numel() else 0
    return sizes | arguments.numbers


class Seen(NamedTuple):
    """The sizes of a call that was made: shapes of its tensors, and what `sizes_of` returns."""

    shapes: tuple[torch.Size, ...]
    sizes: tuple[tuple[str, int], ...]


def _role(
    name: str, tensor: Tensor, shapes: Sequence[torch.Size], axes: Mapping[str, list[int]],
    edges: Sequence[str], roles: Mapping[str, str],
) -> Role:  # fmt: skip
    """Tell what an argument is by how its sizes went along with those of the axes."""
    wanted = roles.get(name)
    if _is_edge_index(name, tensor, roles):
        role = Role("edge_index", name)
    elif _is_batch(name, tensor, roles):
        role = Role("batch", "nodes")
    elif wanted in ("nodes", "graphs"):
        role = Role("rows", wanted)
    elif wanted == "fixed" or tensor.dim() == 0:
        role = Role("fixed")
    elif wanted == "ptr" or (name == "ptr" and "graphs" in axes):
        role = Role("ptr", "graphs")
    else:
        first = edges if name.startswith("edge") or wanted == "edges" else ("nodes", "graphs")
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
    """Return which argument is the label of each graph: its size tells how many there are."""
    roles = zip(arguments.names, layout.roles, strict=True)
    labels = [i for i, (name, role) in enumerate(roles)
              if role == Role("rows", "graphs") and name in _LABELS]  # fmt: skip
    return labels[0] if labels else None


@dataclass(frozen=True)
class Layout:
    """How the calls of a bucket are padded.

    Attributes:
        roles: of each tensor.
        bucket: capacity of each axis.
        axes: the axis of each integer that becomes the number of its rows.
        numbers: what these become, and the integers that stay what they are.
        shapes: of the padded arguments.
    """

    roles: tuple[Role, ...]
    bucket: dict[str, int]
    axes: dict[str, str]
    numbers: dict[str, int]
    shapes: list[torch.Size]

    @property
    def rows(self) -> dict[str, int]:
        """How many rows tensors of each axis have."""
        return {axis: _rows_of(axis, most) for axis, most in self.bucket.items()}

    def takes(self, shapes: Sequence[torch.Size], sizes: Sizes, slack: float | None = None) -> bool:
        """Whether a call goes into the bucket, and leaves no more empty than ``slack`` allows."""
        if not self.bucket.keys() <= sizes.keys():
            return False
        for axis, most in self.bucket.items():
            size = sizes[axis]
            if not 0 <= size + (axis == "nodes") <= most:  # edges of padding need an end
                return False
            if slack is not None and axis != "graphs" and most > max(slack * size, 64):
                return False
        alike = {n: sizes[self.axes[n]] if n in self.axes else k for n, k in self.numbers.items()}
        return all(sizes.get(name) == number for name, number in alike.items()) and all(
            shape == role.sized(padded, sizes)
            for role, padded, shape in zip(self.roles, self.shapes, shapes, strict=True)
        )

    def parts(self, taken: Collection[Part], sizes: Sizes) -> set[Part]:
        """Return parts that a call takes without padding, and what becomes of those with it.

        The first ``n`` rows of ``n`` are all of them, which is no part of anything.
        """
        rows = [sizes[axis] for axis in self.bucket if axis not in self.numbers]
        cut = {(dim, 0, self.rows[n]) for n in self.numbers if n in self.bucket for dim in (0, 1)
               if sizes[n] in rows or (dim, 0, sizes[n]) in taken}  # fmt: skip
        return cut.union(taken)


def layout_of(
    arguments: Arguments, places: Sizes, seen: Sequence[Seen],
    roles: Mapping[str, str], taken: Iterable[int],
) -> Layout:  # fmt: skip
    """Return how calls like those seen are padded.

    Args:
        arguments: one of the calls.
        places: where the number of rows of each axis is read.
        seen: sizes of calls of its form; the last is that of this one.
        roles: what the user says of arguments, by name.
        taken: sizes that mean something else than rows.

    Raises:
        Uncapturable: if an argument does not go along with nodes, edges or graphs.
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
    # Those of integers come first: so many rows are taken of others, which must not be fewer.
    axes = {a: counted[a] for a in (*(n for n, axis in like.items() if n == axis), *places)}
    most = {a: max(n for n in each if n <= SLACK * each[-1]) for a, each in axes.items()}
    bucket = _bucket_for(most, taken)
    numbers = arguments.numbers | {n: _rows_of(a, bucket[a]) for n, a in like.items()}
    edges = [axis for axis in places if axis not in ("nodes", "graphs")]
    found = [
        _role(name, tensor, [call.shapes[place] for call in seen], axes, edges, roles)
        for place, (name, tensor) in enumerate(zip(arguments.names, arguments.tensors, strict=True))
    ]
    rows = {axis: _rows_of(axis, most) for axis, most in bucket.items()}
    shapes = [role.sized(t.shape, rows) for role, t in zip(found, arguments.tensors, strict=True)]
    return Layout(tuple(found), bucket, like, numbers, shapes)


def fixed_layout(arguments: Arguments, sizes: Sizes, batch: int | None) -> Layout:
    """Return that of calls which are taken as they are: nothing is padded.

    Args:
        arguments: one of the calls.
        sizes: of that call.
        batch: the place of a vector of graph ids that changes: all calls have as many graphs.
    """
    shapes = [t.shape for t in arguments.tensors]
    roles = tuple(Role("fixed", "graphs" if i == batch else "") for i in range(len(shapes)))
    numbers = arguments.numbers | ({} if batch is None else {"graphs": sizes["graphs"]})
    return Layout(roles, {}, {}, numbers, shapes)


def padding_like(rows: Tensor, dim: int = 0) -> Tensor:
    """Return padding of features of edges that is like rows that are there.

    A single number of each edge is a weight: sums of weights, of which normalisations take roots,
    are to be positive where all edges are padding.
    """
    return rows.abs() if rows.numel() == rows.size(dim) else rows


class Padding:
    """The padding of one padded call: which rows are real, as the device knows it.

    Made inside the call, so that everything in it is computed anew when a capture is replayed.

    Attributes:
        layout: capacities and roles.
        counts: [], how many rows of each axis are real.
        batch: the padded vector of graph ids, if there is one.
        edges: what was padded with edges of padding.
        poison: [], times which the padding is taken of features: 1, except in tests for leaks.
    """

    def __init__(self, layout: Layout, counts: Mapping[str, Tensor], poison: Tensor) -> None:
        """Count nothing yet."""
        self.layout, self.counts, self.poison = layout, counts, poison
        self.batch: Tensor | None = None
        self.edges: list[Tensor] = []
        self._rows = {rows: axis for axis, rows in layout.rows.items()}
        self._real: dict[str, RealRows] = {}
        self._made: dict[str, Tensor] = {}

    def axis_of(self, value: object) -> str | None:
        """Return what the rows of a tensor are, by their number; None if it has no padding."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return None
        return self._rows.get(value.size(0))

    def rows(self, axis: str) -> RealRows:
        """Return which rows of an axis are no padding."""
        if axis not in self._real and axis in self._made:
            real = (self._made[axis] < self.counts["nodes"]).all(0)
            self._real[axis] = RealRows(len(real), real.sum(), real)
        elif axis not in self._real:
            self._real[axis] = RealRows(self.layout.rows[axis], self.counts[axis])
        return self._real[axis]

    def real(self, axis: str, like: Tensor) -> Tensor:
        """Return the rows that are no padding, to be broadcast with a tensor of such rows."""
        return self.rows(axis).real.view(-1, *[1] * (like.dim() - 1))

    def void(self, axis: str, like: Tensor) -> Tensor:
        """Return the rows that are padding, likewise."""
        return self.rows(axis).padding.view(-1, *[1] * (like.dim() - 1))

    def ends(self, count: int) -> Tensor:
        """Return the ends of so many edges of padding: all nodes of padding, in turn."""
        nodes = self.counts["nodes"]
        ids = torch.arange(count, device=nodes.device)
        return nodes + ids % (self.layout.bucket["nodes"] - nodes)

    def spare(self, rows: int, least: int) -> int:
        """Return how many rows to add to so many, that their number is that of no argument."""
        taken = self.layout.rows.values()
        return next(more for more in itertools.count(least, 2) if rows + more not in taken)

    def note(self, ids: Tensor) -> None:
        """Know what belongs to edges [2, R] that a model made, by the number of rows."""
        axis = f"{ids.size(1)} edges"
        if self._rows.setdefault(ids.size(1), axis) == axis:
            self._made[axis] = ids
            self._real.pop(axis, None)

    def fill(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return arguments, of which only the real part counts, with the padding of this call."""
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
            real = self.rows(role.axis).real
            self._check(tensor, real, counts["nodes"], "node")
            ends = self.ends(tensor.size(1)).to(tensor.dtype)
            self.edges.append(torch.where(real, tensor, ends))
            return self.edges[-1]
        if role.kind == "batch":
            self._check(tensor, self.rows(role.axis).real, counts["graphs"], "graph")
            self.batch = tensor.masked_fill(self.rows(role.axis).padding, bucket["graphs"])
            return self.batch
        if tensor.dtype == torch.bool:
            return tensor & self.real(role.axis, tensor)
        padding = tensor[:1].detach()
        if tensor.is_floating_point():
            if role.axis not in ("nodes", "graphs"):
                padding = padding_like(padding)
            padding = padding * self.poison.to(tensor.dtype)
        return torch.where(self.real(role.axis, tensor), tensor, padding)

    def _check(self, ids: Tensor, real: Tensor, count: Tensor, what: str) -> None:
        """Refuse ids that would be those of padding, as kernels do with those out of bounds."""
        inside = ~((ids >= count) & real).any()
        torch._assert_async(inside, f"found a {what} id that is as large as the number of {what}s")

    def clear(self, out: Tensor) -> Tensor:
        """Return a result with zeros for padding, so that no gradient flows into it."""
        axis = self.axis_of(out)
        if axis is None or not out.is_floating_point():
            return out
        return out.masked_fill(self.void(axis, out), 0)
