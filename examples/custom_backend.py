"""A backend of your own: what it says decides when it runs.

    python examples/custom_backend.py

This one adds up with `torch.segment_reduce`, and only where that is what was asked for: a plain sum
in float32 or float64. It gives a reason for other calls of that operator, and has no kernel for
other operators: those run on other backends.
"""

import pyg_accel
import torch
from pyg_accel.backends import Backend, Kernel, OpSpec, choose
from pyg_accel.formula import Formula
from pyg_accel.graph import CSR
from torch import Tensor


def reasons(spec: OpSpec) -> list[str]:
    """Why a call cannot be run; empty if it can."""
    found = []
    if (spec.formula, spec.reduces) != ("u0", ("sum",)):
        found.append("only a plain sum of source features")
    if spec.dtype not in (torch.float32, torch.float64):
        found.append(f"features are {spec.dtype}")
    return found


def cost(spec: OpSpec) -> float:
    """Seconds; zero makes it first choice, an honest estimate would compete."""
    return 0.0


def plain_sum(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    (x,) = operands  # [num_cols, H, F]
    messages = x.index_select(0, csr.col)  # [E, H, F]
    degree = (csr.rowptr[1:] - csr.rowptr[:-1]).long()
    return [torch.segment_reduce(messages, "sum", lengths=degree, initial=0)]


SEGMENTS = Backend("segments", {"gspmm": Kernel(plain_sum, cost, reasons)})


def main() -> None:
    torch.manual_seed(0)
    pyg_accel.register_backend(SEGMENTS)
    graph = pyg_accel.Graph.from_edge_index(torch.randint(1000, (2, 20_000)))
    x = torch.randn(1000, 16, requires_grad=True)

    facts = ("cpu", torch.float32, 1000, 1000, 20_000, 1, 16)
    for reduce in ("sum", "max"):
        print(choose(OpSpec("gspmm", *facts, formula="u0", reduces=(reduce,))), "\n")

    ours = pyg_accel.ops.spmm(graph, x)
    ours.sum().backward()  # the gradient is another plain sum, on the transposed graph
    with pyg_accel.use_backend("reference"):
        expected = pyg_accel.ops.spmm(graph, x)
    worst = (ours - expected).detach().abs().max()
    print(f"largest difference from the reference: {worst:.1e}\n")

    try:
        with pyg_accel.use_backend("segments"):
            pyg_accel.ops.spmm(graph, x, reduce="max")
    except pyg_accel.BackendNotSupported as error:
        print(f"asked for by name, it raises: {error}")


if __name__ == "__main__":
    main()
