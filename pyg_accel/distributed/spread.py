"""``distribute()``: spread a model and a data set over the ranks of a process group."""

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch_geometric
from torch import Tensor

import pyg_accel
from pyg_accel.distributed import suitability
from pyg_accel.distributed.entry import HOOKS, features_with_halo
from pyg_accel.distributed.folder import Stored
from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.norms import ALL_NODES
from pyg_accel.distributed.partitioners import method_reasons
from pyg_accel.distributed.share import cut_data, partitions, read_data
from pyg_accel.distributed.wire import Wire, agree
from pyg_accel.errors import DistributedError, NotDistributable
from pyg_accel.patching.api import OverrideHandle

__all__ = ["distribute"]

Wrap = bool | Callable[[torch.nn.Module], torch.nn.Module]


def distribute(
    model: torch.nn.Module,
    data: Any,
    mesh: Any = None,
    *,
    rows: Literal["all", "own"] = "all",
    wrap: Wrap = True,
    partition: str | Tensor | Mapping[str, Tensor] = "community",
    wire_dtype: torch.dtype | None = None,
) -> tuple[Distributed, Any]:
    """Spread full-graph training over the ranks of a process group; every rank has to call it.

    Each rank owns some nodes and the edges that lead to them. Layers run on these edges, and
    receive the rows that they read from other ranks. Outputs and gradients equal the results of a
    single process.

    Args:
        model: a model of PyG layers. It moves to the device of the mesh, its norms take statistics
            over the nodes of all ranks, and parameters and buffers are copied from the first rank.
        data: the whole data set, the same on every rank; or the folder of a stored graph
            (:func:`pyg_accel.distributed.save`), from which each rank reads its part.
        mesh: a ``DeviceMesh`` of one dimension or a process group; by default all processes.
        rows: ``"all"`` returns outputs for all nodes in the order of ``data``, and leaves ``y``
            and masks whole. ``"own"`` returns the outputs of this rank, and cuts ``y`` and masks.
        wrap: True averages gradients over ranks after each backward pass; False leaves this to
            the caller (FSDP2, DDP, accelerate); a function wraps the model and averages them.
        partition: an order of :func:`pyg_accel.reorder`, cut into parts of equal work;
            ``"given"``, the order of the node ids; ``"metis"``, if the extra ``partition`` is
            installed; or the rank of every node (a dictionary by node type for a HeteroData).
        wire_dtype: ``torch.bfloat16`` halves the bytes of float32 features that are sent.

    Returns:
        The model, and the data of this rank; ``data.n_id`` has its nodes.

    Raises:
        PartitionMismatch: on every rank, if models, data, options or versions differ between them.
        NotDistributable: on every rank, if model or data cannot be distributed.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise DistributedError(
            "there is no process group: start the script by torchrun, and call "
            "torch.distributed.init_process_group() or init_device_mesh() in it"
        )
    wire = Wire(_group_of(mesh), _device_of(mesh, model))
    stored: list[Stored] = []
    agree(wire, lambda: _facts(wire, model, data, (rows, wrap, partition, wire_dtype), stored))
    model.to(wire.device)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            wire.copy_of_first(tensor)
    if stored:
        types = stored[0].partitions(wire.size)
        share = read_data(wire, stored[0], types, rows, wire_dtype is not None)
    else:
        types = partitions(wire, data, partition)
        share = cut_data(wire, data, types, rows, wire_dtype is not None)
    _prepare(model)
    result = Distributed(model, wire, types, rows, wrap)
    others = {"halos": features_with_halo, "distributed": Distributed}
    weakref.finalize(result, OverrideHandle(HOOKS | others).remove)
    return result, share


def _prepare(model: torch.nn.Module) -> None:
    """Let norms and layers reduce over all ranks; drop cached results for the whole graph."""
    for module in model.modules():
        kind: type[torch.nn.Module] = type(module)
        module.__class__ = ALL_NODES.get(kind, kind)
        for name in vars(module):
            if name.startswith("_cached"):  # of cached=True
                setattr(module, name, None)


def _group_of(mesh: Any) -> Any:
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        return mesh
    if mesh.ndim != 1:
        raise NotDistributable(f"expected a mesh of one dimension (got {mesh.ndim})")
    return mesh.get_group()


def _device_of(mesh: Any, model: Any) -> torch.device:
    kind = getattr(mesh, "device_type", None)
    if kind is None:
        tensors = model.parameters() if isinstance(model, torch.nn.Module) else ()
        on_gpu = "nccl" in dist.get_backend(mesh) or any(t.is_cuda for t in tensors)
        kind = "cuda" if on_gpu else "cpu"
    if kind != "cuda":
        return torch.device(kind)
    local = dist.get_node_local_rank(torch.cuda.current_device())
    return torch.device("cuda", local % torch.cuda.device_count())


def _facts(
    wire: Wire, model: Any, data: Any, options: tuple[Any, ...], stored: list[Stored]
) -> dict[str, str]:
    """Return the facts that all ranks must share; opens the folder of a stored graph.

    Each array of the folder is verified by one rank.

    Raises:
        ValueError: for arguments that cannot be distributed.
    """
    rows, wrap, partition, wire_dtype = options
    reasons = suitability.model_reasons(model)
    if isinstance(data, (str, Path)):
        stored.append(Stored(data, slice(wire.rank, None, wire.size)))
        if partition != "community":
            reasons.append("a stored graph has its partition: pass it to save()")
    else:
        reasons += suitability.data_reasons(data)
        reasons += method_reasons(partition) if isinstance(partition, str) else []
    if rows not in ("all", "own"):
        reasons.append(f"expected 'rows' to be 'all' or 'own' (got {rows!r})")
    if wire_dtype not in (None, torch.bfloat16):
        reasons.append(f"expected 'wire_dtype' to be None or torch.bfloat16 (got {wire_dtype})")
    if reasons:
        raise NotDistributable("; ".join(reasons))
    facts = {
        "pyg_accel": pyg_accel.__version__, "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__, "rows": rows,
        "wrap": str(wrap is True), "wire_dtype": str(wire_dtype),
    }  # fmt: skip
    named = partition if isinstance(partition, Mapping) else {"": partition}
    facts |= {f"partition {key}": suitability.digest(part) for key, part in named.items()}
    facts |= suitability.model_facts(model)
    return facts | (stored[0].facts if stored else suitability.data_facts(data))
