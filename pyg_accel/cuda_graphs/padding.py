"""Which arguments hold rows of nodes, edges and graphs, and how they are padded to a bucket."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.cuda_graphs.batch_norm import RealRows
from pyg_accel.cuda_graphs.buckets import rows_of
from pyg_accel.cuda_graphs.inputs import NUMBERS, Arguments, Uncapturable

__all__ = [
    "Layout",
    "Padding",
    "Role",
    "Seen",
    "check_roles",
    "labels_of",
    "layout_of",
    "padding_like",
    "primary",
    "sizes_of",
]

_NODES = ("x", "pos", "z", "h", "feat", "features", "node_attr", "node_type")
_LABELS = ("y", "label", "labels", "target", "targets")
_KINDS = ("nodes", "edges", "graphs", "edge_index", "batch", "ptr", "fixed")


@dataclass(frozen=True)
class Role:
    """What an argument is.

    Attributes:
        kind: ``"rows"``, ``"edge_index"``, ``"batch"``, ``"ptr"`` or ``"fixed"``.
        axis: what its rows (the columns of an edge_index) are: ``"nodes"``, ``"graphs"``, or the
            name of the edge_index whose edges they are.
    """

    kind: str
    axis: str = ""


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
    found: dict[str, int] = {}
    for place, (name, tensor) in enumerate(zip(arguments.names, arguments.tensors, strict=True)):
        if _is_edge_index(name, tensor, roles):
            found.setdefault(name, place)
        elif _is_batch(name, tensor, roles):
            found.setdefault("nodes", place)
            found["graphs"] = place
        elif roles.get(name) == "nodes" or (name not in roles and name in _NODES and tensor.dim()):
            found.setdefault("nodes", place)
    return found


def sizes_of(
    arguments: Arguments, places: Mapping[str, int], labels: int | None = None
) -> dict[str, int]:
    """Return the number of rows of each axis.

    That of graphs is the largest id in ``batch``, which waits for the device, as PyG does; unless
    the call says how many there are, or the argument in the place ``labels`` has a row for each.
    """
    sizes: dict[str, int] = {}
    for axis, place in places.items():
        tensor = arguments.tensors[place]
        if axis == "nodes":
            sizes[axis] = tensor.size(0)
        elif axis != "graphs":
            sizes[axis] = tensor.size(1)
        else:
            given = [n for name, n in arguments.numbers.items() if NUMBERS[name] == "graphs"]
            if given:
                sizes[axis] = given[0]
            elif labels is not None:
                sizes[axis] = arguments.tensors[labels].size(0)
            else:
                sizes[axis] = int(tensor.max()) + 1 if tensor.numel() else 0
    return sizes


class Seen(NamedTuple):
    """The sizes of a call that was made.

    Attributes:
        shapes: of the tensors.
        numbers: Python integers that count nodes or graphs.
        sizes: number of rows of each axis.
    """

    shapes: tuple[torch.Size, ...]
    numbers: dict[str, int]
    sizes: dict[str, int]


def _roles(arguments: Arguments, seen: Sequence[Seen], roles: Mapping[str, str]) -> list[Role]:
    """Tell what each argument is by how its sizes went along with those of the axes."""
    axes = {axis: [call.sizes[axis] for call in seen] for axis in seen[-1].sizes}
    found = []
    for place, (name, tensor) in enumerate(zip(arguments.names, arguments.tensors, strict=True)):
        shapes = [call.shapes[place] for call in seen]
        role = _role(name, tensor, shapes, axes, roles)
        dim = 1 if role.kind == "edge_index" else 0
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if role.kind == "fixed" and len(set(shapes)) > 1:
            raise Uncapturable(f"'{name}' changes its size, but not with nodes, edges or graphs")
        if role.kind != "fixed" and len(rest) > 1:
            raise Uncapturable(f"'{name}' changes the size of its rows")
        rows = [shape[dim] - (role.kind == "ptr") for shape in shapes if role.kind != "fixed"]
        if rows and axes.get(role.axis) != rows:
            raise Uncapturable(f"'{name}' does not have one row for each of the {role.axis}")
        found.append(role)
    return found


def _role(
    name: str,
    tensor: Tensor,
    shapes: Sequence[torch.Size],
    axes: Mapping[str, list[int]],
    roles: Mapping[str, str],
) -> Role:
    wanted = roles.get(name)
    if _is_edge_index(name, tensor, roles):
        return Role("edge_index", name)
    if _is_batch(name, tensor, roles):
        return Role("batch", "nodes")
    if wanted in ("nodes", "graphs"):
        return Role("rows", wanted)
    if wanted == "fixed" or tensor.dim() == 0:
        return Role("fixed")
    if wanted == "ptr" or (name == "ptr" and "graphs" in axes):
        return Role("ptr", "graphs")
    edges = [axis for axis in axes if axis not in ("nodes", "graphs")]
    of_edges = name.startswith("edge") or wanted == "edges"
    order = [*edges, "nodes", "graphs"] if of_edges else ["nodes", "graphs", *edges]
    rows = [shape[0] for shape in shapes]
    matching = [axis for axis in order if axes.get(axis) == rows]
    return Role("rows", matching[0]) if matching else Role("fixed")


def labels_of(arguments: Arguments, layout: "Layout") -> int | None:
    """Return which argument is the label of each graph: its size tells how many there are."""
    labels = Role("rows", "graphs")
    for place, (name, role) in enumerate(zip(arguments.names, layout.roles, strict=True)):
        if role == labels and name in _LABELS:
            return place
    return None


@dataclass(frozen=True)
class Layout:
    """How the calls of a bucket are padded.

    Attributes:
        roles: of each tensor.
        bucket: capacity of each axis.
        numbers: what Python integers of the call become.
        shapes: of the padded arguments.
    """

    roles: tuple[Role, ...]
    bucket: dict[str, int]
    numbers: dict[str, int]
    shapes: list[torch.Size]

    @property
    def rows(self) -> dict[str, int]:
        """How many rows tensors of each axis have."""
        return {axis: rows_of(axis, most) for axis, most in self.bucket.items()}

    def padded(self, role: Role, tensor: Tensor) -> torch.Size:
        """Return the padded shape of an argument."""
        shape = list(tensor.shape)
        if role.kind == "edge_index":
            shape[1] = self.bucket[role.axis]
        elif role.kind == "ptr":
            shape[0] = self.bucket["graphs"] + 2
        elif role.kind != "fixed":
            shape[0] = rows_of(role.axis, self.bucket[role.axis])
        return torch.Size(shape)

    def takes(self, shapes: Sequence[torch.Size], sizes: Mapping[str, int]) -> bool:
        """Whether arguments have the rows that they should have for these sizes."""
        for role, padded, shape in zip(self.roles, self.shapes, shapes, strict=True):
            if role.kind == "fixed":
                good = shape == padded
            elif role.kind == "edge_index":
                good = shape[1] == sizes[role.axis]
            else:
                rows = sizes[role.axis] + (role.kind == "ptr")
                good = shape[0] == rows and shape[1:] == padded[1:]
            if not good:
                return False
        return True

    def part(self, place: int, padded: Tensor, shape: torch.Size) -> Tensor:
        """Return that part of a padded argument, of this shape without, which is not padding."""
        role = self.roles[place]
        if role.kind == "fixed":
            return padded
        dim = 1 if role.kind == "edge_index" else 0
        return padded.narrow(dim, 0, shape[dim])


def layout_of(
    arguments: Arguments,
    seen: Sequence[Seen],
    roles: Mapping[str, str],
    bucket: dict[str, int],
) -> Layout:
    """Return how calls like those seen are padded.

    Args:
        arguments: one of the calls.
        seen: sizes of calls of its form.
        roles: what the user says of arguments, by name.
        bucket: capacity of each axis.

    Raises:
        Uncapturable: if an argument does not go along with nodes, edges or graphs.
    """
    if "nodes" not in bucket:
        raise Uncapturable("no argument is known to hold the nodes: say so with roles=")
    numbers = {}
    for name in arguments.numbers:
        axis = NUMBERS[name]
        if axis in bucket and all(call.numbers[name] == call.sizes[axis] for call in seen):
            numbers[name] = rows_of(axis, bucket[axis])
        elif len({call.numbers[name] for call in seen}) > 1:
            raise Uncapturable(f"'{name}' is a number that changes")
    if "graphs" in bucket:
        numbers.setdefault("num_graphs", rows_of("graphs", bucket["graphs"]))
    layout = Layout(tuple(_roles(arguments, seen, roles)), bucket, numbers, [])
    for role, tensor in zip(layout.roles, arguments.tensors, strict=True):
        layout.shapes.append(layout.padded(role, tensor))
    return layout


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
        """Return arguments whose padding is not what earlier calls left there.

        Args:
            tensors: padded, of which only the real part counts.
        """
        layout, counts = self.layout, self.counts
        filled = []
        for role, tensor in zip(layout.roles, tensors, strict=True):
            if role.kind == "fixed":
                # Another tensor than in the last call: what is known of that one does not hold.
                filled.append(tensor.view_as(tensor) if tensor.requires_grad else tensor.detach())
                continue
            nodes = counts["nodes"]
            if role.kind == "ptr":
                most, ids = layout.bucket, torch.arange(tensor.numel(), device=tensor.device)
                padding = nodes.expand_as(ids).masked_fill(ids > most["graphs"], most["nodes"])
                filled.append(torch.where(ids <= counts["graphs"], tensor, padding.to(tensor)))
                continue
            real = self.rows(role.axis).real
            if role.kind == "edge_index":
                self._check(tensor, real, nodes, "node")
                padding = self.ends(tensor.size(1)).to(tensor.dtype)
                self.edges.append(torch.where(real, tensor, padding))
                filled.append(self.edges[-1])
                continue
            if role.kind == "batch":
                self._check(tensor, real, counts["graphs"], "graph")
                self.batch = tensor.masked_fill(
                    self.rows(role.axis).padding, layout.bucket["graphs"]
                )
                filled.append(self.batch)
                continue
            if tensor.dtype == torch.bool:
                filled.append(tensor & self.real(role.axis, tensor))
                continue
            # A copy of the first row: whatever a model can do with rows, it can do with that.
            padding = tensor[:1].detach()
            if tensor.is_floating_point():
                if role.axis not in ("nodes", "graphs"):
                    padding = padding_like(padding)
                padding = padding * self.poison.to(tensor.dtype)
            filled.append(torch.where(self.real(role.axis, tensor), tensor, padding))
        return filled

    def _check(self, ids: Tensor, real: Tensor, count: Tensor, what: str) -> None:
        """Refuse ids that would be those of padding, as kernels do with those out of bounds."""
        outside = ((ids >= count) & real).any()
        torch._assert_async(
            ~outside, f"found a {what} id that is as large as the number of {what}s"
        )

    def clear(self, out: Tensor) -> Tensor:
        """Return a result with zeros for padding, so that no gradient flows into it."""
        axis = self.axis_of(out)
        if axis is None or not out.is_floating_point():
            return out
        return out.masked_fill(self.void(axis, out), 0)
