"""Plans for people: as text, Markdown or a drawing."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from io import StringIO
from typing import Any, TextIO

import torch

from pyg_accel.rewrite.drawing import as_svg
from pyg_accel.rewrite.plans import LayerPlan, ModelPlan, TreePlan, plan

__all__ = ["FORMATS", "as_markdown", "as_text", "explain"]

HEAD = ("association", "primitives", "predicted", "verdict")


def explain(
    model: torch.nn.Module,
    *example_inputs: Any,
    train: bool = False,
    format: str = "text",
    file: TextIO | None = None,
    **options: Any,
) -> ModelPlan:
    """Print, for every layer, what it computes, every association, and what was chosen and why.

    Args:
        model: as for :func:`~pyg_accel.optimize`; or what that returned.
        example_inputs: arguments of a call.
        train: forward and backward together are to be fast.
        format: ``"text"``, ``"md"``, or ``"svg"``, a drawing of the trees.
        file: where to print; standard output by default.
        options: the other arguments of ``optimize``.

    Returns:
        The same as data.

    Raises:
        ValueError: for an unknown format, and what ``optimize`` raises.
    """
    if format not in FORMATS:
        raise ValueError(f"expected 'format' of {', '.join(FORMATS)} (got {format!r})")
    found = plan(model, *example_inputs, train=train, **options)
    print(FORMATS[format](found), file=file or sys.stdout)
    return found


def as_text(found: ModelPlan) -> str:
    """Return a plan as text; tables by ``rich`` if it is installed."""
    lines = [_title(found)]
    for layer in found.layers:
        lines += ["", f"{layer.path or 'the layer'}: {layer.layer}", *_facts(layer)]
        if layer.trees:
            rows = [_row(tree) for tree in layer.trees]
            lines.append(_rich_table(rows) if find_spec("rich") else _plain_table(rows))
    return "\n".join([*lines, *_unread(found)])


def as_markdown(found: ModelPlan) -> str:
    """Return a plan as Markdown."""
    lines = [f"# {_title(found)}"]
    for layer in found.layers:
        lines += ["", f"## `{layer.path or 'the layer'}`: {layer.layer}", ""]
        lines += [f"- {fact}" for fact in _facts(layer)]
        if layer.trees:
            lines += ["", "| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
            for tree, *others in map(_row, layer.trees):
                lines.append(f"| `{tree}` | " + " | ".join(others) + " |")
    return "\n".join([*lines, *_unread(found)])


FORMATS = {"text": as_text, "md": as_markdown, "svg": as_svg}


def _title(found: ModelPlan) -> str:
    what = "training" if found.train else "inference"
    lifted = sum(bool(layer.trees) for layer in found.layers)
    return f"{found.model}: {lifted} of {len(found.layers)} layers rewritten for {what}"


def _facts(layer: LayerPlan) -> Iterator[str]:
    if layer.algebra:
        sizes = ", ".join(f"{k} = {v:,}" for k, v in layer.sizes.items())
        yield f"{layer.algebra}   with {sizes}"
        promoted = sum(not t.verdict.startswith("pruned") for t in layer.trees)
        pruned = len(layer.trees) - promoted
        source = f", {layer.source}" if layer.source else ""
        yield f"{len(layer.trees)} associations, {pruned} pruned; decided by {layer.by}{source}"
    for reason in layer.reasons:
        yield f"left as it is: {reason}"


def _unread(found: ModelPlan) -> Iterator[str]:
    for path, reason in found.unread.items():
        yield f"The code of {path or 'the model'} runs as it is, on rewritten layers: {reason}"


def _row(tree: TreePlan) -> tuple[str, ...]:
    parts = ["; ".join(_counted(tree.forward))]
    if tree.backward:
        parts.append("backward: " + "; ".join(_counted(tree.backward)))
    if tree.once:
        parts.append("once a graph: " + "; ".join(_counted(tree.once)))
    if tree.bytes_kept:
        parts.append(f"keeps {tree.bytes_kept / 2**20:,.1f} MiB")
    time = "" if tree.seconds is None else f"{1e3 * tree.seconds:.3f} ms"
    return (("▶ " if tree.chosen else "") + tree.tree, " · ".join(parts), time, tree.verdict)


def _counted(works: tuple[str, ...]) -> Iterator[str]:
    for work in dict.fromkeys(works):
        times = works.count(work)
        yield work if times == 1 else f"{times} x {work}"


def _rich_table(rows: list[tuple[str, ...]]) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEAD, box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*(text.replace("[", r"\[") for text in row))
    console = Console(file=StringIO(), width=160, color_system=None)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _plain_table(rows: list[tuple[str, ...]]) -> str:
    table = [HEAD, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
