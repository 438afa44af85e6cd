"""Every variant of the CUDA kernels of MaxK on the hard graphs, small, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m benchmarks.cbsr_sanitize
    compute-sanitizer --tool racecheck python -m benchmarks.cbsr_sanitize

Reads no results: the tests do.
"""

import torch

from pyg_accel import Graph
from pyg_accel.backends.cuda import cbsr
from pyg_accel.settings import settings
from pyg_accel.testing import zoo

SHAPES = ((7, 3), (256, 16), (256, 32), (256, 50), (300, 40), (600, 130))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def main() -> None:
    cbsr.SPLIT, cbsr.PIECE, cbsr.LONG = 64, 32, 4  # long rows in pieces, and both layouts
    for case in zoo(hub=300):
        sizes = (case.num_sources, case.num_targets)
        graph = Graph.from_edge_index(case.edge_index.cuda(), sizes)
        csr, transposed = graph.csr(edge_order=True), graph.transposed(edge_order=True)
        if csr.col.numel() == 0:
            continue
        for width, k in SHAPES:
            for dtype in FLOATS:
                run(csr, transposed, width, k, dtype)
    torch.cuda.synchronize()
    print("done")


def run(csr, transposed, width, k, dtype):  # type: ignore[no-untyped-def]
    x = torch.randn(csr.num_cols, width, device="cuda").to(dtype)
    y = torch.randn(csr.num_rows, width, device="cuda").to(dtype)
    weight = torch.randn(csr.col.numel(), device="cuda").to(dtype)
    values, indices = cbsr.maxk(x, k)
    for settings.packed in (False, True):
        cbsr.spmm(csr, values, indices, width, weight, "mean")
    for settings.atomics in (False, True):
        cbsr.sspmm(csr, transposed, y, indices, weight)
    cbsr.dot(csr, values, indices, y)


if __name__ == "__main__":
    main()
