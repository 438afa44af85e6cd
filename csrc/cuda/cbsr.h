// The kernels of MaxK and CBSR as their bindings see them: plain pointers, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pyg_accel {

// How a feature is stored.
enum class Stored { kFloat, kBFloat16, kHalf };

// The rows of a graph; rows with more than `limit` entries in pieces. A warp has a row or a piece.
struct Rows {
  const int32_t* rowptr;
  const int32_t* col;
  const int32_t* row;    // of every piece
  const int32_t* begin;  // its first entry
  const int32_t* end;    // one past its last
  int32_t rows;
  int32_t pieces;
  int32_t limit;
};

// out[i] = scale[i] * sum_j weight_ij * the CBSR row j. k, width and the rows of values and indices
// are padded to whole quads of slots.
struct CbsrSpmmArgs {
  Rows rows;
  const float* weight;  // [E] in the order of `col`, or null for 1
  const void* values;   // [num_cols, stride]
  const void* indices;  // likewise, uint8 or uint16
  void* out;            // [num_rows, width] like the values
  float* partial;       // [pieces, width]
  int stride;           // slots of a stored row, a multiple of 4
  int k;                // valid slots
  int width;
  int shift;  // the columns of a bank, as a power of two
  int lanes;  // of an edge: 4, 8, 16 or 32
  Stored stored;
  bool wide_columns;  // uint16
  bool mean;
};

void cbsr_spmm_cuda(const CbsrSpmmArgs& args, cudaStream_t stream);

// out[row[i]] = the sum of its pieces' partial sums, first[i] to first[i + 1].
struct CombineArgs {
  const float* partial;   // [pieces, width]
  const int32_t* row;     // [count]
  const int32_t* first;   // [count + 1]
  const int32_t* rowptr;  // to divide by the entries of a row, or null
  void* out;              // [num_rows, width]
  int32_t count;
  int32_t width;
  Stored stored;
};

void combine_cuda(const CombineArgs& args, cudaStream_t stream);

// out[j, s] += weight_ij * x[i, indices[j, s]] for every neighbour j of a row i, by atomic
// additions.
struct CbsrPushArgs {
  Rows rows;
  const float* weight;  // [E] in the order of `col`, or null for 1
  const float* x;       // [num_rows, width], 16-byte aligned
  const void* indices;  // [num_cols, stride], uint8 or uint16
  float* out;           // [num_cols, stride]
  int stride;
  int k;
  int width;
  int shift;
  int lanes;
  bool wide_columns;
};

void cbsr_push_cuda(const CbsrPushArgs& args, cudaStream_t stream);

// out[j, s] = sum_i weight_ij * x[i, indices[j, s]] over the rows j of the transposed graph,
// `slice` columns of x at a time.
struct CbsrPullArgs {
  Rows rows;            // of the transposed graph
  const float* weight;  // [E] in the order of `col`, or null for 1
  const void* x;        // [num_rows, width]
  const void* indices;  // [num_cols, k], uint8 or uint16
  void* out;            // [num_cols, k] like x
  float* partial;       // [pieces, k]
  int k;
  int width;
  int slice;
  Stored stored;
  bool wide_columns;
};

void cbsr_pull_cuda(const CbsrPullArgs& args, cudaStream_t stream);

// The k largest of each row of x [rows, width], width up to 1024, and their columns, ascending.
struct MaxkArgs {
  const void* x;
  void* values;   // [rows, k] like x
  void* indices;  // [rows, k], uint8 up to a width of 256, else uint16
  int64_t rows;
  int width;
  int k;
  float first;  // where between the smallest and the largest to look first, a share
  Stored stored;
};

void maxk_cuda(const MaxkArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
