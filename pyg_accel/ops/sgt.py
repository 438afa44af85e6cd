"""Sparse graph translation of a graph, to inspect its tiles and for custom kernels."""

from pyg_accel.graph import Graph, check_graph
from pyg_accel.graph.tiles import Tiles, tiles_of
from pyg_accel.runtime.checks import whole

__all__ = ["sgt"]


def sgt(graph: Graph, *, window: int = 16, tile: int = 8) -> Tiles:
    """Condense the columns of each window of rows into few tiles (TC-GNN, section 4.1).

    Linear in edges; stored for as long as the graph lives. The Tensor-Core kernels translate by
    themselves, to taller windows; this is for looking at a graph's tiles, and for kernels of one's
    own. Bit masks of the tiles are ``tiles.masks``.

    Args:
        graph: the graph.
        window: rows of a tile.
        tile: columns of a tile; the paper's are 16 x 8.

    Returns:
        The tiles, with their columns, entries and counts.

    Raises:
        ValueError: for sizes below 1 or above 32768 places a tile.
    """
    check_graph(graph)
    return tiles_of(graph.csr(), whole("window", window), whole("tile", tile))
