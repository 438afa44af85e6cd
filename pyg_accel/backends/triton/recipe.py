"""The inputs of the text of a generated kernel, as data."""

from dataclasses import dataclass

from pyg_accel.backends.edges import Output
from pyg_accel.backends.triton.launch import Tile
from pyg_accel.formula import Formula, shape_of

__all__ = ["SIZES", "EdgeRecipe", "Recipe", "RowRecipe", "State"]

# (heads, width) of a kind of operand or output, 2 for more than one.
SIZES = {"full": (2, 2), "head": (2, 1), "feature": (1, 2), "number": (1, 1)}
_STATES = {"sum": "total", "mean": "total", "sqsum": "squares", "prod": "product", "max": "most",
           "min": "least"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Parameters of all kernels: blocks of edges by ``heads`` by ``columns``.

    Attributes:
        outputs: outputs of a kernel, as formulas of its operands 0, 1, ...
        stored: the shape of each output, like ``kinds``.
        kinds: of each operand: ``full``, ``head`` [rows, H, 1], ``feature`` [rows, 1, F] or
            ``number`` [rows, 1, 1].
        aligned: of each operand: row strides are counted in units of so many elements; 0 means a
            stride of one element.
        near: of each operand: offsets fit 32 bits.
        heads: of a program.
        columns: of a program, in each head.
        blocks: programs that share the heads.
        slices: programs that share the width.
        unit: the width is counted in units of so many elements.
        even_heads: the last program has all its heads.
        even_width: the last program has all its columns.
        accumulate: dtype of sums.
    """

    outputs: tuple[Output, ...]
    stored: tuple[str, ...]
    kinds: tuple[str, ...]
    aligned: tuple[int, ...]
    near: tuple[bool, ...]
    heads: int
    columns: int
    blocks: int
    slices: int
    unit: int
    even_heads: bool
    even_width: bool
    accumulate: str

    def size_of(self, formula: Formula) -> tuple[int, int]:
        """(heads, width) of the value of a formula, 2 for more than one."""
        return shape_of(formula, {i: SIZES[kind] for i, kind in enumerate(self.kinds)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRecipe(Recipe):
    """Parameters of a kernel over an edge list.

    Attributes:
        ordered: of each operand: ``max`` or ``min`` for bits from a pass with this reduction.
        lanes: edges of a program side by side.
        unroll: neighbouring edges of each lane.
        loops: each node has one self-loop, which replaces all in the edge list.
        traps: invalid ids of nodes are an error on the device.
    """

    ordered: tuple[str, ...]
    lanes: int
    unroll: int
    loops: bool = False
    traps: bool = False

    def is_atomic(self, k: int) -> bool:
        """Whether several edges or programs add to one element of an output, initially 0."""
        if self.outputs[k].side != "e":
            return True
        heads, width = SIZES[self.stored[k]]
        own_heads, own_width = self.size_of(self.outputs[k].formula)
        return (heads < own_heads and self.blocks > 1) or (width < own_width and self.slices > 1)


@dataclass(frozen=True, slots=True)
class State:
    """A running value of a program over rows, while it reads the entries.

    Attributes:
        name: of the variable.
        kind: of reduction, with ``_at`` for positions of winners; of softmax ``top``, the largest
            score, ``norm``, the sum of exponentials, and ``share``, the weighted sum.
        shape: like an output.
        formula: of its messages.
    """

    name: str
    kind: str
    shape: str
    formula: Formula | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecipe(Recipe):
    """Parameters of a kernel over the rows of a CSR matrix.

    Attributes:
        score: outputs are weighted by its softmax; None for no weights.
        winners: positions (``at``), source ids (``col``) or none (``""``) of maxima and minima.
        infinite: operand that reads as infinity for absent entries, so that the formula of their
            message is 0; or -1.
        adds: sums over the width are added to results of earlier launches, a slice each.
        tile: rows, lanes and unroll of a program.
        tasks: ``rows``, ``order`` (rows in another order) or ``pieces`` (of long rows, with partial
            results).
        hubs: rows above the limit are skipped; pieces cover them.
        numbered: entries have edge numbers (``eid``).
        position: dtype of positions in ``col``.
    """

    score: Formula | None
    winners: str
    infinite: int
    adds: bool
    tile: Tile
    tasks: str = "rows"
    hubs: bool = False
    numbered: bool
    position: str

    @property
    def states(self) -> tuple[State, ...]:
        """The states of a program for each row; a sum and a mean share one."""
        states: dict[object, State] = {}
        for k, output in enumerate(self.outputs):
            kind = "share" if self.score is not None else _STATES[output.reduce]
            key = output.formula, kind
            if output.side == "e" or key in states:
                continue
            states[key] = State(f"{kind}{k}", kind, self.stored[k], output.formula)
            if self.winners and kind in ("most", "least"):
                states[key, "at"] = State(f"{kind}{k}_at", f"{kind}_at", self.stored[k])
        if self.score is not None:
            states |= {kind: State(kind, kind, "head") for kind in ("top", "norm")}
        return tuple(states.values())

    def state_of(self, k: int) -> State:
        """Return the state of an output of rows."""
        kind = "share" if self.score is not None else _STATES[self.outputs[k].reduce]
        formula = self.outputs[k].formula
        return next(s for s in self.states if s.kind == kind and s.formula == formula)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results of a kernel over whole rows."""
        names = [f"out{k}" for k, output in enumerate(self.outputs) if output.side != "e"]
        if self.score is not None:
            names += ["largest", "inverse"]
        if self.winners:
            names += [f"winner{k}" for k, output in enumerate(self.outputs)
                      if output.reduce in ("max", "min")]  # fmt: skip
        return tuple(names)
