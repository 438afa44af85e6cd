"""Matrix IR: layers as products and sums of named matrices (paper, section 3.2).

Data only. An expression is a value: two equal ones are the same matrix, and are computed once. Row
broadcasts with vectors, such as normalisations, are products with diagonals, so that only
elementwise maps and attention separate the factors of a product.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard, get_args

__all__ = [
    "SPARSE",
    "Attend",
    "Expr",
    "Kind",
    "Leaf",
    "Map",
    "Product",
    "Sum",
    "children",
    "is_bias",
    "is_matrix",
    "is_ones",
    "leaves_of",
    "map_children",
    "product_of",
    "sum_of",
    "verify",
]

Kind = Literal["data", "weight", "bias", "sparse", "weighted", "diagonal"]
KINDS = get_args(Kind)
SPARSE = ("sparse", "weighted")


class _Operators:
    """``a @ b`` and ``a + b`` build expressions."""

    __slots__ = ()

    def __matmul__(self, other: "Expr") -> "Expr":
        return product_of((self, other))  # type: ignore[arg-type]

    def __add__(self, other: "Expr") -> "Expr":
        return sum_of((self, other))  # type: ignore[arg-type]


class _Compound(_Operators):
    """Has the rows and columns of its first part, unless its class says otherwise."""

    __slots__ = ()

    @property
    def rows(self) -> str:
        """Symbol of its number of rows."""
        return children(self)[0].rows  # type: ignore[arg-type]

    @property
    def cols(self) -> str:
        """Symbol of its number of columns."""
        return children(self)[0].cols  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Leaf(_Operators):
    """A matrix by name.

    Attributes:
        name: unique in an expression.
        rows: symbol of its number of rows: ``N`` targets, ``M`` sources, ``F`` input and ``H``
            output features (per head).
        cols: symbol of its number of columns.
        kind: dense ``data`` or ``weight``, a ``bias`` row that is added to every row, a matrix of
            edges without values (``sparse``) or with them (``weighted``), or a ``diagonal``.
        heads: attention heads, side by side in its columns.
        power: of a diagonal: its exponent.
        number: of a diagonal: whether it is a multiple of the identity.
        mean: of a matrix of edges: whether each row is divided by its number of entries, as the
            kernels for means do.
    """

    name: str
    rows: str
    cols: str
    kind: Kind
    heads: int = 1
    power: int = 1
    number: bool = False
    mean: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"expected a kind of {', '.join(KINDS)} (got '{self.kind}')")
        if self.kind == "diagonal" and self.rows != self.cols:
            raise ValueError(f"the diagonal {self.name} is {self.rows} x {self.cols}")

    def __str__(self) -> str:
        if self.mean:
            return f"mean({self.name})"
        return self.name + ("" if self.power == 1 else "²³"[self.power - 2] if self.power < 4
                            else f"^{self.power}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Product(_Compound):
    """Factors from left to right."""

    factors: "tuple[Expr, ...]"

    @property
    def cols(self) -> str:
        """The columns of the last factor."""
        return self.factors[-1].cols

    def __str__(self) -> str:
        return " ".join(f"({f})" if isinstance(f, Sum) else str(f) for f in self.factors)


@dataclass(frozen=True, slots=True)
class Sum(_Compound):
    """Terms of one shape."""

    terms: "tuple[Expr, ...]"

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


@dataclass(frozen=True, slots=True)
class Map(_Compound):
    """A function of rows or elements: no product can move past it.

    Attributes:
        name: of the function.
        arg: its argument.
        cols_out: symbol of its number of columns, if the function changes it.
        free: whether it is a view, and costs nothing.
        keeps: whether it sets all but ``k`` columns of each row to zero (MaxK).
    """

    name: str
    arg: "Expr"
    cols_out: str = ""
    free: bool = False
    keeps: bool = False

    @property
    def cols(self) -> str:
        """The columns of the argument, unless the function changes them."""
        return self.cols_out or self.arg.cols

    def __str__(self) -> str:
        return f"{self.name}({self.arg})"


@dataclass(frozen=True, slots=True)
class Attend(_Compound):
    """Scores of the edges of ``matrix`` from node features, softmax over every row.

    Attributes:
        name: of the function.
        matrix: the matrix of edges.
        args: dense features from which the scores are computed, e.g. ``(X W,)``.
        heads: scores per edge.
        folds: whether scores first multiply the args with vectors, so that ``(X W) a`` can be
            computed as ``X (W a)`` where nothing else reads ``X W``.
    """

    name: str
    matrix: Leaf
    args: "tuple[Expr, ...]"
    heads: int = 1
    folds: bool = False

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, (self.matrix, *self.args)))})"


Expr = Leaf | Product | Sum | Map | Attend


def children(expr: Expr) -> tuple[Expr, ...]:
    """Return the direct parts of an expression."""
    match expr:
        case Product(factors=parts) | Sum(terms=parts):
            return parts
        case Map(arg=arg):
            return (arg,)
        case Attend(matrix=matrix, args=args):
            return (matrix, *args)
    return ()


def map_children(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Return an expression with its direct parts changed, except the matrix of attention."""
    match expr:
        case Product(factors=parts):
            return product_of(map(change, parts))
        case Sum(terms=parts):
            return sum_of(map(change, parts))
        case Map(arg=arg):
            return replace(expr, arg=change(arg))
        case Attend(args=args):
            return replace(expr, args=tuple(map(change, args)))
    return expr


