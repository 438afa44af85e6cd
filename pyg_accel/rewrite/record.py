"""What was recorded of a layer's code, with names that do not depend on the call."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyg_accel.rewrite.algebra import Algebra, Call, Value
from pyg_accel.rewrite.features import Entry, Features
from pyg_accel.rewrite.ir import Attend, Broadcast, Expr, Leaf, Map, Product, Sum, leaves_of

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
        return Algebra(self.expr, values, parts.maps, constants=constants,
                       sizes=self.sizes | parts.sizes, facts=parts.facts, sampled=parts.sampled,
                       **more)  # fmt: skip


def record_of(made: Features, expr: Expr) -> Record:
    """Return an expression of a run with names in the order in which the code met its leaves."""
    used = set(leaves_of(expr))
    shared = {leaf: value for name, value in made.parts.values.items()
              for leaf in used if leaf.name == name}  # fmt: skip
    entries = [Entry(leaf, (), value) for leaf, value in shared.items()]
    entries += [entry for entry in made.entries.values() if entry.leaf in used]
    symbols = {"N": "N", "M": "M", "1": "1"}
    fresh = iter(_SIZES)

    def symbol(name: str, wanted: str) -> None:
        name = made.root(name)
        if name not in symbols:
            taken = wanted in symbols.values()
            symbols[name] = next(fresh, f"w{len(symbols)}") if not wanted or taken else wanted

    for letter, base in (("F", "X"), ("F", "Z"), ("G", "Y")):
        for entry in entries:
            if entry.leaf.name[0] == base:
                symbol(entry.leaf.cols, letter)
    symbol(expr.cols, "H")
    numbered = sum(entry.leaf.name.startswith("W#") for entry in entries) > 2
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for leaf in (entry.leaf for entry in entries):
        for side in (leaf.rows, leaf.cols):
            symbol(side, "")
        base = leaf.name.partition("#")[0]
        number, counts[base] = counts[base], counts[base] + 1
        if base == "W":
            names[leaf.name] = f"W{number}" if numbered else "WV"[number]
        else:
            names[leaf.name] = f"{base}{number or ''}"

    def renamed(leaf: Leaf) -> Leaf:
        rows, cols = (symbols[made.root(side)] for side in (leaf.rows, leaf.cols))
        mean_of = names.get(leaf.mean_of, leaf.mean_of)
        return replace(leaf, name=names[leaf.name], rows=rows, cols=cols, mean_of=mean_of)

    sizes = {symbols[made.root(s)]: n for s, n in made.widths.items() if made.root(s) in symbols}
    by_name = {names[e.leaf.name]: e._replace(leaf=renamed(e.leaf)) for e in entries}
    return Record(_mapped(expr, renamed), by_name, sizes)


def _mapped(expr: Expr, change: Callable[[Leaf], Leaf]) -> Expr:
    """Return an expression with other leaves."""
    match expr:
        case Leaf():
            return change(expr)
        case Product(factors=parts):
            return Product(tuple(_mapped(p, change) for p in parts))
        case Sum(terms=parts):
            return Sum(tuple(_mapped(p, change) for p in parts))
        case Broadcast(vector=vector, arg=arg):
            return Broadcast(change(vector), _mapped(arg, change))
        case Map(arg=arg):
            return replace(expr, arg=_mapped(arg, change))
        case Attend(matrix=matrix, args=args):
            return replace(
                expr, matrix=change(matrix), args=tuple(_mapped(a, change) for a in args)
            )
