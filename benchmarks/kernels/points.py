"""Time of what stands in for pyg-lib on a CPU beside torch-cluster, where that is importable.

    pip install --no-build-isolation --no-deps --target FOLDER torch-cluster
    PYTHONPATH=FOLDER python -m benchmarks.kernels.points [--quick]

Edges are compared first, as sets. `ratio` is the time of torch-cluster over ours; it gets as many
workers as there are threads where it has some, for the search of one example.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.tools import results, timing
from pyg_accel.pyg_lib import ops, sampler

NAME = "kernels/cpu_points"
Call = Callable[[], Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = results.parser(__doc__, rounds=9).parse_args(arguments)
    peer = importlib.import_module("torch_cluster")
    rows = results.Rows(
        NAME, options, key=("case", "threads"), peer=f"torch-cluster {peer.__version__}"
    )
    size = 2_000 if options.quick else 100_000
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows.facts = timing.facts() | {"peer": rows.facts["peer"]}
        for case, ours, theirs in cases(peer, size, threads):
            if (case, threads) not in rows.missing([(case, threads)]):
                continue
            took = timing.in_turns({"ms": ours, "peer_ms": theirs}, "cpu", options.rounds)
            row = {name: quantiles.median for name, quantiles in took.items()}
            rows.add([row | {"ratio": row["peer_ms"] / row["ms"]}], show=True, case=case)
    rows.done()


def cases(peer: Any, size: int, workers: int) -> Iterator[tuple[str, Call, Call]]:
    """Yield what is timed: ours, and that of torch-cluster."""
    torch.manual_seed(0)
    x, wide = torch.rand(size, 3), torch.randn(4096, 64)
    near = (32 / size / 4.19) ** (1 / 3)  # with 32 points within on average
    clouds, examples = torch.randn(32 * 1024, 3), 32
    batch, ptr = torch.arange(examples).repeat_interleave(1024), torch.arange(examples + 1) * 1024
    same(ops.knn(x, x, 17), peer.knn(x, x, 17))
    yield (f"knn_graph {size} x 3, k = 16", lambda: ops.knn(x, x, 17),
           lambda: peer.knn(x, x, 17, num_workers=workers))  # fmt: skip
    yield (f"radius_graph {size} x 3, 32 neighbours",
           lambda: ops.radius(x, x, near, max_num_neighbors=100),
           lambda: peer.radius(x, x, near, max_num_neighbors=100, num_workers=workers))  # fmt: skip
    same(ops.radius(x, x, near, max_num_neighbors=size),
         peer.radius(x, x, near, max_num_neighbors=size))  # fmt: skip
    yield ("knn_graph 32 x 1024 x 3, k = 20", lambda: ops.knn(clouds, clouds, 21, ptr, ptr),
           lambda: peer.knn(clouds, clouds, 21, batch, batch))  # fmt: skip
    yield ("knn 4 x 1024 x 64, k = 20", lambda: ops.knn(wide, wide, 20, ptr[: 5], ptr[: 5]),
           lambda: peer.knn(wide, wide, 20, batch[:4096], batch[:4096]))  # fmt: skip
    yield ("fps 32 x 1024 x 3, a quarter", lambda: ops.fps(clouds, ptr, 0.25),
           lambda: peer.fps(clouds, batch, 0.25))  # fmt: skip
    some, one = x[: size // 5], torch.tensor([0, size // 5])
    yield (f"fps {size // 5} x 3, a tenth", lambda: ops.fps(some, one, 0.1),
           lambda: peer.fps(some, ratio=0.1))  # fmt: skip
    row, col = ops.knn(x, x, 16)
    rowptr, seed = torch.searchsorted(row, torch.arange(size + 1)), torch.arange(0, size, 5)
    for p, q in ((1.0, 1.0), (0.5, 2.0)):
        yield (
            f"random_walk {len(seed)} x 20, p = {p:g}, q = {q:g}",
            lambda p=p, q=q: sampler.random_walk(rowptr, col, seed, 20, p, q),
            lambda p=p, q=q: torch.ops.torch_cluster.random_walk(rowptr, col, seed, 20, p, q),
        )
    yield (f"graclus {size} x 16", lambda: ops.graclus_cluster(rowptr, col),
           lambda: torch.ops.torch_cluster.graclus(rowptr, col, None))  # fmt: skip


def same(ours: Tensor, theirs: Tensor) -> None:
    """Compare edges in any order; equal distances may have had another choice."""
    size = int(ours.max()) + 1
    keys = [(edges[0] * size + edges[1]).unique() for edges in (ours, theirs)]
    common = torch.isin(*keys).sum()
    assert common >= 0.999 * max(len(keys[0]), len(keys[1])), "other neighbours were found"


if __name__ == "__main__":
    main()
