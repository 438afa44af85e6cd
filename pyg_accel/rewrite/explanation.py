"""Plans for people: as text, Markdown or a graph to draw."""

import sys
from collections.abc import Callable
from itertools import count
from json import dumps as quoted
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

import torch

from pyg_accel.rewrite.plans import HEAD, ModelPlan, facts, legend, plan, row, title
from pyg_accel.rewrite.tree import Node, Tree

__all__ = ["FORMATS", "explain"]

MOST = 4  # trees of a layer that are drawn: the chosen one and the best of the others
COLOURS = {"chosen": "#1a7f37", "candidate": "#0969da", "pruned": "#8c959f"}


def explain(
    model: torch.nn.Module,
    *example_inputs: Any,
    train: bool = False,
    format: str | None = None,
    file: TextIO | str | PathLike[str] | None = None,
    **options: Any,
) -> ModelPlan:
    """Print the expression of every layer, its associations, and the choice with its reason.

    Args:
        model: as for :func:`~pyg_accel.optimize`, or its result.
        example_inputs: arguments of a call.
        train: optimize the forward and backward pass together.
        format: ``"text"``, ``"md"``, or ``"dot"``, the best trees for Graphviz to draw; by default
            the suffix of the file, or text.
        file: where to print, or the name of a file to write; standard output by default.
        options: the other arguments of ``optimize``; ``price_all`` is True by default here.

    Returns:
        The plan that was printed.

    Raises:
        ValueError: for an unknown format, and as ``optimize`` does.
    """
    path = Path(file) if isinstance(file, (str, PathLike)) else None
    if format is None:
        ending = path.suffix.removeprefix(".") if path else ""
        format = ending if ending in FORMATS else "text"
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"expected 'format' of {', '.join(FORMATS)} (got {format!r})")
    if path is None and file is not None and not callable(getattr(file, "write", None)):
        raise ValueError(f"expected 'file' to be a name or an open file (got {file!r})")
    model_plan = plan(model, *example_inputs, train=train, **options)
    text = FORMATS[format](model_plan)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    else:
        print(text, file=file or sys.stdout)  # type: ignore[arg-type]
    return model_plan


def as_markdown(model_plan: ModelPlan) -> str:
    """Return a plan as Markdown."""
    lines = [f"# {title(model_plan)}"]
    for layer in model_plan.layers:
        lines += ["", f"## `{layer.path or 'the layer'}`: {layer.layer}", ""]
        lines += [f"- {fact}" for fact in (*facts(layer), *legend(layer))]
        if layer.trees:
            lines += ["", "| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
            for tree, *others in map(row, layer.trees):
                lines.append(f"| `{tree}` | " + " | ".join(others) + " |")
    return "\n".join(lines)


def as_dot(model_plan: ModelPlan) -> str:
    """Return a plan in Graphviz's DOT language; equal parts of a tree are one node."""
    numbers = count()
    lines = [f"digraph {{ label={quoted(title(model_plan))}; node [shape=plaintext];"]
    for layer in model_plan.layers:
        what = f" = {layer.algebra}" if layer.algebra else f": {'; '.join(layer.reasons)}"
        more = len(layer.trees) - MOST
        omitted = f" (and {more} more, which format='md' lists)" if more > 0 else ""
        label = quoted(f"{layer.path or 'the layer'}: {layer.layer}{what}{omitted}")
        lines.append(f"subgraph cluster_{next(numbers)} {{ label={label};")
        for tree in layer.trees[:MOST]:
            verdict = "chosen" if tree.chosen else tree.verdict.partition(":")[0]
            time = "" if tree.seconds is None else f"{1e3 * tree.seconds:.3g} ms"
            label = quoted(", ".join(filter(None, (verdict, tree.composition, time))))
            colour = COLOURS[verdict.split()[0]]
            lines.append(f"subgraph cluster_{next(numbers)} {{ label={label}; "
                         f'color="{colour}"; edge [dir=none, color="{colour}"];')  # fmt: skip
            _draw(tree.root, numbers, {}, lines)
            lines.append("}")
        lines.append("}")
    return "\n".join([*lines, "}"])


def _draw(tree: Tree, numbers: "count[int]", drawn: dict[Tree, int], lines: list[str]) -> int:
    """Append the nodes and edges of a tree; return the number of its root."""
    if tree in drawn:
        return drawn[tree]
    number, name, args = next(numbers), str(tree), tuple[Tree, ...]()
    if isinstance(tree, Node):
        drawn[tree], args, name = number, tree.args, tree.name or "mean " * tree.mean + tree.op
    lines.append(f"n{number} [label={quoted(name)}];")
    parts = [_draw(arg, numbers, drawn, lines) for arg in args]
    lines += [f"n{number} -> n{part};" for part in parts]
    return number


FORMATS: dict[str, Callable[[ModelPlan], str]] = {"text": str, "md": as_markdown, "dot": as_dot}
