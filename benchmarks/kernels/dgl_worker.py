"""Runs in DGL's environment and imports nothing of this project: see `dgl_peer.py`.

    python dgl_worker.py THREADS

A line of JSON in, a line of JSON out:
    {"load": "inputs.npz"}                   rowptr [N + 1], col [E], operands by name
    {"run": {...}, "output": "output.npz"}   run once, write the result and, in training, gradients
    {"run": {...}, "calls": 3, "clock": "perf_counter"} -> {"seconds": 1}   run and take the time
"""

import json
import os
import sys
import time

import dgl
import numpy as np
import torch

# Operands of messages that one kernel computes and reduces, a dot product excepted.
FUSED = (["u"], ["e"], ["u", "e"], ["u", "weight"])


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
            output, *gradients = step(graph, arrays, **request["run"])
            # What DGL's update_all does next, for targets without edges; not timed, to its favour.
            output = output.masked_fill(output.isinf(), 0.0)
            np.savez(request["output"], *(array.numpy() for array in (output, *gradients)))
        else:
            clock = getattr(time, request["clock"])
            start = clock()
            for _ in range(request["calls"]):
                step(graph, arrays, **request["run"])
            reply["seconds"] = clock() - start
        print(json.dumps(reply), file=replies, flush=True)


def load(path):
    """Graph and operands; `edge` has the number of each stored edge, by default its place."""
    with np.load(path) as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    rowptr, col = arrays.pop("rowptr"), arrays.pop("col")
    # DGL's fastest kernels insist on having them.
    edge_ids = arrays.pop("edge", torch.arange(len(col)))
    graph = dgl.graph(("csc", (rowptr, col, edge_ids)), num_nodes=len(rowptr) - 1)
    graph.create_formats_()
    if "weight" in arrays:
        arrays["weight"] = arrays["weight"].unsqueeze(1)
    return graph, arrays


def step(graph, arrays, operands, train=False, **request):
    """An operation, and the gradients of its operands where they are asked for."""
    given = [arrays[name].requires_grad_(train) for name in operands]
    output = run(graph, given, operands, **request)
    if not train:
        return [output]
    upstream = arrays["grad"][:, : output.shape[1]]
    return [output.detach(), *torch.autograd.grad(output, given, upstream)]


def run(graph, given, operands, operation, relu, reduce):
    """One DGL operation: [N, F], or [E, F] without a reduction."""
    left, right = (None, *given) if operation == "copy_rhs" else (*given, None)[:2]
    if reduce and operands in FUSED and operation != "dot" and not relu:
        return dgl.ops.gspmm(graph, operation, reduce, left, right)
    messages = dgl.ops.gsddmm(graph, operation, left, right, *(*operands, "v")[:2])
    messages = messages.relu_() if relu else messages
    return dgl.ops.gspmm(graph, "copy_rhs", reduce, None, messages) if reduce else messages


if __name__ == "__main__":
    main()
