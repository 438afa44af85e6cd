"""Costs of calls: the size from which they are accelerated, the choice of kernels, machines.

:class:`Costs` decide between PyG's own path and ours, :class:`Rates` between kernels, and a
:class:`Machine` between orders of products (:mod:`pyg_accel.rewrite.cost`), and between dense and
compressed features (:mod:`pyg_accel.layers`).

PyG runs a function of torch for each step of a message and writes a tensor of all edges in most of
them. A program reads the features once. It costs the host as much as a few functions, more if a
kernel is generated for its formula, and a new graph needs its CSR form, which all layers on the
graph share. So each kind of call is faster above a number of edges, :func:`fewest_edges`.

``python -m pyg_accel tune`` measures the three numbers of a machine; the shipped numbers are of one
core of an AMD EPYC and of an NVIDIA H100.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import torch

from pyg_accel.formula import Binary, Const, Formula, Operand, children, has_sum, operands_of
from pyg_accel.formula.computation import NETWORK, OUTER, Computation
from pyg_accel.runtime.machine import Device
from pyg_accel.runtime.tuned import device_of_kind, tuned, tuning_file
from pyg_accel.settings import settings

__all__ = [
    "CORE", "H200", "H200_UNITS", "NEVER", "OF_TARGETS", "RATES", "SHIPPED", "SLOWEST", "Costs",
    "Machine", "Rates", "Work", "costs", "fewest_edges", "figures_of", "machine_of",
    "relational_work", "segment_seconds", "size_reasons", "work_of",
]  # fmt: skip

NEVER = 2**62  # edges
_MAY_BE_0 = ("edge", "row", "overlaps", "fused")


class Costs(NamedTuple):
    """The numbers that decide how large a call must be.

    Attributes:
        launch_us: microseconds of the host per function of torch, PyG's Python included.
        gigabytes: rate at which PyG's path writes and reads tensors of messages, in GB/s.
        edge_ns: nanoseconds per edge of a new graph: the time to build its CSR form, minus the time
            of PyG's path for the indices of an edge.
    """

    launch_us: float
    gigabytes: float
    edge_ns: float


SHIPPED = {"cpu": Costs(12.0, 5.0, 6.0), "cuda": Costs(50.0, 750.0, 0.267)}
# Functions of torch that cost the host as much as ...
_CALL = 4  # one call of a program
_DECLINED = 1  # a call that is too small
_GENERATED = 3  # a kernel that is generated for a formula, or interprets it
_GRADIENT = 9  # the kernels of its gradient
_GRAPH = 6  # building and storing the CSR form of a small graph
_TRANSPOSE = 13  # its transpose, and other arrays for the gradient
_BOUND = 2  # binding the kernels of a layer, or of its gradient, to a new graph
_DERIVED = 6  # gcn_norm, or another function of a graph, that a program runs once a graph
_WEIGHTS = 30  # preparations of attention on a CPU for a new graph
_STACK, _STACK_EDGE = 50, 6  # stacking the graphs of relations, and relative to edge_ns
_TARGET, _RELATION = 40, 6  # the layers per type of targets, and per relation
OF_TARGETS = 3  # tensors of features of targets that PyG writes per relation
_BY_EDGE = 3  # the gradient over an edge list, in addition to the one over rows
_BLOCKS = 60  # execution in blocks of edges
# Functions of torch in PyG's softmax, in its normalisations of a graph, and where attention
# normalises, in each function of self-loops.
_SOFTMAX, _NORMALISATION, _LOOPS = 8, 12, 4
_LAYER = 6  # functions of other parts of a layer, such as its linear map
_BACKWARD = 0.25  # excess of PyG's gradient over ours on the host, relative to the forward pass
_REDUCES = {"sum": 2.0, "mean": 5.5, "max": 2.0, "min": 2.0}  # functions of PyG's reductions
# Kernels save a quarter of the usual bytes if attention reads features of edges, and an eighth if a
# network makes a matrix of every edge.
_FEW, _MATRIX = 0.25, 0.12
# The time of a GPU for the messages of PyG's path, relative to the saved time: steps of GraphSAGE,
# GIN and GINE on new graphs of 64 and 256 features on an H100.
_MESSAGES = 4
# Functions and tensors of PyG for a network on all edges: gathers, a concatenation, gradients.
_NETWORK, _OF_NETWORK = 5, 5.0
# Our kernels for a network on all edges, or a product with matrices of relations, in addition to
# the reduction.
_KERNELS = 2
_TERM = 2  # a linear layer of some columns of a weight, on nodes, or its gradient
_EXTREMES = 7  # in the gradient of PyG's maximum or minimum
# A compiler fuses the functions of a message: our kernels still save about this share of the bytes.
_COMPILED = 0.2


class Work(NamedTuple):
    """The work of a call.

    Attributes:
        functions: number of functions of torch in PyG's path.
        tensors: least number of tensors of messages that PyG writes.
        derived: functions of the graph, such as ``gcn_norm``, that a program runs once a graph.
        overhead: work outside of a program, in functions that cost the host as much.
        generated: formulas with a generated or interpreted kernel.
        extremes: maxima and minima.
        attention: messages are weighted by a softmax.
        row_bytes: bytes of a row of the widest network on edges.
        stacks: number of graphs into which the relations are stacked.
        terms: number of linear layers on the nodes, beyond one for each of PyG's.
        networks: number of computations with a network in blocks, which runs for each of them.
    """

    functions: float = 3
    tensors: float = 1.0
    derived: int = 0
    overhead: int = 0
    generated: int = 0
    extremes: int = 0
    attention: bool = False
    row_bytes: int = 0
    stacks: int = 0
    terms: int = 0
    networks: int = 0


def work_of(computed: Iterable[Computation], derived: int = 0) -> Work:
    """Return the work of a call.

    Args:
        computed: its messages.
        derived: functions of the graph that are run once a graph.
    """
    functions, tensors, blocks, attention = 0.0, 1.0, False, False
    generated = extremes = row_bytes = terms = networks = 0
    counted: set[Any] = set()  # PyG computes common parts of formulas once
    for each in computed:
        count, softmax = sum(_REDUCES.get(name, 4) for name in each.reduces), each.score is not None
        reads_edges = bool(_edges_of(each.formula) | _edges_of(each.score))
        plain = _is_plain(each)
        generated += not plain
        parts = {*_parts(each)} - counted
        counted |= parts
        count += len(parts) + _SOFTMAX * softmax
        functions += count * (each.relations or 1)
        extremes += sum(name in ("max", "min") for name in each.reduces)
        alone = isinstance(each.formula, Operand) and not (softmax or each.columns)
        written = not alone and (plain or not reads_edges)  # else messages are features of edges
        tensors = max(tensors, 1.0 + written + softmax)
        networks += each.in_blocks
        if each.operator == OUTER:
            tensors = _MATRIX
        elif (each.operator == NETWORK and not each.in_blocks) or each.linear_bytes:
            functions, tensors = functions + _NETWORK, _OF_NETWORK
            generated += _KERNELS * (each.products or not each.linear_bytes)
            row_bytes = max(row_bytes, each.linear_bytes)
        elif softmax and reads_edges and not _has_score_per_feature(each):
            tensors, blocks = _FEW, True
        attention, terms = attention | softmax, max(terms, each.linear_terms)
    functions += derived * (_LOOPS if attention else _NORMALISATION)
    overhead = (_BLOCKS if blocks or networks else 0) + _CALL * max(generated - 1, 0)
    return Work(functions, tensors, derived, overhead, generated, extremes, attention, row_bytes,
                terms=terms, networks=networks)  # fmt: skip


def relational_work(computed: Computation, stacks: int) -> Work:
    """Return the work of one layer per relation, with the relations in a number of stacks."""
    overhead = _TARGET * stacks + _RELATION * (computed.relations or 1)
    return work_of([computed])._replace(stacks=stacks, overhead=overhead)


def _edges_of(formula: Formula | None) -> set[Operand]:
    return {o for o in operands_of(formula or Const(1.0)) if o.side == "e"}


def _has_score_per_feature(computed: Computation) -> bool:
    """Whether scores are features that the values have too, as in GENConv, not one per head."""
    shared = _edges_of(computed.formula) & _edges_of(computed.score)
    return bool(shared) and not has_sum(computed.score or Const(1.0))


def _is_plain(computed: Computation) -> bool:
    """Whether no kernel is generated: for features of sources, with a weight per edge or source."""
    bare = Computation(computed.formula, computed.reduces[:1])
    match computed.formula:
        case Operand(side="u") | Binary("mul", Operand("u" | "e"), Operand("u" | "e")):
            return computed == bare
    return False


def _parts(computed: Computation) -> Iterator[Any]:
    """Yield the features of nodes that are read, and the functions that are called."""
    yield from filter(None, (computed.operator, computed.columns))
    waiting = [f for f in (computed.formula, computed.score) if f is not None]
    while waiting:
        part = waiting.pop()
        waiting += children(part)
        if not (isinstance(part, Const) or (isinstance(part, Operand) and part.side == "e")):
            yield part
    if computed.score is not None:
        yield "softmax", computed.score
        if computed.formula is not None:
            yield "mul", computed.score, computed.formula


@lru_cache(maxsize=4096)
def _fewest(
    costs: Costs, work: Work, row_bytes: int, new: bool, gradient: bool, compiled: bool,
    ahead: bool,
) -> int:  # fmt: skip
    builds = new and (work.stacks or not ahead)
    passes, stock = 2 if gradient else 1, work.functions * (1 + _BACKWARD * gradient)
    stock += _EXTREMES * work.extremes * gradient
    functions: float = _CALL - _DECLINED + (_GENERATED + _GRADIENT * gradient) * work.generated
    functions += work.overhead + _TERM * work.terms * passes - stock
    if new:
        functions += _BOUND * passes + _DERIVED * work.derived
        # A GPU reads the edge list of a new graph; a CPU builds it.
        once = _GRAPH + _TRANSPOSE * gradient + _WEIGHTS * work.attention + _STACK * work.stacks
        functions += once if builds else _BY_EDGE * gradient
    saved = work.tensors * row_bytes / costs.gigabytes  # nanoseconds
    saved -= costs.edge_ns * (1 + _STACK_EDGE * bool(work.stacks)) if builds else 0.0
    if functions <= 0:
        return 0 if saved > 0 or not builds else NEVER
    # Each of several networks in blocks runs once more for its gradient, PyG's runs once in all.
    saved *= passes * (_COMPILED if compiled else ahead or not gradient or work.networks < 2)
    if ahead:  # of the device: savings there count if it takes longer than the host
        functions, saved = functions + stock + _LAYER, saved * _MESSAGES
    return ceil(1e3 * costs.launch_us * functions / saved) if saved > 0 else NEVER


def fewest_edges(
    device: str, work: Work, row_bytes: int, *, new: bool, gradient: bool, compiled: bool = False
) -> int:
    """Return the least number of edges for which a call is faster than PyG's path.

    Args:
        device: kind of device, ``"cpu"`` or ``"cuda"``; there is no limit on others.
        work: the work of the call.
        row_bytes: bytes of the features of a node or an edge.
        new: the graph was not used before.
        gradient: a gradient is recorded.
        compiled: PyG's own path would be compiled.
    """
    limits = None if settings.always else costs(device)
    if limits is None:
        return 0
    ahead = device != "cpu" and not compiled
    return _fewest(limits, work, max(row_bytes, work.row_bytes), new, gradient, compiled, ahead)


def size_reasons(edges: int | torch.SymInt, fewest: int, *, new: bool = False) -> list[str]:
    """Return why a call on a number of edges is PyG's; empty if it is large enough."""
    if edges >= fewest:
        return []
    what = "a new graph of fewer" if new else "fewer"
    return [f"small: {what} than {fewest} edges" if fewest < NEVER else f"small: {what} edges"]


