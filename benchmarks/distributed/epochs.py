"""Epochs of full-graph training on several GPUs, or processes: ours and two peers.

    python -m benchmarks.distributed [--quick] [--worlds 1 2 4] [--graphs NAME ...]
                                     [--models NAME ...] [--minutes 30]
    torchrun --nproc-per-node 2 -m benchmarks.distributed ...     # that number of ranks alone

An epoch is forward, backward and Adam on the whole graph, in fp32; 3 layers, 256 hidden, 40
classes, random features, the loss on all nodes, each rank with that of its own. Nodes are numbered
by communities and cut where work is balanced, for all variants alike. `world 1` is the patched
model in one process, without anything of pyg_accel.distributed.

The peers, written here on torch alone: `all-gather` is the 1D algorithm of CAGNET (every rank
gathers all rows and multiplies its rows of A by them); `halo, torch CSR, DDP` is what a user would
write (the rows that a rank needs by all_to_all_single, torch.sparse.mm, DistributedDataParallel).
Both have the same partition. Outputs of all variants are compared before anything is timed.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data

import pyg_accel
from benchmarks.distributed.peers import CLASSES, build, peer
from benchmarks.tools import graphs, plot, results, timing
from pyg_accel.distributed import mean
from pyg_accel.distributed.tracking import halo_of
from pyg_accel.distributed.wire import Wire

NAME = "distributed/distributed"
FEATURES = {"reddit-like": 602, "products-like": 100, "products-near": 100, "arxiv-like": 128}
GRAPHS = ("reddit-like", "products-like", "products-near")
MODELS = ("GCN", "GraphSAGE", "GAT", "GraphSAGE MaxK")
PEERS = ("all-gather", "halo, torch CSR, DDP")
OURS = ("pyg_accel", "pyg_accel, bf16 wire")
ALLOWED = {"pyg_accel, bf16 wire": 5e-2}  # of the largest output; others 2e-3
BUDGET = 2.0  # seconds of laps a variant


def near_edges(nodes: int, entries: int, communities: int, device: str, seed: int = 0) -> Tensor:
    """An edge_index like products-like, whose background edges decay with community distance.

    80% of the edges stay inside a community; of the others, one that leads d communities away is
    drawn with a probability that falls like 1 / d^2, so that a cut severs few of them.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(entries // 2, device=device, generator=generator)

    size = max(nodes // communities, 1)
    source = (uniform().square() * size).long() + (uniform() * communities).long() * size
    away = (1 / uniform().clamp(min=1e-6)).long().clamp(max=communities)
    away = torch.where(uniform() < 0.5, away, -away)
    away = torch.where(uniform() < 0.8, torch.zeros_like(away), away)
    home = (source // size + away) % communities
    target = (uniform().square() * size).long() + home * size
    edges = torch.stack([source, target]).clamp(max=nodes - 1)
    return torch.cat([edges, edges.flip(0)], dim=1)


def load(name: str, wire: Wire) -> Data:
    """A graph by name, the same on every rank: the first one makes it."""
    base, _, share = name.partition("@")
    device = str(wire.device)
    edges = torch.empty(2, 0, dtype=torch.int64, device=device)
    if wire.rank == 0 and base == "products-near":
        part = float(share or 1)
        sizes = (int(n * part) for n in (2_449_029, 123_718_280, 5_000))
        edges = near_edges(*sizes, device=device)
    elif wire.rank == 0:
        at, share_text = ("@", share) if share else ("", "")
        edges = graphs.edge_list(graphs.load(f"{base}{at}{share_text}/ordered", device=device))
    count = wire.copy_of_first(torch.tensor([edges.size(1)], device=device))
    if wire.rank:
        edges = torch.empty(2, int(count), dtype=torch.int64, device=device)
    wire.copy_of_first(edges)
    nodes = int(edges.max()) + 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(nodes, FEATURES[base], generator=generator)
    y = torch.randint(CLASSES, (nodes,), generator=generator)
    return Data(x=x.to(device), y=y.to(device), edge_index=edges)


def timed(epoch: Callable[[], None], wire: Wire, laps: int) -> timing.Quantiles:
    """The times of epochs; every rank waits for the slowest before each."""
    seconds = []
    for _ in range(laps):
        synchronize(wire)
        start = time.perf_counter()
        epoch()
        synchronize(wire)
        seconds.append(time.perf_counter() - start)
    return timing.quantiles(seconds)


def synchronize(wire: Wire) -> None:
    if wire.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group=wire.group)
    if wire.device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    name: str, whole: Data, variant: str, wire: Wire, reference: list[Tensor]
) -> dict[str, Any]:
    """A row of the table; the first variant's output is what others must agree with."""
    on_gpu = wire.device.type == "cuda"
    model = build(name, whole.x.size(1)).to(wire.device)
    facts: dict[str, Any] = {}
    own = wire
    with pyg_accel.patched():
        if wire.size == 1:
            data, call = whole, lambda: model(whole.x, whole.edge_index)
        else:
            narrow = torch.bfloat16 if variant.endswith("wire") else None
            model, data = pyg_accel.distribute(
                model, whole, rows="own", partition="given", wire_dtype=narrow
            )
            own, halo, spread = model.wire, halo_of(data.edge_index), model
            facts = {"own_rows": halo.own, "halo_rows": halo.rows - halo.own}
            if variant in PEERS:
                model = peer(variant, name, data, whole, own, spread.types[None].cuts)
                call = lambda: model(data.x)  # noqa: E731
            else:
                call = lambda: model(data.x, data.edge_index)  # noqa: E731
        optimizer = torch.optim.Adam(model.parameters())

        def epoch() -> None:
            optimizer.zero_grad()
            each = cross_entropy(call(), data.y, reduction="none")
            (each.mean() if wire.size == 1 else mean(each)).backward()
            optimizer.step()

        with torch.no_grad():
            out = call()
        if not reference:
            reference.append(out)
        off = (out - reference[0]).abs().max() / reference[0].abs().max().clamp(min=1e-9)
        off = wire.largest(off.view(1))
        if float(off) > ALLOWED.get(variant, 2e-3):
            raise RuntimeError(f"{variant} differs by {float(off):.1e} of the largest output")
        del out
        epoch()
        first = timed(epoch, wire, 1).median
        laps = torch.tensor([max(3, min(50, int(BUDGET * 1e3 / first)))], device=wire.device)
        if on_gpu:
            gc.collect()  # a peer's matrices are in a cycle
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        own.traffic.clear()
        took = timed(epoch, wire, count := int(wire.copy_of_first(laps)))
    moved, waited = 0, 0.0
    for kind in ("halo", "gradients"):
        if kind in own.traffic:
            own.traffic[kind].synchronize()
            moved += own.traffic[kind].received
            waited += own.traffic[kind].seconds
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else float("nan")
    if wire.size > 1:  # the whole graph is there for the other variants only
        peak -= sum(t.nbytes for t in (whole.x, whole.y, whole.edge_index)) / 2**20
    most = torch.tensor([moved / count / 1e6, 1e3 * waited / count, peak], device=wire.device)
    most = wire.largest(most.nan_to_num(-1.0)).tolist()
    return facts | {
        "epoch_ms": took.median, "p20": took.p20, "p80": took.p80, "received_mb": most[0],
        "wait_ms": most[1], "peak_mib": most[2] if on_gpu else float("nan"), "off": float(off),
    }  # fmt: skip


def rows_of(options: argparse.Namespace, wire: Wire) -> Iterator[dict[str, Any]]:
    """All rows of one number of ranks."""
    deadline = time.monotonic() + 60 * options.minutes / len(options.worlds)
    for graph in options.graphs:
        whole = load(graph, wire)
        for name in options.models:
            variants: Sequence[str] = ("pyg_accel",)
            if wire.size > 1:
                peers = PEERS if name in ("GCN", "GraphSAGE") else ()
                # bfloat16 changes what MaxK keeps in the next layer: nothing to compare with.
                variants = [*(OURS[:1] if name.endswith("MaxK") else OURS), *peers]
            reference: list[Tensor] = []
            for variant in (
                v for v in variants if options.variants is None or v in options.variants
            ):
                late = torch.tensor([float(time.monotonic() > deadline)], device=wire.device)
                if float(wire.copy_of_first(late)):
                    if wire.rank == 0:
                        print(f"out of time before {variant} of {name} on {graph}", flush=True)
                    return
                row = {"graph": graph, "model": name, "variant": variant, "world": wire.size}
                row |= {"N": whole.num_nodes, "E": whole.num_edges}
                try:
                    row |= measure(name, whole, variant, wire, reference)
                except torch.cuda.OutOfMemoryError:
                    if wire.size > 1:
                        raise  # the others wait in a collective
                    row["note"] = "out of memory"
                if wire.device.type == "cuda":
                    torch.cuda.empty_cache()
                yield row
        del whole


def work(rank: int, world: int, options: argparse.Namespace, meeting: str, answers: str) -> None:
    """One rank."""
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if not dist.is_initialized():
        backend, method = "nccl" if on_gpu else "gloo", f"file://{meeting}"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=world)
    wire, rows = Wire(None, device), []
    for row in rows_of(options, wire):
        if rank == 0:
            rows.append(row)
            print(results.line(row), flush=True)
            Path(answers).write_text(json.dumps(rows))
    dist.destroy_process_group()


