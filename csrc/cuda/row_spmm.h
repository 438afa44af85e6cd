// Reductions of the rows of a CSR matrix on CUDA cores, as the bindings see them: plain pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pyg_accel {

enum class RowReduce { kSum, kExtreme, kWinners };  // kWinners: extremes and where they are

// out[i, c] = reduce over entries (i, j) of row i of weight * x[j, c].
//
// A row of x has `heads` parts of `width` columns, whole vectors of which are read; of each part
// out has the first `out_width`.
struct RowSpmmArgs {
  const void* rowptr;  // [num_rows + 1]
  const void* col;     // [num_entries]
  const void* eid;     // [num_entries], where its weight is; null if they are in order
  const void* order;   // [num_rows], in which rows are taken; null as they come
  int64_t num_rows;
  int64_t limit;  // rows of more entries are cut, if there are pieces
  // Of long rows: [pieces] first entry, one past the last; [long_rows] rows, and [long_rows + 1]
  // where the pieces of each begin.
  const void* piece_begin;
  const void* piece_end;
  const void* long_row;
  const void* long_first;
  int64_t pieces;
  int64_t long_rows;
  const void* x;
  int64_t x_stride;    // elements
  const void* weight;  // [num_edges, weight_heads], or of sources [num_cols, ...], or null
  int32_t weight_heads;
  bool by_source;
  int32_t columns;  // heads * width
  int32_t width;
  int32_t out_width;
  void* out;              // [num_rows, heads * out_width]
  void* winner;           // likewise, indices (kWinners)
  float* partial;         // [pieces, columns]
  void* partial_at;       // likewise, positions of winners (kWinners)
  bool mean;              // kSum: divide by the number of entries
  bool smallest;          // the others: minima
  const void* winner_of;  // [num_entries], what a winner is called; null for its position
  bool wide;              // indices are int64
  int vector;             // elements that are read at once: rows of x and parts begin at multiples
  int slice;              // columns that a warp works on, a power of two
  int lanes;  // entries of a row side by side, a power of two; rows share a warp with the rest
  bool few;   // rows have few entries: less of each is in flight
};

void row_spmm_float(RowReduce reduce, const RowSpmmArgs& args, cudaStream_t stream);
void row_spmm_bf16(RowReduce reduce, const RowSpmmArgs& args, cudaStream_t stream);
void row_spmm_half(RowReduce reduce, const RowSpmmArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
