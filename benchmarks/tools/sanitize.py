"""Every variant of the GPU kernels on the hard graphs, small, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m benchmarks.tools.sanitize [PART ...]  # or racecheck

Parts are the products of MaxK, the Tensor-Core kernels, layers on edges, and nearest points.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 lets memcheck see the end of each tensor. Reads no results: the
tests do.
"""

import sys

import torch
import torch_geometric.nn as pyg

import pyg_accel
from pyg_accel import Graph
from pyg_accel.backends.cuda import cbsr, plan, sddmm, spmm
from pyg_accel.pyg_lib import ops
from pyg_accel.settings import settings
from pyg_accel.testing import zoo

SHAPES = ((7, 3), (256, 16), (256, 32), (256, 50), (300, 40), (600, 130))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def products_of_maxk() -> None:
    cbsr.SPLIT, cbsr.PIECE, cbsr.LONG = 64, 32, 4  # long rows in pieces, and both layouts
    for case in zoo(hub=300):
        sizes = (case.num_sources, case.num_targets)
        graph = Graph.from_edge_index(case.edge_index.cuda(), sizes)
        csr, transposed = graph.csr(edge_order=True), graph.transposed(edge_order=True)
        if csr.col.numel() == 0:
            continue
        for width, k in SHAPES:
            for dtype in FLOATS:
                maxk(csr, transposed, width, k, dtype)


def maxk(csr, transposed, width, k, dtype):  # type: ignore[no-untyped-def]
    x = torch.randn(csr.num_cols, width, device="cuda").to(dtype)
    y = torch.randn(csr.num_rows, width, device="cuda").to(dtype)
    weight = torch.randn(csr.col.numel(), device="cuda").to(dtype)
    values, indices = cbsr.maxk(x, k)
    cbsr.spmm(csr, values, indices, width, weight, "mean")
    for settings.atomics in (False, True):
        cbsr.sspmm(csr, transposed, y, indices, weight)


def tensor_cores() -> None:
    plan.SHORTEST = 2  # divided windows too
    for case in zoo(hub=600):
        sizes = (case.num_sources, case.num_targets)
        csr = Graph.from_edge_index(case.edge_index.cuda(), sizes).csr(edge_order=True)
        if csr.col.numel() == 0:
            continue
        for dtype, exact in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, False),
                             (torch.float16, False)):  # fmt: skip
            for window in (16, 32, 64):
                for width, warps, least in ((7, 1, 1), (100, 3, 2)):
                    x = torch.randn(csr.num_cols, width, device="cuda").to(dtype)
                    y = torch.randn(csr.num_rows, width, device="cuda").to(dtype)
                    weight = torch.randn(csr.col.numel(), device="cuda").to(dtype)
                    spmm.run(csr, x, weight, window=window, warps=warps, exact=exact, mean=True,
                             least=least)  # fmt: skip
                    sddmm.run(csr, y, x, window=window, slice=64, exact=exact, least=least)


def layers_on_edges() -> None:
    settings.always = True
    for layer in (pyg.GATConv(8, 5, 3), pyg.GATv2Conv(8, 5, 3), pyg.TransformerConv(8, 5, 3),
                  pyg.GCNConv(8, 33), pyg.SAGEConv(8, 4, ["mean", "max", "std"]),
                  pyg.GINEConv(torch.nn.Linear(8, 7), edge_dim=2)):  # fmt: skip
        pyg_accel.patch(layer.cuda())
        for case in zoo(hub=300):
            if case.num_sources != case.num_targets:
                continue
            for dtype in (torch.int64, torch.int32):
                edges = case.edge_index.to(dtype).cuda()
                x = torch.randn(case.num_sources, 8, device="cuda", requires_grad=True)
                features = torch.randn(edges.size(1), 2, device="cuda")
                args = (x, edges, features) if isinstance(layer, pyg.GINEConv) else (x, edges)
                layer(*args).sum().backward()


def nearest_points() -> None:
    for dims in (1, 3, 40):
        x, y = torch.rand(5000, dims, device="cuda"), torch.rand(700, dims, device="cuda")
        ptr = [torch.tensor([0, 10, 10, t.size(0)], device="cuda") for t in (x, y)]
        for most in (1, 33, 65, 200):
            ops.knn(x, y, most, *ptr)
            ops.radius(x, y, 0.1, *ptr, max_num_neighbors=most)
            ops.knn(x, y, most)
        ops.fps(x, ptr[0], 0.1)


PARTS = {f.__name__: f for f in (products_of_maxk, tensor_cores, layers_on_edges, nearest_points)}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
    torch.cuda.synchronize()
    print("done")
