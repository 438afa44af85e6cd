// Building CSR from edge lists, and its transpose, as the bindings see it: plain pointers, no
// torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/allocate.h"

namespace pyg_accel {

// Sizes are below 2^31. Entries of a row of the result are sorted by `id`; ties are in the order
// of the input.
struct CsrArgs {
  const void* row;     // [count], of every edge; or of a matrix to transpose: rowptr [num_rows + 1]
  const void* col;     // [count]
  int64_t row_stride;  // elements
  int64_t col_stride;
  int64_t count;
  int64_t num_rows;
  int64_t num_cols;
  void* ptr;   // of the result: where its rows begin,
  void* id;    // [count], the column of every entry,
  void* perm;  // [count], and its place in the input
  bool wide;   // row and col are int64, and so is a transpose
};

// An id out of range fails an assertion on the device.
void csr_from_coo_cuda(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream);

// The matrix is valid, or the result is meaningless.
void csr_transpose_cuda(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream);

}  // namespace pyg_accel
