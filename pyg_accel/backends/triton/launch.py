"""Divides rows, edges and columns among programs: tiles, from a table of parameters.

A program holds a tile of ``rows * lanes`` edges by ``columns`` features. Each row has ``lanes``
parallel edges, unrolled ``unroll`` times; short rows share a program, a long row has one program or
several. Slices of columns are so narrow that the L2 cache holds the rows of X that all programs
read at a time.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pyg_accel.runtime.machine import Gpu

__all__ = [
    "Tile",
    "attention_tile",
    "choose_tile",
    "combine_tile",
    "degree_class",
    "piece_tile",
    "table",
]

TABLE = Path(__file__).with_name("launch.json")
WARP = 32
# Measured on an H200: the bandwidth of gathers relative to the memory, and to the L2 per
# multiprocessor and clock; the cost of a pass per row; and the part of the L2 that
# gathered features have to themselves.
HBM_PART, L2_BYTES_A_CLOCK, ROW_SECONDS, L2_PART = 0.875, 34.4, 4e-10, 0.8
# Of attention: columns of a program, and registers per thread for loads of the edges of a tile.
ATTENTION_COLUMNS, ATTENTION_REGISTERS = 256, 32
# Mean entries a row, upper ends: very short rows, short rows, long rows.
DEGREE_CLASSES = (("tiny", 8), ("short", 40), ("long", float("inf")))


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the work of a program.

    Attributes:
        rows: of the output.
        lanes: parallel edges of each row.
        columns: features.
        unroll: loads of an edge tile that are in flight together.
        split: rows longer than this are cut into pieces.
        piece: entries of a piece.
        warps: of a program.
    """

    rows: int
    lanes: int
    columns: int
    unroll: int
    split: int
    piece: int
    warps: int = 1


@lru_cache(maxsize=8)
def table(device: str) -> dict[str, dict[str, int]]:
    """Return the launch parameters of a device.

    They are from the shipped file; for other devices, of an H200.

    ``<degree class>-<bytes of an element>`` gives ``passes`` (16-byte loads a thread and edge
    tile), ``lanes`` (1 if absent), ``unroll``, ``split``, ``piece``, the most ``columns`` of a
    slice, and how many percent of the L2 the features may take that should stay ``resident``.
    """
    everything: dict[str, dict[str, dict[str, int]]] = json.loads(TABLE.read_text())["devices"]
    shipped = next((entry for name, entry in everything.items() if name in device), {})
    return {**everything["default"], **shipped}


def degree_class(mean: float) -> str:
    """Return the class of a mean number of entries a row."""
    return next(name for name, below in DEGREE_CLASSES if mean < below)


