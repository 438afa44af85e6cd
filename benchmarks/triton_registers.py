"""What the compiler makes of the generated kernels, without a GPU: registers, spills, wide loads.

    python -m benchmarks.triton_registers [--sass FOLDER]

Compiles the kernels of typical calls for an H200 (sm_90) and prints, for each, registers a thread,
bytes spilled, and how many global loads are 16, 8 and 4 bytes wide in PTX.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.graphs import COMMUNITY_SHAPES

H200_L2 = 60 * 2**20
# formula, kinds of the operands, reductions, winners
CALLS = {
    "sum": ("u0", ("full",), ("sum",), ""),
    "weighted sum": ("mul(u0,e1)", ("full", "number"), ("sum",), ""),
    "max": ("u0", ("full",), ("max",), ""),
    "max with winners": ("u0", ("full",), ("max",), "col"),
    "mean max min std": ("u0", ("full",), ("mean", "max", "min", "sqsum"), ""),
    "edge features": ("relu(add(u0,e1))", ("full", "full"), ("sum",), ""),
    "gated": ("mul(sigmoid(add(v0,u1)),u2)", ("full",) * 3, ("sum",), ""),
    "winner gradient": ("sel(u0,u1)", ("full", "full"), ("sum",), ""),
    "dot": ("mul(u0,v1)", ("full", "full"), ("none",), ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sass", type=Path, help="write PTX and SASS there")
    parser.add_argument("--only", default="", help="part of the name of a call")
    options = parser.parse_args()
    print(f"{'graph':16} {'F':>3} {'dtype':8} {'call':17} {'tile':22} regs spill  ld16/8/4")
    for graph in ("molecules-like", "arxiv-like", "reddit-like"):
        for features, dtype in ((64, "float32"), (256, "float32"), (100, "float32"),
                                (128, "bfloat16"), (7, "float32")):  # fmt: skip
            for name in CALLS:
                if options.only in name:
                    for line in describe(graph, features, dtype, name, options.sass):
                        print(line, flush=True)


def describe(
    graph: str, features: int, dtype: str, name: str, folder: Path | None
) -> Iterator[str]:
    """A line for each kernel of a call: that of the rows, that of pieces, their combination."""
    from dataclasses import replace

    import torch

    from pyg_accel.backends.triton.codegen import combine_kernel, kernel
    from pyg_accel.backends.triton.plan import GraphFacts, Seen, make_plan
    from pyg_accel.backends.triton.recipe import states_of
    from pyg_accel.formula import parse
    from pyg_accel.machine import Gpu

    text, kinds, reduces, winners = CALLS[name]
    shape = COMMUNITY_SHAPES[graph]
    widths = [features if kind == "full" else 1 for kind in kinds]
    operands = tuple(
        Seen((shape.num_nodes, 1, width), width, getattr(torch, dtype)) for width in widths
    )
    device = Gpu("NVIDIA H200", H200_L2, 132)
    graph_facts = GraphFacts(
        shape.num_nodes, shape.num_nodes, shape.num_entries, False, "sel" in text, device
    )
    plan = make_plan(parse(text), operands, reduces, winners, graph_facts, name == "dot")
    kernels = plan.kernels
    recipe = kernels.recipe
    versions = {"rows": (kernel, replace(recipe, tasks="order", hubs=True))}
    if graph == "arxiv-like":
        cut = replace(recipe, tasks="pieces", tile=kernels.piece_tile)
        versions["pieces"] = (kernel, cut)
        if states_of(reduces, winners):
            versions["combine"] = (combine_kernel, kernels.whole)
    for version, (make, each) in versions.items():
        label = f"{graph} {features} {dtype} {name} {version}"
        facts = compile_for_h200(make(each), each, dtype, folder, label)
        t = each.tile
        tile = f"{t.rows}x{t.lanes}x{t.columns} u{t.unroll} {version}"
        yield f"{graph:16} {features:3} {dtype:8} {name:17} {tile:22} {facts}"


def compile_for_h200(
    function: Any, recipe: Any, dtype: str, folder: Path | None, label: str
) -> str:
    """Compile one kernel; return its registers, spills and loads."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    features = {"float32": "*fp32", "bfloat16": "*bf16"}[dtype]
    signature, constants, attributes = {}, {}, {}
    from pyg_accel.backends.triton.expression import index_operands

    winners = {f"x{o.index}_ptr" for o in index_operands(recipe.formula)}
    for i, name in enumerate(function.arg_names):
        if not name.endswith("_ptr"):
            signature[name] = "i32"
            continue
        if name == "eid_ptr" and not recipe.numbered:
            signature[name], constants[(i,)] = "constexpr", None
            continue
        raw = recipe.tasks == "pieces" or "combine" in function.fn.__name__
        feature = name.startswith(("x", "out")) and name not in winners
        kept = name.startswith(("total", "most", "least", "squares")) and "_at" not in name
        signature[name] = "*fp32" if kept or (raw and name.startswith("out")) else (
            features if feature else "*i32")  # fmt: skip
        attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                            options={"num_warps": recipe.tile.warps, "num_stages": 1})  # fmt: skip
    ptx = binary.asm["ptx"]
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        cubin = Path(scratch) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        usage = subprocess.check_output([tools / "cuobjdump", "-res-usage", cubin], text=True)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            stem = re.sub(r"\W+", "_", label)
            (folder / f"{stem}.ptx").write_text(ptx)
            sass = subprocess.check_output([tools / "cuobjdump", "-sass", cubin], text=True)
            (folder / f"{stem}.sass").write_text(sass)
    registers = re.search(r"REG:(\d+)", usage)[1]
    stack = re.search(r"STACK:(\d+)", usage)[1]
    shared = re.search(r"SHARED:(\d+)", usage)[1]
    loads = [len(re.findall(rf"ld\.global\S*{kind}\b", ptx))
             for kind in (r"v4\.b32", r"v2\.b32", r"\.b32")]  # fmt: skip
    return f"{registers:>4} {stack:>5}  {'/'.join(map(str, loads))} shared {shared}"


if __name__ == "__main__":
    main()
