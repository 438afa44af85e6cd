"""Whether a call is large enough: what PyG's own path costs beside ours, by three numbers a device.

PyG runs a function of torch for each step of a message and writes a tensor of all edges in most of
them. A program reads the features once. It costs the host as much as a few functions, more where a
kernel is generated for its formula, and on a graph that was not seen before the CSR form has to be
built, which all layers share that get the graph. So each kind of call has a number of edges from
which on it is faster, :func:`fewest_edges`.

``python -m pyg_accel tune`` measures the three numbers of a machine; those shipped are of one core
of an AMD EPYC and of an NVIDIA H100.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import torch

from pyg_accel.settings import settings
from pyg_accel.tuned import device_of_kind, tuned, tuning_file

__all__ = [
    "NEVER", "SHIPPED", "Costs", "Work", "costs", "fewest_edges", "size_reasons", "work_of",
]  # fmt: skip

NEVER = 2**62  # edges


class Costs(NamedTuple):
    """What decides how large a call must be.

    Attributes:
        launch_us: microseconds of the host per function of torch, PyG's Python included.
        gigabytes: of tensors of messages that PyG's path writes and reads again in a second.
        edge_ns: nanoseconds that a new graph takes per edge: to build its CSR form, less what PyG's
            path takes for the indices of an edge.
    """

    launch_us: float
    gigabytes: float
    edge_ns: float


SHIPPED = {"cpu": Costs(12.0, 5.0, 6.0), "cuda": Costs(50.0, 750.0, 0.267)}
# Functions of torch that cost the host as much as ...
_CALL = 4  # one call of a program
_DECLINED = 1  # one call that is found to be too small
_GENERATED = 3  # a kernel that is generated for a formula, or interprets it
_GRADIENT = 9  # those of its gradient
_GRAPH = 6  # the CSR form of a small graph, which is built and remembered
_TRANSPOSE = 13  # its transpose, and what else the gradient needs of it
_BOUND = 2  # the kernels of a layer, and those of its gradient, on a new graph
_DERIVED = 6  # gcn_norm, or another function of a graph, that a program runs once a graph
_WEIGHTS = 30  # what attention prepares on a CPU for a new graph
_STACK, _STACK_EDGE = 50, 6  # putting the graphs of relations together, and over edge_ns
_BY_EDGE = 3  # the gradient over an edge list, beside that over rows
_BLOCKS = 60  # what runs block by block
# Functions of torch in PyG's softmax, in its normalisations of a graph, and where attention
# normalises, in each function of self-loops.
_SOFTMAX, _NORMALISATION, _LOOPS = 8, 12, 4
_LAYER = 6  # those of the rest of a layer, such as its linear map
_BACKWARD = 0.25  # what PyG's gradient costs the host more than ours, over the forward pass
# What needs no generated kernel: features of sources, with a weight per edge or source.
_PLAIN = re.compile(r"(\w+_j )?(u\d+|mul\([eu]\d+,[eu]\d+\))$")
_REDUCES = {"sum": 2.0, "mean": 5.5, "max": 2.0, "min": 2.0}  # those of its reductions
# Kernels save a quarter of what they do elsewhere where attention reads features of edges, and
# an eighth of its bytes where a network makes a matrix of every edge.
_FEW, _MATRIX = 0.25, 0.12
_MESSAGES = 2  # the time of a device for the messages of PyG's path, over what is saved of it
# What PyG runs and writes for a network on all edges: gathers, a concatenation and their gradients.
_NETWORK, _OF_NETWORK = 5, 5.0
# A compiler fuses the functions of a message: about this share of the bytes is saved beside it.
_COMPILED = 0.2


class Work(NamedTuple):
    """What a call does.

    Attributes:
        functions: of torch that PyG runs for it.
        tensors: of messages that PyG writes, at least.
        derived: functions of the graph, such as ``gcn_norm``, that a program runs once a graph.
        overhead: functions that cost the host as much as what is done outside of a program.
        generated: formulas for which a kernel is generated, or which one interprets.
        attention: messages are weighted by a softmax.
        row_bytes: bytes of a row of the widest network on edges.
        stacks: the graphs of relations are put together.
    """

    functions: float = 3
    tensors: float = 1.0
    derived: int = 0
    overhead: int = 0
    generated: int = 0
    attention: bool = False
    row_bytes: int = 0
    stacks: bool = False


def work_of(formulas: Iterable[str], derived: int = 0, *, row_bytes: int = 0) -> Work:
    """Return what a call does.

    Args:
        formulas: as the report shows them, e.g. ``"mean_j u0"``.
        derived: functions of the graph that are run once a graph.
        row_bytes: bytes of a row of the widest network on edges.
    """
    functions, tensors, blocks, generated, attention = 0.0, 1.0, False, 0, False
    counted: set[str] = set()  # PyG computes once what several formulas have in common
    for text in formulas:
        generated += not _PLAIN.match(text)
        reduce, message = text.partition("_j ")[::2]
        count = sum(_REDUCES.get(name, 4) for name in reduce.split("+")) if message else 0
        parts = {*_parts(text)} - counted
        counted |= parts
        count += len(parts)
        count += _SOFTMAX * text.count("softmax_j")
        relations = re.search(r"(\d+) relations", text)
        functions += count * int(relations[1]) if relations else count
        by_edge = not _PLAIN.match(text) and bool(re.search(r"\be\d", text))  # features are read
        tensors = max(tensors, 1.0 + ("(" in text and not by_edge) + ("softmax_j" in text))
        blocks |= "in blocks" in text
        if "outer(" in text:
            tensors = _MATRIX
        elif "network(" in text and "in blocks" not in text:
            functions, tensors = functions + _NETWORK, _OF_NETWORK
        elif "softmax_j" in text and re.search(r"\be\d", text):
            tensors, blocks = _FEW, True
        attention |= "softmax_j" in text
    functions += derived * (_LOOPS if attention else _NORMALISATION)
    overhead = (_BLOCKS if blocks else 0) + _CALL * max(generated - 1, 0)
    return Work(functions, tensors, derived, overhead, generated, attention, row_bytes)


def _parts(text: str) -> Iterator[str]:
    """Yield the features of nodes that a formula reads, and calls of functions."""
    begins: list[int] = []
    for match in re.finditer(r"[uv]\d+|\w*\(|\)", text):
        if match[0].endswith("("):
            begins.append(match.start())
        else:
            yield match[0] if match[0] != ")" else text[begins.pop() : match.end()]


@lru_cache(maxsize=4096)
def _fewest(
    costs: Costs, work: Work, row_bytes: int, new: bool, gradient: bool, compiled: bool,
    ahead: bool,
) -> int:  # fmt: skip
    builds = new and (work.stacks or not ahead)
    passes, stock = 2 if gradient else 1, work.functions * (1 + _BACKWARD * gradient)
    functions: float = _CALL - _DECLINED + (_GENERATED + _GRADIENT * gradient) * work.generated
    functions += work.overhead - stock
    if new:
        functions += _BOUND * passes
        # A GPU reads the edge list of a new graph; a CPU builds it.
        once = _GRAPH + _TRANSPOSE * gradient + _DERIVED * work.derived
        once += _WEIGHTS * work.attention + _STACK * work.stacks
        functions += once if builds else _BY_EDGE * gradient
    saved = work.tensors * row_bytes / costs.gigabytes  # nanoseconds
    saved -= costs.edge_ns * (1 + _STACK_EDGE * work.stacks) if builds else 0.0
    if functions <= 0:
        return 0 if saved > 0 or not builds else NEVER
    saved *= passes * (_COMPILED if compiled else 1.0)
    if ahead:  # of the device: what is saved there shows where it takes longer than the host
        functions, saved = functions + stock + _LAYER, saved * _MESSAGES
    return ceil(1e3 * costs.launch_us * functions / saved) if saved > 0 else NEVER


def fewest_edges(
    device: str,
    work: Work,
    row_bytes: int,
    *,
    new: bool,
    gradient: bool,
    compiled: bool = False,
) -> int:
    """Return the number of edges from which on a call is faster than PyG's own path.

    Args:
        device: kind of device, ``"cpu"`` or ``"cuda"``; there is no limit on others.
        work: what the call does.
        row_bytes: bytes of the features of a node or an edge.
        new: the graph was not seen before.
        gradient: a gradient is recorded.
        compiled: PyG's own path would be compiled.
    """
    found = None if settings.always else costs(device)
    if found is None:
        return 0
    ahead = device != "cpu" and not compiled
    return _fewest(found, work, max(row_bytes, work.row_bytes), new, gradient, compiled, ahead)


def size_reasons(edges: int | torch.SymInt, fewest: int, *, new: bool = False) -> list[str]:
    """Return why a call on a number of edges is PyG's; empty if it is large enough."""
    if edges >= fewest:
        return []
    what = "a new graph of fewer" if new else "fewer"
    return [f"small: {what} than {fewest} edges" if fewest < NEVER else f"small: {what} edges"]


def costs(device: str) -> Costs | None:
    """Return the numbers in force; None for a kind of device that nobody has measured.

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
