"""Which primitives of DGL the seven applications of its paper call, read from what runs.

    python -m benchmarks.papers.dgl_x86.primitives [--out FOLDER]

One training step of each program of `examples/applications`, on a small instance under `patch()`
with the setting that accelerates every size. `report()` gives the formulas of its layers, and a
formula is taken apart into what DGL would call for it: `u_mul_e_add_v` multiplies values of sources
and edges and adds the products up over targets, `u_add_v_copy_e` leaves sums of both ends on the
edges. Calls are those of the forward pass.
"""

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

import pyg_accel
from benchmarks.epochs.applications import program
from benchmarks.papers import tables
from benchmarks.tools import results, tasks
from benchmarks.tools.variants import report
from pyg_accel.settings import settings

NAME = "papers/dgl_x86/primitives"
REDUCES = {"sum": "add", "prod": "mul"}  # other names are the same
COMMUTES = ("add", "mul", "dot")
ORDER = "uve"  # of the operands of these
# A softmax over the edges of a target: scores less their maximum, and after exp, which is of one
# tensor and no primitive, divided by their sum.
SOFTMAX = ("e_copy_max_v", "e_sub_v_copy_e", "e_copy_add_v", "e_div_v_copy_e")


class Application(NamedTuple):
    """A program on a small instance.

    Attributes:
        name: as the paper calls it.
        program: of `examples/applications`.
        data: as `tasks.load` knows it.
        paper: how many primitives its table 2 lists.
        size: of a batch of sampled neighbours.
    """

    name: str
    program: str
    data: str
    paper: int
    size: int | None = None


APPLICATIONS = (
    Application("GCN", "gcn", "pubmed-like@0.02", 1),
    Application("GCN, sampled", "gcn", "pubmed-like@0.02", 1, size=32),
    Application("GraphSAGE", "graphsage", "products-like@0.0001", 1),
    Application("GraphSAGE, sampled", "graphsage", "products-like@0.0001", 1, size=32),
    Application("GC-MC", "gcmc", "ml-1m-like@0.01", 2),
    Application("LGNN", "lgnn", "block-models@0.01", 1),
    Application("MoNet", "monet", "pubmed-like@0.02", 1),
    Application("GAT", "gat", "molecules-like@0.01", 7),
    Application("R-GCN", "rgcn", "bgs-like@0.002", 1),
)


def primitives(text: str) -> list[str]:
    """What a formula of `report()` is made of, by DGL's names, each once.

    Args:
        text: such as `sum_j mul(softmax_j(add(u0,v1)),u2)` or, without a reduction, `add(u0,v1)`;
            several with semicolons between.

    Raises:
        ValueError: for what is not of this language.
    """
    found: list[str] = []
    for part in text.split("; "):
        reduces, marked, formula = part.rpartition("_j ")
        node = ast.parse(formula.partition(", ")[0], mode="eval").body  # `u0, 206 relations`
        if marked:
            message = _message(node, found)
            found += [f"{message}_{REDUCES.get(name, name)}_v" for name in reduces.split("+")]
        elif (side := _side(node, found)) != "e":
            found.append(f"{side}_copy_e")
    return list(dict.fromkeys(found))


def _message(node: ast.expr, found: list[str]) -> str:
    """What travels, such as `u_mul_e` or `u_copy`; what is computed before joins those found."""
    if not _is_call(node, 2):
        return f"{_side(node, found)}_copy"
    sides = [_side(part, found) for part in node.args]
    named = [side for side in sides if side]
    if len(set(named)) < 2:
        return f"{named[0]}_copy"
    return f"_{node.func.id}_".join(_ordered(node.func.id, named))


def _side(node: ast.expr, found: list[str]) -> str:
    """Where a value is: `u`, `v` or `e`; empty for a number. What it takes joins those found."""
    if isinstance(node, ast.Constant):
        return ""
    if isinstance(node, ast.Name) and node.id[0] in ORDER and node.id[1:].isdigit():
        return node.id[0]
    if _is_call(node, 1) and node.func.id == "softmax_j":
        if _side(node.args[0], found) != "e":
            raise ValueError(f"no scores of edges: {ast.unparse(node)}")
        found += SOFTMAX
        return "e"
    if _is_call(node, 1) and node.func.id == "sum":  # of a product
        (product,) = node.args
        sides = [_side(part, found) for part in product.args] if _is_call(product, 2) else []
        if len(set(sides)) < 2 or product.func.id != "mul":
            raise ValueError(f"no dot product: {ast.unparse(node)}")
        found.append("_dot_".join(_ordered("dot", sides)) + "_copy_e")
        return "e"
    if _is_call(node, 1):
        return _side(node.args[0], found)
    if _is_call(node, 2):
        message = _message(node, found)
        if message.endswith("_copy"):
            return message[0]
        found.append(f"{message}_copy_e")
        return "e"
    raise ValueError(f"not a formula: {ast.unparse(node)}")


def _is_call(node: ast.expr, arguments: int) -> TypeGuard[Any]:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and len(node.args) == arguments
    )


def _ordered(op: str, sides: list[str]) -> list[str]:
    """DGL's order of the operands where both say the same."""
    return sorted(sides, key=ORDER.index) if op in COMMUTES else sides


def step(application: Application) -> None:
    """Train a program for one step."""
    made, data = program(application.program), tasks.load(application.data)
    model = made.build(data)
    if application.size:  # as GraphSAGE's program draws neighbours, for either
        batch = next(iter(program("graphsage").batches(data, application.size)))
    else:
        batch = next(iter(made.batches(data, None))) if hasattr(made, "batches") else data
    made.train(model, torch.optim.Adam(model.parameters()), batch)


def rows_of(application: Application) -> Iterator[dict[str, Any]]:
    """A row a layer and formula; `patch()` is on, for every size."""
    torch.manual_seed(0)
    pyg_accel.reset_report()
    step(application)
    for row in sorted((r for r in report() if r.is_forward), key=lambda r: r.formula):
        if not row.formula:
            raise AssertionError(f"{application.name}: {row.layer} was left to PyG, {row.reason}")
        yield {"application": application.name, "data": application.data, "layer": row.layer,
               "formula": row.formula, "calls": row.calls,
               "primitives": " ".join(primitives(row.formula)),
               "paper": application.paper}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = results.parser(__doc__).parse_args(arguments)
    rows = results.Rows(NAME, options)
    settings.always = True
    try:
        with pyg_accel.patched():
            rows.add(row for application in APPLICATIONS for row in rows_of(application))
    finally:
        settings.always = None
    print("\n".join(tables.primitives(rows.done())))


if __name__ == "__main__":
    main()
