// Attention over tiles as the bindings see it: plain pointers, no torch.
//
// out[i, h] = sum_j softmax_j(s_ij) value[j, h],
// s_ij = scale * coefficient[i, h] * dot(query[i, h], key[j, h]).
#pragma once

#include "cuda/kernels.h"

namespace pyg_accel {

constexpr int kAttentionWindow = 64;  // rows of a tile

// Features [rows, heads, padded]; strides count elements, that of heads is 0 where all share a row.
struct Heads {
  const void* data;
  int64_t stride;  // of rows
  int64_t head;
};

// The tiles of a graph, and the size of what is added up over them.
struct AttentionTiles {
  const Item* items;
  const Split* splits;
  const int32_t* col;     // [T * kTileColumns]
  const uint32_t* masks;  // [T * kAttentionWindow], bit c: the row has an edge from column c
  const int32_t* rowptr;  // the CSR matrix
  const int32_t* csr_col;
  int32_t num_items;
  int32_t num_splits;
  int32_t num_rows;
  int32_t heads;
  int32_t width;   // of results
  int32_t padded;  // the next multiple of a 16-byte vector, which features have
};

struct AttentionArgs : AttentionTiles {
  Heads query, key, value;
  const float* coefficient;  // or null for 1
  int64_t coefficient_stride, coefficient_head;
  float scale;
  void* out;       // [num_rows, heads, width]
  float* total;    // [num_rows, heads], log of the sums of exponentials
  float* partial;  // [P, heads, kAttentionWindow, depth + 2]: sums, maximum, sum of exponentials
};

// What the gradient reads of a target and head.
struct TargetNumbers {
  float scale;  // with the coefficient: dots times it are scores
  float power;  // the same for powers of 2 instead of e
  float total;  // logarithm, to base 2, of the sum of exponentials
  float delta;  // dot of the result and its gradient
};

struct TargetNumbersArgs {
  Heads grad;
  const void* out;     // [targets, heads, width]
  const float* total;  // [targets, heads]
  const float* coefficient;
  int64_t coefficient_stride, coefficient_head;
  float scale;
  TargetNumbers* numbers;  // [targets, heads]
  int64_t targets;
  int32_t heads;
  int32_t width;
};

// Gradients of the rows of a graph: of queries and coefficients, or if its rows are sources, as in
// the transposed graph, of keys and values.
struct AttentionBackwardArgs : AttentionTiles {
  Heads own[2];                  // of rows: query and gradient of the result; or key and value
  Heads other[2];                // of columns: key and value; or query and gradient of the result
  const TargetNumbers* numbers;  // [targets, heads]
  void* out[2];                  // [num_rows, heads, width], the second only of sources
  float* dots;     // [num_rows, heads], sums of gradients of scores times dots; not of sources
  float* partial;  // [P, heads, kAttentionWindow, 2 * depth or depth + 2]
  bool sources;
};

// depth: 32, 64 or 128, at least the width.
void attention_half(int depth, const AttentionArgs& args, cudaStream_t stream);
void attention_bf16(int depth, const AttentionArgs& args, cudaStream_t stream);
void target_numbers_half(const TargetNumbersArgs& args, cudaStream_t stream);
void target_numbers_bf16(const TargetNumbersArgs& args, cudaStream_t stream);
void attention_backward_half(int depth, const AttentionBackwardArgs& args, cudaStream_t stream);
void attention_backward_bf16(int depth, const AttentionBackwardArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
