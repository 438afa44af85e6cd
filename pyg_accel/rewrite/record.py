"""What was recorded of a layer's code, with names that do not depend on the call."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pyg_accel.rewrite.algebra import Algebra, Call, Value
from pyg_accel.rewrite.features import Entry, Features
from pyg_accel.rewrite.ir import Attend, Broadcast, Expr, Leaf, Map, Sum, leaves_of, map_children

__all__ = ["Record", "record_of"]

_SIZES = "KLPQ"


@dataclass(frozen=True)
class Record:
    """An expression.

    Attributes:
        expr: the expression.
        entries: where the values of its leaves come from, by name.
        sizes: of the symbols of columns.
    """

    expr: Expr
    entries: dict[str, Entry]
    sizes: dict[str, int]

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the values."""
        return self.expr, tuple(self.sizes.items())

    def algebra(
        self, made: Features, values: dict[str, Callable[[Call], Value]], **more: Any
    ) -> Algebra:
        """Return what a layer computes; ``values`` says how those of the leaves are found."""
        constants = tuple(name for name, e in self.entries.items() if e.leaf.name[0] == "e")
        parts = made.parts
        return Algebra(self.expr, values, parts.maps, parts.scores, constants=constants,
                       sizes=self.sizes | parts.sizes, calls=parts.calls, facts=parts.facts,
                       sampled=parts.sampled, **more)  # fmt: skip


def record_of(made: Features, expr: Expr) -> Record:
    """Return an expression of a run with names in the order in which the code met its leaves."""
    entries = {entry.leaf.name: entry for entry in made.entries.values()}
    leaves = tuple(entry.leaf for entry in entries.values())
    named, names, sizes = _named(expr, leaves, tuple(made.same.items()), tuple(made.widths.items()))
    values = made.parts.values
    found = {new: entries[old] if old in entries else Entry(leaf, (), values[old])
             for old, new, leaf in names}  # fmt: skip
    return Record(named, found, dict(sizes))


@lru_cache(maxsize=256)
def _named(
    expr: Expr,
    order: tuple[Leaf, ...],
    same: tuple[tuple[str, str], ...],
    widths: tuple[tuple[str, int], ...],
) -> tuple[Expr, tuple[tuple[str, str, Leaf], ...], tuple[tuple[str, int], ...]]:
    """Return an expression with other names, the old and new names, and the sizes of symbols."""
    known = dict(same)
    used = dict.fromkeys(leaves_of(expr))
    leaves = [leaf for leaf in used if leaf not in order]  # those of rules keep their names
    leaves += [leaf for leaf in order if leaf in used]
    symbols = {"N": "N", "M": "M", "1": "1"}
    fresh = iter(_SIZES)

    def root(symbol: str) -> str:
        return root(known[symbol]) if symbol in known else symbol

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
            names[leaf.name] = f"{base}{number or ''}"

    def renamed(leaf: Leaf) -> Leaf:
        rows, cols = symbols[root(leaf.rows)], symbols[root(leaf.cols)]
        mean_of = names.get(leaf.mean_of, leaf.mean_of)
        return replace(leaf, name=names[leaf.name], rows=rows, cols=cols, mean_of=mean_of)

    sizes = tuple((symbols[root(s)], n) for s, n in widths if root(s) in symbols)
    table = tuple((leaf.name, names[leaf.name], leaf) for leaf in leaves)

    def mapped(expr: Expr) -> Expr:
        match map_children(expr, mapped):
            case Leaf() as leaf:
                return renamed(leaf)
            case Broadcast(vector=vector) as found:
                return replace(found, vector=renamed(vector))
            case Map(cols_out=cols) as found:
                return replace(found, cols_out=cols and symbols[root(cols)])
            case Attend(matrix=matrix) as found:
                return replace(found, matrix=renamed(matrix))
            case found:
                return found

    return mapped(expr), table, sizes


def _in_heads(expr: Expr) -> Expr:
    """What heads are made one matrix of, in an expression that is."""
    match expr:
        case Map(arg=arg, cols_out=cols):
            return arg if cols else _in_heads(arg)
        case Sum(terms=(first, *_)):
            return _in_heads(first)
    return expr