def product_of(factors: Iterable[Expr]) -> Expr:
    """Return a product without products in it; a single factor is itself."""
    flat = tuple(g for f in factors for g in (f.factors if isinstance(f, Product) else (f,)))
    return Product(flat) if len(flat) > 1 else flat[0]


def sum_of(terms: Iterable[Expr]) -> Expr:
    """Return a sum without sums in it; a single term is itself."""
    flat = tuple(u for t in terms for u in (t.terms if isinstance(t, Sum) else (t,)))
    return Sum(flat) if len(flat) > 1 else flat[0]


def leaves_of(expr: Expr) -> Iterator[Leaf]:
    """Yield every leaf from left to right, with repetitions."""
    if isinstance(expr, Leaf):
        yield expr
    for child in children(expr):
        yield from leaves_of(child)


def verify(expr: Expr) -> None:
    """Check that the sizes of an expression agree; run after every pass.

    Raises:
        ValueError: if they do not agree.
    """
    for child in children(expr):
        verify(child)
    if isinstance(expr, Product):
        for left, right in zip(expr.factors, expr.factors[1:], strict=False):
            if left.cols != right.rows:
                raise ValueError(
                    f"{left} ({left.rows} x {left.cols}) and {right} ({right.rows} x {right.cols}) "
                    f"do not multiply in {expr}"
                )
        if any(isinstance(f, Product) for f in expr.factors):
            raise ValueError(f"a product within the product {expr}")
    if isinstance(expr, Sum):
        shapes = {(t.rows, t.cols) for t in expr.terms if not is_bias(t)}
        if len(shapes) > 1 or any(t.cols != expr.cols for t in expr.terms):
            raise ValueError(f"terms of different sizes in {expr}")
        if any(isinstance(t, Sum) for t in expr.terms):
            raise ValueError(f"a sum within the sum {expr}")
    if isinstance(expr, Attend) and expr.matrix.kind not in SPARSE:
        raise ValueError(f"attention over {expr.matrix}, which is not sparse")


def is_matrix(expr: object) -> bool:
    """Whether an expression is a matrix of edges."""
    return isinstance(expr, Leaf) and expr.kind in SPARSE


def is_ones(expr: object) -> bool:
    """Whether an expression is a column of ones."""
    return isinstance(expr, Leaf) and expr.kind == "data" and expr.cols == "1"


def is_bias(expr: Expr) -> TypeGuard[Leaf]:
    """Whether an expression is a row that is added to every row."""
    return isinstance(expr, Leaf) and expr.kind == "bias"