def finished(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows with the efficiency against one process."""
    alone = {(r["graph"], r["model"]): r["epoch_ms"] for r in rows
             if r["world"] == 1 and "epoch_ms" in r}  # fmt: skip
    for row in rows:
        base = alone.get((row["graph"], row["model"]))
        known = base is not None and "epoch_ms" in row
        yield row | ({"efficiency": base / row["epoch_ms"] / row["world"]} if known else {})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, worlds=(1,), graphs=GRAPHS, models=MODELS, variants=None,
                            minutes=30.0)  # fmt: skip
    gpus = torch.cuda.device_count()
    parser.set_defaults(worlds=[p for p in (1, 2, 4) if p <= max(gpus, 2)])
    options = parser.parse_args(arguments)
    if options.quick:
        options.graphs = ["arxiv-like@0.02", "products-near@0.001"]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "rows.json"
        if dist.is_torchelastic_launched():
            dist.init_process_group("nccl" if gpus else "gloo")
            rank, options.worlds = dist.get_rank(), [dist.get_world_size()]
            work(rank, options.worlds[0], options, "", str(answers))
            if rank:
                return
            found = json.loads(answers.read_text())
        else:
            for world in options.worlds:
                meeting = str(Path(folder) / f"meeting{world}")
                mp.spawn(work, (world, options, meeting, str(answers)), nprocs=world)
                found += json.loads(answers.read_text())
    name = torch.cuda.get_device_name() if gpus else ""
    rows = results.Rows(NAME, options, gpu=name)
    rows.add(finished(found))
    rows.done()
    plot.beside(rows.path)


if __name__ == "__main__":
    main()
