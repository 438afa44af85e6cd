// The CUDA kernels as the bindings see them: plain pointers, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pyg_accel {

// out[i] = values[order[i]], or values[eid[order[i]]] with eid.
struct TakeArgs {
  const void* values;
  const void* order;
  const void* eid;
  void* out;
  int64_t count;
  int bytes;  // of a value: 2, 4 or 8
  bool wide;  // order and eid are int64
};

void take_cuda(const TakeArgs& args, cudaStream_t stream);

// out[order[i]] = values[i]; `eid` is not used.
void put_cuda(const TakeArgs& args, cudaStream_t stream);

constexpr int kTileColumns = 32;  // of the tiles that the kernels below multiply

// A range of a window's tiles, worked on by one block.
struct Item {
  int32_t window;
  int32_t begin;    // first tile
  int32_t end;      // one past the last
  int32_t partial;  // where the sum goes, or -1: it is the window's only one
};

// A window whose tiles were divided among several items.
struct Split {
  int32_t window;
  int32_t first;  // of its partial sums
  int32_t count;
};

// out[i] = scale[i] * sum_j weight_ij x[j] over the entries of tiles, or with `add`
// scale[i] * (out[i] + that); offsets into tiles and rows are 32-bit, all others 64.
struct SpmmArgs {
  const Item* items;
  const Split* splits;
  const int32_t* tile_ptr;  // [T + 1]
  const int32_t* col;       // [T * kTileColumns]
  const int16_t* slot;      // [S], of the entries that are in tiles
  const void* value;        // [S], weights in the order of `slot`, or null for 1
  const int32_t* rowptr;    // the whole CSR matrix, for elements that are computed again
  const int32_t* csr_col;
  const int32_t* eid;  // or null
  const void* weight;  // as `eid` numbers it, or null
  const void* x;       // rows of whole 16-byte vectors
  void* out;           // [num_rows, width]
  float* partial;      // [P, window, padded width]
  int64_t x_stride;    // elements
  int32_t num_items;
  int32_t num_splits;
  int32_t num_rows;
  int32_t width;   // of out
  int32_t padded;  // the next multiple of a 16-byte vector
  int32_t warps;   // of a block, side by side along the features
  bool mean;       // divide by the row's entries
  bool add;        // to the values of `out`
};

// out[e] = dot of target[i] and source[j], features [begin, end), for entries e = (i, j) of tiles.
struct SddmmArgs {
  const Item* items;
  const int32_t* tile_ptr;  // [T + 1]
  const int32_t* col;       // [T * kTileColumns]
  const int16_t* slot;      // [S], of the entries that are in tiles
  const int32_t* order;     // [S], where the result of every slot goes
  const void* target;       // rows of whole 16-byte vectors
  const void* source;
  void* out;              // [E] like the features, or
  float* sum;             // [E] of several passes over some of the features each
  int64_t target_stride;  // elements
  int64_t source_stride;
  int32_t num_items;
  int32_t num_rows;
  int32_t begin;
  int32_t end;
  bool first;  // of the passes
};

}  // namespace pyg_accel
