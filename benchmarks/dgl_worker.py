"""Runs in DGL's environment and imports nothing of this project: see `dgl_peer.py`.

    python dgl_worker.py THREADS

A line of JSON in, a line of JSON out:
    {"load": "inputs.npz"}                        rowptr [N + 1], col [E], operands by name
    {"run": {...}, "output": "output.npy"}        run once, write the result
    {"run": {...}, "calls": 3} -> {"seconds": 1}  run and take the time
"""

import json
import os
import sys
import time

import dgl
import numpy as np
import torch


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever DGL prints is no reply
    graph, arrays = None, {}
    for line in sys.stdin:
        request, reply = json.loads(line), {}
        if "load" in request:
            graph, arrays = None, {}  # frees the last ones before the next are read
            graph, arrays = load(request["load"])
        elif "output" in request:
            output = run(graph, arrays, **request["run"])
            # What DGL's update_all does next, for targets without edges; not timed, to its favour.
            np.save(request["output"], output.masked_fill(output.isinf(), 0.0).numpy())
        else:
            start = time.perf_counter()
            for _ in range(request["calls"]):
                run(graph, arrays, **request["run"])
            reply["seconds"] = time.perf_counter() - start
        print(json.dumps(reply), file=replies, flush=True)


def load(path):
    """Graph and operands; edge ids are the stored CSR order."""
    with np.load(path) as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    rowptr, col = arrays.pop("rowptr"), arrays.pop("col")
    edge_ids = torch.arange(len(col))  # DGL's fastest kernels insist on having them
    graph = dgl.graph(("csc", (rowptr, col, edge_ids)), num_nodes=len(rowptr) - 1)
    graph.create_formats_()
    arrays["weight"] = arrays["weight"].unsqueeze(1)
    return graph, arrays


def run(graph, arrays, operation, operands, relu, reduce):
    """One DGL operation: [N, F], or [E] for a dot product."""
    left, right = (*(arrays[name] for name in operands), None)[:2]
    if operation == "dot":
        return dgl.ops.gsddmm(graph, operation, left, right, *operands).squeeze(-1)
    if relu or "v" in operands:
        messages = dgl.ops.gsddmm(graph, operation, left, right, *operands)
        messages = messages.relu_() if relu else messages
        return dgl.ops.gspmm(graph, "copy_rhs", reduce, None, messages)
    return dgl.ops.gspmm(graph, operation, reduce, left, right)


if __name__ == "__main__":
    main()
