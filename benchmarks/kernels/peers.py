"""The libraries that pyg_accel is compared with, behind one interface, and pyg_accel itself."""

import importlib.util
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from benchmarks.kernels.cases import Case, Inputs
from benchmarks.tools.timing import SelfTimed

OURS = "pyg_accel"

Runnable = Callable[[], Tensor]  # where it is also a SelfTimed, it is timed where it runs


class Peer(Protocol):
    """One library on one road: what it can do, and how it is called."""

    name: str

    def reasons(self, case: Case) -> list[str]:
        """Why this peer cannot run the case; empty when it can."""

    def prepare(self, case: Case, inputs: Inputs) -> Runnable | SelfTimed:
        """The call to time. Formats are built here, since a training loop builds them once."""

    def close(self) -> None:
        """Let go of what `prepare` holds."""


class _Local:
    """A peer in this process; nothing outlives the call that `prepare` returned."""

    def close(self) -> None:
        pass


class Stock(_Local):
    """PyG on a plain `edge_index`: gather the messages of all edges, then scatter them."""

    name = "stock PyG"

    def reasons(self, case: Case) -> list[str]:
        return []

    def prepare(self, case: Case, inputs: Inputs) -> Runnable:
        row, nodes = inputs.row, inputs.num_nodes
        if case.op == "sddmm":
            return lambda: inputs.messages(case).sum(dim=1)
        return lambda: scatter(inputs.messages(case), row, 0, nodes, case.reduce)


class Mkl(_Local):
    """torch's CSR tensor, whose product is MKL's."""

    name = "MKL"

    def reasons(self, case: Case) -> list[str]:
        missing = [] if torch.backends.mkl.is_available() else ["torch was built without MKL"]
        if case.op == "gspmm":
            missing.append("products only, no binary-reduce")
        if case.op == "spmm" and case.reduce != "sum":
            missing.append(f"sum only, no {case.reduce}")
        return missing

    def prepare(self, case: Case, inputs: Inputs) -> Runnable:
        if case.op == "sddmm":
            pattern = _csr(inputs, torch.zeros(inputs.num_entries))
            v, u_transposed = inputs.v, inputs.u.t()
            return lambda: torch.sparse.sampled_addmm(pattern, v, u_transposed).values()
        adjacency, u = _csr(inputs, _weight(case, inputs)), inputs.u
        return lambda: adjacency @ u


class TorchSparseMm(_Local):
    """`torch.sparse.mm` with a reduction: torch's own kernels, which PyG calls for CSR tensors."""

    name = "sparse.mm"

    def reasons(self, case: Case) -> list[str]:
        return [] if case.op == "spmm" else ["SpMM only"]

    def prepare(self, case: Case, inputs: Inputs) -> Runnable:
        reduce = {"max": "amax", "min": "amin"}.get(case.reduce, case.reduce)
        adjacency, u = _csr(inputs, _weight(case, inputs)), inputs.u
        return lambda: torch.sparse.mm(adjacency, u, reduce)


class TorchSparse(_Local):
    """The torch-sparse package, PyG's own road for `SparseTensor`."""

    name = "torch-sparse"

    def reasons(self, case: Case) -> list[str]:
        found = importlib.util.find_spec("torch_sparse") is not None
        missing = [] if found else ["torch-sparse is not installed"]
        return missing + ([] if case.op == "spmm" else ["SpMM only"])

    def prepare(self, case: Case, inputs: Inputs) -> Runnable:
        import torch_sparse

        nodes = inputs.num_nodes
        adjacency = torch_sparse.SparseTensor(
            rowptr=inputs.rowptr,
            col=inputs.col,
            value=inputs.weight if case.weighted else None,
            sparse_sizes=(nodes, nodes),
            is_sorted=True,
        )
        return lambda: torch_sparse.matmul(adjacency, inputs.u, case.reduce)


class PygAccel(_Local):
    """This project, by its public operations."""

    name = OURS

    def reasons(self, case: Case) -> list[str]:
        return []

    def prepare(self, case: Case, inputs: Inputs) -> Runnable:
        from pyg_accel import Graph, ops

        graph = Graph.from_csr(inputs.rowptr, inputs.col, num_cols=inputs.num_nodes)
        if case.op == "sddmm":
            v, u = inputs.v, inputs.u
            return lambda: ops.sddmm(graph, v, u, op="dot")
        if case.op == "gspmm":
            operands = inputs.operands(case)
            return lambda: ops.gspmm(graph, case.formula, operands, reduce=case.reduce)
        weight, u = inputs.weight if case.weighted else None, inputs.u
        return lambda: ops.spmm(graph, u, weight, reduce=case.reduce)


def _weight(case: Case, inputs: Inputs) -> Tensor:
    return inputs.weight if case.weighted else torch.ones(inputs.num_entries)


def _csr(inputs: Inputs, values: Tensor) -> Tensor:
    nodes = inputs.num_nodes
    size = (nodes, nodes)
    return torch.sparse_csr_tensor(inputs.rowptr, inputs.col, values, size, check_invariants=False)
