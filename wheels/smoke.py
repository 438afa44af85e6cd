"""Whether an installed pyg_accel works: python wheels/smoke.py, in an environment that has it.

Prints a line for each part; the first that fails ends it with a traceback.
"""

import copy
import io
import platform
import re
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch
import torch_geometric
from torch_geometric.nn import GCN, GIN, GATConv, GraphSAGE

import pyg_accel
from pyg_accel.doctor import examine
from pyg_accel.runtime import native

NODES, EDGES, WIDTH = 2_000, 100_000, 32


def check_library() -> str:
    """Every instruction set that this processor has must be there."""
    assert native.cpu_unavailable_reasons() == []
    facts = dict(part.split("=") for part in native.cpu_library().info().split(";"))
    found = set(facts["supported"].split(","))
    if platform.machine() == "x86_64":
        has = set(Path("/proc/cpuinfo").read_text().split())
        wanted = {"avx2": "avx2 fma f16c", "avx512": "avx512f avx512bw avx512dq avx512vl"}
        expected = {isa for isa, needs in wanted.items() if has.issuperset(needs.split())}
        assert found == {"portable"} | expected, found
    return facts["isa"]


def check_backends() -> str:
    """Each has to work, or to say what it lacks."""
    found = {finding.name: finding.reasons for finding in examine()}
    assert found["cpu"] == [], found
    for name, reasons in found.items():
        assert all(reasons), name
        assert not any("ended" in reason or "signal" in reason for reason in reasons), found
    return ", ".join(sorted(name for name, reasons in found.items() if not reasons))


def outcome(model: torch.nn.Module, x: torch.Tensor, edges: torch.Tensor) -> list[torch.Tensor]:
    """Return what a model computes, and its gradients."""
    model.zero_grad()
    out = model(x, edges)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_patch(x: torch.Tensor, edges: torch.Tensor) -> str:
    """Accelerated layers agree with PyG's, and run on our kernels."""
    models = {
        "GCN": GCN(WIDTH, WIDTH, 2),
        "GraphSAGE": GraphSAGE(WIDTH, WIDTH, 2),
        "GIN": GIN(WIDTH, WIDTH, 2),
        "GAT": GATConv(WIDTH, 8, heads=4),
    }
    for model in models.values():
        stock = outcome(model, x, edges)
        with pyg_accel.patched():
            ours = outcome(model, x, edges)
        for a, b in zip(stock, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    report = str(pyg_accel.report(io.StringIO()))
    assert re.search(r"\b(\d+) of \1 forward calls accelerated", report), report
    return ", ".join(models)


def check_compile(x: torch.Tensor, edges: torch.Tensor) -> str:
    """Compiled models run on our kernels, and agree with PyG's; without a compiler, as graphs."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    backend = "inductor" if shutil.which("g++") and header.exists() else "aot_eager"
    models = {"GCN": GCN(WIDTH, WIDTH, 2), "GraphSAGE": GraphSAGE(WIDTH, WIDTH, 2)}
    pyg_accel.reset_report()
    for model in models.values():
        stock = outcome(model, x, edges)
        with pyg_accel.patched():
            compiled = torch.compile(model, dynamic=True, backend=backend)
            ours = outcome(compiled, x, edges)
        for a, b in zip(stock, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    report = pyg_accel.report(io.StringIO())
    assert {row.backend for row in report.rows} == {"torch.compile"}, str(report)
    return f"{', '.join(models)} ({backend})"


def check_maxk(x: torch.Tensor, edges: torch.Tensor) -> str:
    """A model with MaxK trains."""
    model = pyg_accel.to_maxk(GraphSAGE(WIDTH, WIDTH, 2), k=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x, edges) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}"


def check_optimize(x: torch.Tensor, edges: torch.Tensor) -> str:
    """A rewritten model agrees with the model."""
    model = GCN(WIDTH, 16, 2)
    fast = pyg_accel.optimize(copy.deepcopy(model).eval(), x, edges)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, edges), model.eval()(x, edges), rtol=1e-3, atol=1e-4)
    return type(fast).__name__


def main() -> None:
    """Run all checks."""
    warnings.simplefilter("error", category=FutureWarning)
    torch.manual_seed(0)
    x, edges = torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES))
    print(f"Python {platform.python_version()}, torch {torch.__version__}, "
          f"PyG {torch_geometric.__version__}, {Path(pyg_accel.__file__).parent}")  # fmt: skip
    print("library: ", check_library())
    print("backends:", check_backends())
    print("patch:   ", check_patch(x, edges))
    print("compile: ", check_compile(x, edges))
    print("MaxK:    ", check_maxk(x, edges))
    print("optimize:", check_optimize(x, edges))


if __name__ == "__main__":
    main()
