"""Every variant of the CUDA kernels on the hard graphs, small, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m benchmarks.tools.sanitize     # or racecheck

The products of MaxK and the Tensor-Core kernels. Reads no results: the tests do.
"""

import torch

from pyg_accel import Graph
from pyg_accel.backends.cuda import cbsr, plan, sddmm, spmm
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


if __name__ == "__main__":
    products_of_maxk()
    tensor_cores()
    torch.cuda.synchronize()
    print("done")
