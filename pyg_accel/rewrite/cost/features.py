"""What a cost model knows of a graph."""

from dataclasses import dataclass

__all__ = ["GraphFeatures"]


@dataclass(frozen=True, slots=True)
class GraphFeatures:
    """Facts of a sparse matrix that decide how long its kernels take.

    Attributes:
        num_rows: target nodes.
        num_cols: source nodes.
        num_entries: edges.
    """

    num_rows: int
    num_cols: int
    num_entries: int
