// Edge lists without self-loops, and the normalisation of GCN, as the bindings see them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/allocate.h"

namespace pyg_accel {

// An edge list [2, count] that loses its self-loops, and may give one to every node. Sizes are
// below 2^31.
struct SelfLoopArgs {
  const int64_t* row;
  const int64_t* col;
  int64_t row_stride;  // elements
  int64_t col_stride;
  int64_t count;
  int32_t* place;     // [count + 1], where edges go: filled by `place_edges_cuda`
  int64_t num_nodes;  // that get a loop
  int32_t* degree;    // [num_nodes]: edges that stay; null if there are no weights
  bool by_col;        // degrees are those of `col`, not of `row`
  int64_t kept;       // edges that stay
  int64_t* out;       // [2, kept + num_nodes]
  void* weight;       // [kept + num_nodes] of float or double, or null
  bool double_weight;
};

// Decides which edges stay, and counts degrees. An id out of range fails an assertion on the
// device where degrees are counted.
void place_edges_cuda(const SelfLoopArgs& args, const Allocate& allocate, cudaStream_t stream);

// Writes those that stay, the loops, and weights 1 / sqrt(degree of row * degree of col).
void write_edges_cuda(const SelfLoopArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
