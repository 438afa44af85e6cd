"""Names of leaves and sizes that do not depend on the call that was recorded."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from pyg_accel.rewrite.ir import Attend, Expr, Leaf, Map, Sum, leaves_of, map_children

__all__ = ["named"]

_SIZES = "KLPQ"


def named(
    expr: Expr, order: Sequence[Leaf], root: Callable[[str], str]
) -> tuple[Expr, dict[str, str], dict[str, str]]:
    """Name the leaves of an expression by their order in the code.

    Args:
        expr: the expression.
        order: all leaves in order; their names are letters and a number: ``W#3``.
        root: returns the same symbol for symbols of equal sizes.

    Returns:
        The expression with other names; old names of its leaves by new name; new symbols of sizes
        by old symbol.
    """
    used = dict.fromkeys(leaves_of(expr))
    leaves = [leaf for leaf in order if leaf in used]
    symbols = {"N": "N", "M": "M", "1": "1", "k": "k"}
    fresh = iter(_SIZES)

    def name(symbol: str, wanted: str = "") -> None:
        if (symbol := root(symbol)) not in symbols:
            taken = not wanted or wanted in symbols.values()
            symbols[symbol] = next(fresh, f"w{len(symbols)}") if taken else wanted

    for letter, base in (("F", "X"), ("F", "Z"), ("G", "Y")):
        for leaf in leaves:
            if leaf.name[0] == base:
                name(leaf.cols, letter)
    name(_in_heads(expr).cols, "H")
    name(expr.cols, "O")
    weights = [leaf for leaf in leaves if leaf.name[0] == "W"]
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for leaf in leaves:
        name(leaf.rows)
        name(leaf.cols)
        base = leaf.name.partition("#")[0]
        number, counts[base] = counts[base], counts[base] + 1
        if base == "W":
            names[leaf.name] = f"W{number}" if len(weights) > 2 else "WV"[number]
        else:
            while (wanted := f"{base}{number or ''}") in names.values():
                number += 1
            names[leaf.name], counts[base] = wanted, number + 1

    def renamed(leaf: Leaf) -> Leaf:
        rows, cols = symbols[root(leaf.rows)], symbols[root(leaf.cols)]
        return replace(leaf, name=names[leaf.name], rows=rows, cols=cols)

    def mapped(expr: Expr) -> Expr:
        match map_children(expr, mapped):
            case Leaf() as leaf:
                return renamed(leaf)
            case Map(cols_out=cols) as result:
                return replace(result, cols_out=cols and symbols[root(cols)])
            case Attend(matrix=matrix) as result:
                return replace(result, matrix=renamed(matrix))
            case result:
                return result

    return mapped(expr), {new: old for old, new in names.items()}, symbols


def _in_heads(expr: Expr) -> Expr:
    """Return the argument of the map that joins heads, if the expression ends with one."""
    match expr:
        case Map(arg=arg, cols_out=cols):
            return arg if cols else _in_heads(arg)
        case Sum(terms=(first, *_)):
            return _in_heads(first)
    return expr
