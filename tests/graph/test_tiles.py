"""Sparse graph translation, held against its definition; no GPU needed."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops
from pyg_accel.graph.tiles import Tiles, build_tiles, tiles_of
from pyg_accel.testing import zoo

CASES = {case.name: case for case in zoo(hub=600)}
SIZES = ((16, 8), (8, 8), (8, 16), (64, 32), (16, 1), (5, 3))


def graph_of(name: str) -> Graph:
    case = CASES[name]
    return Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))


def dense_of(tiles: Tiles, weight: Tensor) -> Tensor:
    """The matrix that the tiles stand for: every slot at its row and source."""
    out = torch.zeros(tiles.num_rows, tiles.num_cols, dtype=weight.dtype)
    tile = tiles.tile_of_entry
    row = tiles.window_of_tile[tile] * tiles.window + tiles.slot.long() // tiles.tile
    col = tiles.col.long()[tile * tiles.tile + tiles.slot.long() % tiles.tile]
    return out.index_put_((row, col), weight[tiles.entry.long()], accumulate=True)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", CASES)
def test_the_tiles_hold_every_entry_once_at_its_row_and_column(name, size):
    graph = graph_of(name)
    tiles = ops.sgt(graph, window=size[0], tile=size[1])
    row = torch.repeat_interleave(torch.arange(graph.num_rows), graph.degree.long())
    weight = torch.randint(1, 100, (graph.num_edges,)).double()
    right = torch.zeros(graph.num_rows, graph.num_cols, dtype=torch.double)
    right.index_put_((row, graph.col.long()), weight, accumulate=True)
    assert torch.equal(dense_of(tiles, weight), right)
    assert torch.equal(tiles.entry.long().sort().values, torch.arange(graph.num_edges))
    assert tiles.slot.numel() == 0 or int(tiles.slot.max()) < size[0] * size[1]
    places = tiles.tile_of_entry * size[0] * size[1] + tiles.slot.long()
    assert places.unique().numel() == graph.num_edges  # no two entries share a slot


@pytest.mark.one_of(3)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", CASES)
def test_the_columns_of_a_window_are_condensed_as_the_paper_defines_it(name, size):
    window, tile = size
    graph = graph_of(name)
    tiles = ops.sgt(graph, window=window, tile=tile)
    row = torch.repeat_interleave(torch.arange(graph.num_rows), graph.degree.long())
    without = 0
    for w in range(tiles.window_ptr.numel() - 1):
        mine = graph.col.long()[row // window == w]
        local = row[row // window == w]
        pairs, counts = torch.stack([mine, local]).unique(dim=1, return_counts=True)
        copies = {int(c): 0 for c in mine.unique()}
        for c, n in zip(pairs[0].tolist(), counts.tolist(), strict=True):
            copies[c] = max(copies[c], n)
        expected = [c for c, n in copies.items() for _ in range(n)]
        begin, end = int(tiles.window_ptr[w]), int(tiles.window_ptr[w + 1])
        assert end - begin == -(-len(expected) // tile)
        full = expected + expected[-1:] * (-len(expected) % tile)
        assert tiles.col[begin * tile : end * tile].tolist() == full
        without += (mine // tile).unique().numel()
    assert tiles.num_tiles_without == without


@pytest.mark.parametrize("least", [2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_columns_of_few_entries_can_be_left_out(name, least):
    csr = graph_of(name).csr()
    for window, tile in ((16, 8), (64, 32)):
        whole, part = build_tiles(csr, window, tile), build_tiles(csr, window, tile, least)
        column = whole.tile_of_entry * tile + whole.slot.long() % tile
        full = torch.bincount(column, minlength=whole.num_tiles * tile) >= least
        assert part.num_columns == int(full.sum())
        assert torch.equal(part.entry, whole.entry[full[column]])  # in the same order
        ones = torch.ones(csr.col.numel())
        right = torch.zeros(csr.num_rows, csr.num_cols)
        row = torch.repeat_interleave(torch.arange(csr.num_rows), csr.rowptr.diff().long())
        kept = part.entry.long()
        right.index_put_((row[kept], csr.col.long()[kept]), ones[kept], accumulate=True)
        assert torch.equal(dense_of(part, ones), right)
        places = part.tile_of_entry * window * tile + part.slot.long()
        assert places.unique().numel() == part.entry.numel()


@pytest.mark.parametrize("name", CASES)
def test_bit_masks_show_the_pattern_of_every_tile(name):
    tiles = ops.sgt(graph_of(name))
    dense = torch.zeros(tiles.num_tiles, tiles.window, tiles.tile, dtype=torch.bool)
    slot = tiles.slot.long()
    dense[tiles.tile_of_entry, slot // tiles.tile, slot % tiles.tile] = True
    shifts = torch.arange(tiles.tile)
    assert torch.equal((tiles.masks.unsqueeze(-1) >> shifts & 1).bool(), dense)


def test_statistics_count_what_they_say():
    graph = Graph.from_edge_index(torch.tensor([[0, 90, 0, 5], [0, 0, 1, 40]]), (100, 50))
    tiles = ops.sgt(graph)
    assert (tiles.window_ptr.numel() - 1, tiles.num_tiles, tiles.num_tiles_without) == (4, 2, 3)
    assert (tiles.nonzeros_per_tile, tiles.edges_per_column) == (2.0, 4 / 3)
    assert repr(tiles) == ("Tiles(16x8, num_tiles=2, nonzeros_per_tile=2.0, edges_per_column=1.33)")


def test_a_dense_block_shares_every_column():
    row, col = torch.meshgrid(torch.arange(16), torch.arange(32), indexing="ij")
    tiles = ops.sgt(Graph.from_edge_index(torch.stack([col.flatten() * 3, row.flatten()])))
    assert (tiles.num_tiles, tiles.edges_per_column, tiles.nonzeros_per_tile) == (4, 16.0, 128.0)
    assert tiles.masks.unique().tolist() == [255]


def test_tiles_are_kept_for_as_long_as_the_graph_lives():
    graph = graph_of("directed")
    tiles = ops.sgt(graph)
    assert ops.sgt(graph) is tiles
    assert ops.sgt(graph, window=8) is not tiles
    other = Graph.from_csr(graph.rowptr, graph.col.flip(0), num_cols=graph.num_cols)
    assert ops.sgt(other) is not tiles
    again = Graph(graph.rowptr.clone(), graph.col, None, graph.num_cols, sorted=True)
    assert ops.sgt(again) is not tiles
    dead = weakref.ref(tiles)
    del tiles, graph, again
    gc.collect()
    assert dead() is None


@pytest.mark.parametrize(
    ("size", "named"),
    [((0, 8), "'window'"), ((16, 0), "'tile'"), ((256, 256), "'window' and 'tile'")],
)
def test_impossible_sizes_are_refused(size, named):
    with pytest.raises(ValueError, match=f"expected {named} "):
        ops.sgt(graph_of("directed"), window=size[0], tile=size[1])


def test_int64_graphs_give_int64_tiles():
    narrow = graph_of("directed")
    graph = Graph.from_csr(narrow.rowptr.long(), narrow.col.long(), num_cols=narrow.num_cols)
    tiles, same = tiles_of(graph.csr(), 16, 8), ops.sgt(narrow)
    assert tiles.col.dtype == tiles.entry.dtype == tiles.tile_ptr.dtype == torch.int64
    assert same.col.dtype == torch.int32
    assert torch.equal(tiles.col, same.col.long())