def costs(device: str) -> Costs | None:
    """Return the numbers in force; None for an unmeasured kind of device.

    Raises:
        ValueError: naming the file, if it does not hold three numbers.
    """
    return _in_force(settings.tuning, device, torch.get_num_threads())


@lru_cache(maxsize=16)
def _in_force(tuning: str, kind: str, threads: int) -> Costs | None:
    part: Any = tuned(device_of_kind(kind, threads)).get("size")
    if part is None:
        return SHIPPED.get(kind)
    if part.keys() != {*Costs._fields}:
        names = ", ".join(Costs._fields)
        raise ValueError(f"expected {names} in '{tuning_file()}' (got {', '.join(part)})")
    return Costs(**part)


class Rates(NamedTuple):
    """Seconds of a kernel; only the order of kernels matters.

    Attributes:
        call: per call.
        byte: per byte of the features that edges gather.
        edge: per edge: kernels that read 64-bit ids take longer than ours with 32-bit ids.
    """

    call: float
    byte: float
    edge: float = 0.0

    def seconds(self, edges: int, row_bytes: float) -> float:
        """Return the expected time of a call over edges with features of so many bytes each."""
        return self.call + edges * (self.byte * row_bytes + self.edge)


# By backend and kind of device. Kernels of this package gather about 20 GB/s (EPYC) and 4 TB/s
# (H200); `python -m benchmarks.kernels.cpu` and `gpu` compare them with other packages.
RATES = {
    ("cpu", "cpu"): Rates(1e-5, 5e-11),
    ("triton", "cuda"): Rates(3e-5, 2.5e-13),
    ("triton", "cpu"): Rates(1e6, 0.0),  # interpreted, for tests
    ("cuda", "cuda"): Rates(1e-4, 2.5e-13),  # a call has plans and remainders
    ("pyg_lib", "cpu"): Rates(5e-5, 1e-10, 2e-9),
    ("pyg_lib", "cuda"): Rates(1e-4, 1e-12, 5e-12),
    ("torch_sparse", "cpu"): Rates(5e-5, 1.5e-10, 2e-9),
    ("torch_sparse", "cuda"): Rates(1e-4, 5e-13, 5e-12),
}
SLOWEST = Rates(1.0, 2.5e-9)  # the reference: several passes over a row per edge
# Products of segments on an H200: seconds of the host for a product of torch, and of the program
# that adds up a segment for each row, if it has half of them; operations per second.
_SEGMENT, _SEGMENT_ROW = 1e-5, 4e-9
_SEGMENT_FLOPS = {"triton": 3e13, "reference": 4e13}


