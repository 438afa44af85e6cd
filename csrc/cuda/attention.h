// Attention over tiles as the bindings see it: plain pointers, no torch.
#pragma once

#include "cuda/kernels.h"

namespace pyg_accel {

constexpr int kAttentionWindow = 64;  // rows of a tile

// out[i, h] = sum_j softmax_j(s_ij) value[j, h],
// s_ij = scale * coefficient[i, h] * dot(query[i, h], key[j, h]).
// Strides count elements; those of heads are 0 where all heads share a row.
struct AttentionArgs {
  const Item* items;
  const Split* splits;
  const int32_t* col;     // [T * kTileColumns]
  const uint32_t* masks;  // [T * kAttentionWindow], bit c: the row has an edge from column c
  const int32_t* rowptr;  // the CSR matrix
  const int32_t* csr_col;
  const void* query;
  const void* key;
  const void* value;
  int64_t query_stride, key_stride, value_stride;  // of rows
  int64_t query_head, key_head, value_head;
  const float* coefficient;  // or null for 1
  int64_t coefficient_stride, coefficient_head;
  float scale;
  void* out;       // [num_rows, heads, width]
  float* total;    // [num_rows, heads], log of the sums of exponentials
  float* partial;  // [P, heads, kAttentionWindow, depth + 2]: sums, maximum, sum of exponentials
  int32_t num_items;
  int32_t num_splits;
  int32_t num_rows;
  int32_t heads;
  int32_t width;   // of out
  int32_t padded;  // the next multiple of a 16-byte vector, which the other rows have
};

// depth: 32, 64 or 128, at least the width.
void attention_half(int depth, const AttentionArgs& args, cudaStream_t stream);
void attention_bf16(int depth, const AttentionArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
