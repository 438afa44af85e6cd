"""``distribute()``: a model and a data set, spread over the ranks of a process group."""

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed import pools
from pyg_accel.distributed.agreement import agree, digest, model_facts, versions
from pyg_accel.distributed.convs import CONVS
from pyg_accel.distributed.entry import HOOKS, CompressedHalos
from pyg_accel.distributed.folder import Stored
from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.norms import NORMS
from pyg_accel.distributed.partitioners import method_reasons
from pyg_accel.distributed.products import look
from pyg_accel.distributed.share import cut_data, partitions, read_data
from pyg_accel.distributed.stores import edge_stores, node_stores
from pyg_accel.distributed.suitability import data_reasons, model_reasons
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import DistributedError, NotDistributable
from pyg_accel.layers.aggregation import BEYOND
from pyg_accel.patching.api import OverrideHandle
from pyg_accel.rewrite import halos

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
    """Spread full-graph training over the ranks of a process group; every rank calls it alike.

    Each rank owns some nodes and the edges that lead to them. Layers run on these, and ask other
    ranks for the rows that their edges read. Outputs and gradients are those of one process.

    Args:
        model: made of PyG layers; it moves to the device of the mesh, and its norms take the nodes
            of all ranks. Parameters and buffers become those of the first rank.
        data: the whole data set, the same on every rank; or the folder of a stored graph
            (:func:`pyg_accel.distributed.save`), of which each rank reads its part.
        mesh: a ``DeviceMesh`` of one dimension or a process group; by default all processes.
        rows: ``"all"`` returns outputs for all nodes in the order of ``data``, and leaves ``y``
            and masks whole. ``"own"`` returns those of this rank, and cuts ``y`` and masks too.
        wrap: True averages gradients over ranks after each backward pass; False leaves that to
            you (FSDP2, DDP, accelerate); a function wraps the model, and does it.
        partition: an order that :func:`pyg_accel.reorder` knows, cut where work is balanced;
            ``"given"``, the order of the node ids; ``"metis"`` or ``"kaminpar"``, if the extra
            ``partition`` is installed; or the rank of every node (a dictionary of them by node
            type for a HeteroData).
        wire_dtype: ``torch.bfloat16`` halves what float32 features take on the wire.

    Returns:
        The model, and the data of this rank to call it with; ``data.n_id`` has its nodes.

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
    opened: list[Stored] = []
    options = (rows, wrap, partition, wire_dtype)
    agree(wire, lambda: _facts(model, data, options, opened))
    model.to(wire.device)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            wire.copy_of_first(tensor)
    narrow = wire_dtype is not None
    if opened:
        types = opened[0].partitions(wire.size)
        share = read_data(wire, opened[0], types, rows, narrow)
    else:
        types = partitions(wire, data, partition)
        share = cut_data(wire, data, types, rows, narrow)
    _prepare(model)
    result = Distributed(model, wire, types, rows, wrap)
    halos.DISTRIBUTED.add(result)
    hooks = OverrideHandle(HOOKS)
    if pools.enter(1) == 1:
        BEYOND.append(_HALOS)
        halos.HALO_LOOKUPS.append(look)
    weakref.finalize(result, _leave, hooks)
    return result, share


_HALOS = CompressedHalos()


def _leave(hooks: OverrideHandle) -> None:
    hooks.remove()
    if not pools.enter(-1):
        BEYOND.remove(_HALOS)
        halos.HALO_LOOKUPS.remove(look)


def _prepare(model: torch.nn.Module) -> None:
    """Let norms and layers take the nodes of all ranks; drop what they kept of the whole graph."""
    for module in model.modules():
        kind: type[torch.nn.Module] = type(module)
        module.__class__ = NORMS.get(kind) or CONVS.get(kind) or kind
        for name in vars(module):
            if name.startswith("_cached"):  # by cached=True, in earlier calls
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
        backend = dist.get_backend(mesh)
        kind = "cuda" if "nccl" in backend else "cpu"
        first = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
        if "gloo" in backend and first is not None and first.device.type == "cuda":
            return torch.device(first.device)
    if kind != "cuda":
        return torch.device(kind)
    local = dist.get_node_local_rank(torch.cuda.current_device())
    return torch.device("cuda", local % torch.cuda.device_count())


def _facts(model: Any, data: Any, options: tuple[Any, ...], opened: list[Stored]) -> dict[str, str]:
    """Return what all ranks must agree on; opens the folder of a stored graph.

    Raises:
        ValueError: for what cannot be distributed.
    """
    rows, wrap, partition, wire_dtype = options
    reasons = model_reasons(model)
    if isinstance(data, (str, Path)):
        opened.append(Stored(data))
        if partition != "community":
            reasons.append("a stored graph has its partition: pass it to save()")
    else:
        reasons += data_reasons(data)
        reasons += method_reasons(partition) if isinstance(partition, str) else []
    if rows not in ("all", "own"):
        reasons.append(f"expected 'rows' to be 'all' or 'own' (got {rows!r})")
    if wire_dtype not in (None, torch.bfloat16):
        reasons.append(f"expected 'wire_dtype' to be None or torch.bfloat16 (got {wire_dtype})")
    if reasons:
        raise NotDistributable("; ".join(reasons))
    facts = versions() | model_facts(model)
    facts |= {"rows": rows, "wrap": str(wrap is True), "wire_dtype": str(wire_dtype)}
    named = partition if isinstance(partition, Mapping) else {"": partition}
    facts |= {f"partition {k}": p if isinstance(p, str) else digest(p) for k, p in named.items()}
    return facts | (opened[0].facts if opened else _data_facts(data))


def _data_facts(data: Data | HeteroData) -> dict[str, str]:
    facts = {}
    for kind, stores in (("nodes", node_stores(data)), ("edges", edge_stores(data))):
        for key, store in stores.items():
            name = "" if store is data else f"{key} "
            if kind == "nodes":
                facts[f"data {name}number of nodes"] = str(store.num_nodes)
            for attribute, value in (data.to_dict() if store is data else store).items():
                facts[f"data {name}{attribute}"] = digest(value)
    return facts