def segment_seconds(spec: Any, backend: str) -> float:
    """Return the expected time of ``segment_matmul`` or ``segment_outer``.

    Args:
        spec: of ``num_cols`` segments of rows of ``k`` features.
        backend: ``"triton"``, with one launch, or ``"reference"``, with one per segment.
    """
    fixed = RATES.get((backend, spec.device), SLOWEST).call
    if spec.device != "cuda":
        return fixed
    seconds = 2.0 * spec.num_rows * spec.k * spec.width / _SEGMENT_FLOPS[backend]
    if backend == "reference":
        return float(seconds + spec.num_cols * _SEGMENT)
    serial = spec.num_rows * _SEGMENT_ROW if spec.op == "segment_outer" else 0.0
    return float(seconds + fixed + serial)


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits of a machine.

    Attributes:
        flops: multiplications and additions of a large matrix product, per second.
        memory: bytes per second, read and written in order.
        gather: bytes per second of rows gathered from memory, where the cache does not hold them.
        cache: bytes per second from the cache.
        cache_bytes: capacity of the cache.
        slice_bytes: width of the piece of a row that the sparse kernels process at a time.
        sector: bytes that move when a single number is read or written.
        edge: seconds of arithmetic per edge and head, in kernels with a result per edge.
        row: seconds per row of a sparse result.
        call: fixed seconds of a dense call, its Python code included.
        sparse_call: fixed seconds of a sparse call.
        shared: factor on the time of a weighted sum if all heads sum the same features.
        overlaps: whether calls are queued: the next is prepared while the last one runs.
        entry: the number of columns of a dense row that takes as long as one entry of CBSR, where
            both take as long: 256 columns are as fast as about 43 entries on a CPU, 64 on a GPU.
        link: bytes per second received from other processes.
        fused: factor on the time of a weighted sum if its kernel has read the features for the
            weights. Measured on a CPU only.
    """

    flops: float
    memory: float
    gather: float
    cache: float
    cache_bytes: float
    slice_bytes: float
    sector: float
    edge: float
    row: float
    call: float
    sparse_call: float
    shared: float
    overlaps: bool
    entry: float = 4.0
    link: float = 1e9
    fused: float = 1.0

    def __post_init__(self) -> None:
        """Refuse impossible figures, such as infinity, which JSON allows."""
        for name, value in asdict(self).items():
            if not (0 if name in _MAY_BE_0 else 1e-15) <= value <= 1e21:
                raise ValueError(f"no machine has {name}={value!r}")


# Fitted to benchmarks/results/cost_measurements from `python -m pyg_accel profile`: an H200, and
# for a core two processors with AVX-512 (an EPYC and a Xeon, two threads each). `entry` is from
# `python -m benchmarks.papers.maxk_gnn --figure 8`.
H200 = Machine(flops=33e12, memory=3.3e12, gather=4.8e12, cache=10.5e12, cache_bytes=30e6,
               slice_bytes=256, sector=32, edge=0.0, row=0.0, call=12e-6, sparse_call=90e-6,
               shared=0.3, overlaps=True, link=290e9)  # fmt: skip
CORE = Machine(flops=80e9, memory=8.7e9, gather=6.7e9, cache=25e9, cache_bytes=8.5e6,
               slice_bytes=1024, sector=70, edge=6.4e-9, row=26e-9, call=60e-6, sparse_call=90e-6,
               shared=3.5, overlaps=False, entry=6.0, fused=0.0)  # fmt: skip
H200_UNITS = 132  # multiprocessors
_GROW = ("flops", "memory", "gather", "cache", "cache_bytes")  # grow with the number of units
_SHRINK = ("edge", "row")  # shrink with it


def figures_of(kind: str) -> Machine:
    """Return the figures of the measured machine for a kind of device."""
    return H200 if kind == "cuda" else CORE


def machine_of(device: Device, units: int = H200_UNITS) -> Machine:
    """Return the figures of the measured machine, scaled to another device.

    Choices between products only depend on their proportions.

    Args:
        device: the device.
        units: multiprocessors of a GPU.
    """
    like = figures_of(device.kind)
    by = units / H200_UNITS if device.kind == "cuda" else device.threads or 1
    rates = {name: getattr(like, name) * by for name in _GROW}
    return replace(like, **rates, **{name: getattr(like, name) / by for name in _SHRINK})