@lru_cache(maxsize=4096)
def choose_tile(
    device: Gpu,
    num_rows: int,
    num_cols: int,
    num_edges: int,
    columns: int,
    itemsize: int,
    gathers: int,
    resident: int,
    states: int,
    dot: bool = False,
) -> Tile:
    """Return the tile for a call.

    Args:
        device: the device.
        num_rows: rows of the graph.
        num_cols: rows of the gathered features.
        num_edges: entries.
        columns: features a row, heads included.
        itemsize: bytes of one.
        gathers: wide operands that are read for each edge.
        resident: wide operands that are read again for other edges.
        states: numbers of a program for each element (accumulators, winners).
        dot: messages are summed over the width, slice after slice.
    """
    mean = num_edges / max(num_rows, 1)
    kind = degree_class(mean)
    entry = table(device.name)[f"{kind}-{min(itemsize, 4)}"]
    working_set = num_cols * itemsize * resident
    if dot:
        moved = num_edges * columns * itemsize * resident
        width = _dot_slice(device, num_rows, num_edges, columns, itemsize, working_set, moved)
    else:
        width = _slice(device, columns, itemsize, working_set, entry)
    vector = max(16 // itemsize, 1)
    side_by_side = max(WARP // max(width // vector, 1), 1)  # edges that one warp loads at a time
    degree = _floor_power(max(mean, 1))
    wide = max(gathers, 1) * max(states // 2, 1)
    if kind == "long":
        lanes = side_by_side
        unroll = max(1, min(entry["unroll"] // max(gathers, 1), degree // lanes))
        return Tile(1, lanes, width, unroll, entry["split"], entry["piece"])
    passes = _floor_power(entry["passes"] // wide)
    lanes = entry.get("lanes", 1)
    if width <= 8:  # with one lane per row, the addresses of a load would be far apart
        lanes = max(lanes, min(degree // 2, side_by_side // 2), 1)
    rows = max(side_by_side * passes // lanes, 1)
    unroll = max(1, min(entry["unroll"] // max(gathers, 1), _ceil_power(mean)))
    return Tile(rows, lanes, width, unroll, entry["split"], entry["piece"])


def attention_tile(
    device: Gpu,
    num_rows: int,
    num_cols: int,
    num_edges: int,
    heads: int,
    width: int,
    itemsize: int,
    gathers: int,
    resident: int,
    by_edge: bool,
) -> tuple[Tile, int]:
    """Return the tile of attention, with the ``columns`` of one head, and its number of heads.

    Several heads share a program if one head would leave threads idle, if the features of one head
    do not fit the L2 anyway, or if edges read or write a few numbers of all heads (``by_edge``),
    which are contiguous. For long rows half of the features in the L2 suffices. See
    :func:`choose_tile` for the other arguments.
    """
    mean = num_edges / max(num_rows, 1)
    kind = degree_class(mean)
    entry = table(device.name)[f"{kind}-{min(itemsize, 4)}"]
    columns = _ceil_power(width)
    near = device.l2_bytes * (2 if kind == "long" else 1)
    stays = num_cols * itemsize * resident * columns <= near
    most = 64 if stays and not (by_edge and gathers == 1) else ATTENTION_COLUMNS
    block = min(_ceil_power(heads), max(most // columns, 1))
    vector = max(16 // itemsize, 1)
    side_by_side = max(WARP // max(columns * block // vector, 1), 1)
    held = max(ATTENTION_REGISTERS * WARP // (columns * block * max(gathers, 2)), 1)
    if kind == "long":
        unroll = max(min(entry["unroll"] // gathers, held // side_by_side), 1)
        tile = Tile(1, side_by_side, columns, _floor_power(unroll), entry["split"], entry["piece"])
        return tile, block
    rows = max(side_by_side * _floor_power(entry["passes"] // gathers), 1)
    unroll = max(min(entry["unroll"] // gathers, held // rows, _ceil_power(mean)), 1)
    return Tile(rows, 1, columns, _floor_power(unroll), entry["split"], entry["piece"]), block


def _slice(
    device: Gpu, columns: int, itemsize: int, working_set: int, entry: dict[str, int]
) -> int:
    """Return the columns per slice; `working_set` is the bytes of one column."""
    whole, most = _ceil_power(columns), entry["columns"]
    if working_set == 0:
        return min(whole, most)
    line = 128 // itemsize  # narrower slices waste part of every load
    fits = device.l2_bytes * entry["resident"] // 100 // working_set
    if fits >= line:
        return min(whole, _floor_power(fits), most)
    if 2 * fits >= line:  # half of it fits
        return min(whole, line)
    return min(whole, most)


def _dot_slice(
    device: Gpu, rows: int, edges: int, columns: int, itemsize: int, working_set: int, moved: int
) -> int:
    """Return the columns per slice of a dot; `moved` is the bytes that all edges gather.

    Slices that stay in the L2 save HBM traffic, but each goes over all rows and edges, and reads
    and writes their partial sums.
    """
    whole = min(_ceil_power(columns), max(1024 // itemsize, 1), 256)
    hbm, l2 = HBM_PART * device.bandwidth, L2_BYTES_A_CLOCK * device.l2_bandwidth

    def seconds(width: int) -> float:
        parts = -(-columns // width)
        cached = min(device.l2_bytes * L2_PART / max(working_set * width, 1), 1.0)
        each = edges * 12 / hbm + rows * ROW_SECONDS if parts > 1 else 0.0
        return moved * ((1 - cached) / hbm + cached / l2) + parts * each

    narrow = min(whole, 128 // itemsize)
    widths = [narrow << i for i in range((whole // narrow).bit_length())]
    return min(reversed(widths), key=seconds)


def piece_tile(tile: Tile, itemsize: int, gathers: int) -> Tile:
    """Return the tile for pieces of long rows, over the same columns."""
    lanes = max(WARP // max(tile.columns // max(16 // itemsize, 1), 1), 1)
    return Tile(1, lanes, tile.columns, max(1, 8 // max(gathers, 1)), tile.split, tile.piece)


def combine_tile(tile: Tile) -> Tile:
    """Return the tile for combining pieces, over the same columns."""
    return Tile(1, max(WARP * 16 // tile.columns, 1), tile.columns, 1, tile.split, tile.piece)


def _ceil_power(number: float) -> int:
    return 1 << max(int(-(-number // 1)) - 1, 0).bit_length()


def _floor_power(number: float) -> int:
    return 1 << (max(int(number), 1).bit_length() - 1)
