// Dot-product attention over condensed tiles on Tensor Cores, forward, in one kernel.
//
// A block has a window of 64 rows and goes over its tiles; each of its four warps has 16 of the
// rows. The rows of keys and values that a tile's columns name are copied into shared memory once
// and serve all 64 rows: for scores, S = Q K^T, and for sums, O += P V. Scores never leave the
// registers: the layout in which the first product leaves them is that in which the second one
// wants its left factor. Which of a tile's 64 x 32 scores are edges is one bit each (TC-GNN stores
// and multiplies the scores instead: section 4.2, algorithms 2 and 3). Maximum and sum of a row's
// exponentials follow along, as in Milakov and Gimelshein, "Online normalizer calculation for
// softmax".
//
// Zeros of P times an infinite value are NaN in rows that do not have that neighbour. A result that
// is not finite although its sum is, is therefore computed again from its row's own edges.
#pragma once

#include "cuda/attention.h"
#include "cuda/attention_tile.cuh"
#include "cuda/check.cuh"

namespace pyg_accel {

// 2 ** x of a score x, of which `most` is the largest: 0 for a row without any so far.
__device__ __forceinline__ float share(float score, float most) {
  return exp2f(score - (most == -INFINITY ? 0.0f : most));
}

template <typename T>
__device__ __noinline__ float repeat_attention(const AttentionArgs& args,
                                               int row,
                                               int head,
                                               int feature,
                                               float most,
                                               float sum) {
  const T* q = row_of<T>(args.query, row, head);
  float scale = args.scale * kLog2E;
  if (args.coefficient)
    scale *= args.coefficient[row * args.coefficient_stride + head * args.coefficient_head];
  float total = 0.0f;
  for (int e = args.rowptr[row]; e < args.rowptr[row + 1]; ++e) {
    const int64_t source = args.csr_col[e];
    const T* k = row_of<T>(args.key, source, head);
    const T* v = row_of<T>(args.value, source, head);
    float score = 0.0f;
    for (int f = 0; f < args.width; ++f)
      score += to_float(q[f]) * to_float(k[f]);
    total += share(score * scale, most) * to_float(v[feature]);
  }
  return total / sum;
}

// Writes two neighbouring features of a finished row.
template <typename T>
__device__ __forceinline__ void finish_pair(const AttentionArgs& args,
                                            int row,
                                            int head,
                                            int feature,
                                            float most,
                                            float sum,
                                            float first,
                                            float second) {
  if (row >= args.num_rows)
    return;
  const bool empty = args.rowptr[row] == args.rowptr[row + 1];
  float values[2] = {first, second};
  T* out = static_cast<T*>(args.out) +
           (static_cast<int64_t>(row) * args.heads + head) * args.width + feature;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (feature + i >= args.width)
      break;
    float value = empty ? 0.0f : values[i] / sum;
    if (!isfinite(value) && isfinite(sum) && sum > 0.0f)
      value = repeat_attention<T>(args, row, head, feature + i, most, sum);
    out[i] = from_float<T>(value);
  }
}

__device__ __forceinline__ void finish_total(const AttentionArgs& args,
                                             int row,
                                             int head,
                                             float most,
                                             float sum) {
  if (row < args.num_rows)
    args.total[static_cast<int64_t>(row) * args.heads + head] =
        sum > 0.0f || isnan(sum) ? (most + log2f(sum)) / kLog2E : 0.0f;
}

template <typename T, int kDepth>
__global__ void __launch_bounds__(32 * kAttentionWarps, kDepth == 128 ? 3 : 4)
    attention_kernel(const __grid_constant__ AttentionArgs args) {
  constexpr int kSteps = kDepth / 16;           // of the first product
  constexpr int kBlocks = kTileColumns / 8;     // of columns
  constexpr int kFeatures = kDepth / 8;         // blocks of features
  constexpr int kRows = kTileColumns * kDepth;  // elements of a tile's keys
  extern __shared__ uint4 memory[];
  const uint32_t base = shared_address(memory);
  const Item item = args.items[blockIdx.x];
  const int head = blockIdx.y;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int row0 = item.window * kAttentionWindow + 16 * warp + g;  // and row0 + 8

  uint32_t q[kSteps][4];
  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + 8 * half;
    const bool there = row < args.num_rows;
    const T* from = row_of<T>(args.query, there ? row : 0, head);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int feature = 16 * s + 8 * high + 2 * t;
        uint32_t word = 0;
        if (there && 16 * s + 8 * high < args.padded)
          word = __ldg(reinterpret_cast<const uint32_t*>(from + feature));
        q[s][2 * high + half] = word;
      }
    }
    scale[half] = args.scale * kLog2E;
    if (args.coefficient && there)
      scale[half] *= args.coefficient[row * args.coefficient_stride + head * args.coefficient_head];
  }

  const auto column_of = [&](int tile) {
    return args.col[static_cast<int64_t>(min(tile, item.end - 1)) * kTileColumns + copied_row()];
  };
  const auto copy = [&](int tile, int stage, int column) {
    if (tile < item.end)
      copy_pair<T, kDepth>(base + stage * 2 * kRows * static_cast<int>(sizeof(T)),
                           row_of<T>(args.key, column, head), row_of<T>(args.value, column, head),
                           args.padded);
    commit_copies();
  };
  const auto mask_of = [&](int tile, int half) {
    const int64_t at = static_cast<int64_t>(min(tile, item.end - 1)) * kAttentionWindow;
    return args.masks[at + 16 * warp + g + 8 * half];
  };

  float out[kFeatures][4] = {};
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  if (item.begin < item.end) {
    if (args.padded < kDepth) {  // what is not copied must be zero
      for (int i = threadIdx.x; i < kAttentionStages * 2 * kRows * static_cast<int>(sizeof(T)) / 16;
           i += blockDim.x)
        memory[i] = make_uint4(0, 0, 0, 0);
      __syncthreads();
    }
    int column = column_of(item.begin);
#pragma unroll
    for (int i = 0; i < kAttentionStages - 1; ++i) {
      copy(item.begin + i, i, column);
      column = column_of(item.begin + i + 1);
    }
    uint32_t masks[2] = {mask_of(item.begin, 0), mask_of(item.begin, 1)};
    int stage = 0, old = kAttentionStages - 1;
    for (int tile = item.begin; tile < item.end; ++tile) {
      wait_copies<kAttentionStages - 2>();
      __syncthreads();
      copy(tile + kAttentionStages - 1, old, column);
      column = column_of(tile + kAttentionStages);
      const uint32_t now[2] = {masks[0], masks[1]};
      masks[0] = mask_of(tile + 1, 0);
      masks[1] = mask_of(tile + 1, 1);
      const uint32_t key_rows = base + stage * 2 * kRows * static_cast<int>(sizeof(T));
      const uint32_t value_rows = key_rows + kRows * static_cast<int>(sizeof(T));

      float score[kBlocks][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          uint32_t k[4];
          load_matrices(k, key_rows + chunk_place<kDepth>(8 * j + (lane & 7), 2 * s + (lane >> 3)));
          Mma<T>::multiply(score[j], q[s], k[0], k[1]);
          Mma<T>::multiply(score[j], q[s + 1], k[2], k[3]);
        }
      }

      // Of the block j a lane has the columns 8 j + 2 t and the next, of both its rows.
      float larger[2] = {most[0], most[1]};
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool edge = now[i >> 1] >> (8 * j + 2 * t + (i & 1)) & 1;
          score[j][i] = edge ? score[j][i] * scale[i >> 1] : -INFINITY;
          larger[i >> 1] = fmaxf(larger[i >> 1], score[j][i]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        larger[half] = fmaxf(larger[half], __shfl_xor_sync(kWarp, larger[half], 1));
        larger[half] = fmaxf(larger[half], __shfl_xor_sync(kWarp, larger[half], 2));
      }
      if (__any_sync(kWarp, larger[0] != most[0] || larger[1] != most[1])) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float factor = most[half] == -INFINITY ? 1.0f : exp2f(most[half] - larger[half]);
          most[half] = larger[half];
          sum[half] *= factor;
#pragma unroll
          for (int f = 0; f < kFeatures; ++f) {
            out[f][2 * half] *= factor;
            out[f][2 * half + 1] *= factor;
          }
        }
      }
      const float shift[2] = {most[0] == -INFINITY ? 0.0f : most[0],
                              most[1] == -INFINITY ? 0.0f : most[1]};
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          score[j][i] = exp2f(score[j][i] - shift[i >> 1]);
          sum[i >> 1] += score[j][i];
        }
      }
#pragma unroll
      for (int s = 0; s < kTileColumns / 16; ++s) {
        const uint32_t p[4] = {pack(score[2 * s][0], score[2 * s][1], T()),
                               pack(score[2 * s][2], score[2 * s][3], T()),
                               pack(score[2 * s + 1][0], score[2 * s + 1][1], T()),
                               pack(score[2 * s + 1][2], score[2 * s + 1][3], T())};
#pragma unroll
        for (int f = 0; f < kFeatures; f += 2) {
          uint32_t v[4];
          load_transposed(v,
                          value_rows + chunk_place<kDepth>(16 * s + (lane & 15), f + (lane >> 4)));
          Mma<T>::multiply(out[f], p, v[0], v[1]);
          Mma<T>::multiply(out[f + 1], p, v[2], v[3]);
        }
      }
      old = stage;
      if (++stage == kAttentionStages)
        stage = 0;
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kWarp, sum[half], 1);
    sum[half] += __shfl_xor_sync(kWarp, sum[half], 2);
    const int row = row0 + 8 * half;
    if (item.partial < 0) {
#pragma unroll
      for (int f = 0; f < kFeatures; ++f)
        finish_pair<T>(args, row, head, 8 * f + 2 * t, most[half], sum[half], out[f][2 * half],
                       out[f][2 * half + 1]);
      if (t == 0)
        finish_total(args, row, head, most[half], sum[half]);
    } else {
      const int64_t place = static_cast<int64_t>(item.partial) * args.heads + head;
      float* to =
          args.partial + (place * kAttentionWindow + 16 * warp + g + 8 * half) * (kDepth + 2);
#pragma unroll
      for (int f = 0; f < kFeatures; ++f)
        *reinterpret_cast<float2*>(to + 8 * f + 2 * t) =
            make_float2(out[f][2 * half], out[f][2 * half + 1]);
      if (t == 0)
        *reinterpret_cast<float2*>(to + kDepth) = make_float2(most[half], sum[half]);
    }
  }
}

// Adds the parts of divided windows, in order: a block has one row of one window and head.
template <typename T, int kDepth>
__global__ void attention_combine_kernel(const __grid_constant__ AttentionArgs args) {
  const Split split = args.splits[blockIdx.x];
  const int head = blockIdx.z, feature = 2 * threadIdx.x;
  const int row = split.window * kAttentionWindow + blockIdx.y;
  float most = -INFINITY, sum = 0.0f, first = 0.0f, second = 0.0f;
  for (int part = 0; part < split.count; ++part) {
    const int64_t place = static_cast<int64_t>(split.first + part) * args.heads + head;
    const float* from = args.partial + (place * kAttentionWindow + blockIdx.y) * (kDepth + 2);
    const float2 x = *reinterpret_cast<const float2*>(from + feature);
    const float2 other = *reinterpret_cast<const float2*>(from + kDepth);
    const float larger = fmaxf(most, other.x);
    const float mine = most == -INFINITY ? 1.0f : exp2f(most - larger);
    const float theirs = other.x == -INFINITY ? 1.0f : exp2f(other.x - larger);
    first = first * mine + x.x * theirs;
    second = second * mine + x.y * theirs;
    sum = sum * mine + other.y * theirs;
    most = larger;
  }
  finish_pair<T>(args, row, head, feature, most, sum, first, second);
  if (threadIdx.x == 0)
    finish_total(args, row, head, most, sum);
}

template <typename T, int kDepth>
void launch_attention(const AttentionArgs& args, cudaStream_t stream) {
  if (args.num_items) {
    const int bytes = kAttentionStages * 2 * kTileColumns * kDepth * static_cast<int>(sizeof(T));
    const auto kernel = attention_kernel<T, kDepth>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "shared memory for attention");
    kernel<<<dim3(args.num_items, args.heads), 32 * kAttentionWarps, bytes, stream>>>(args);
    check_launch("attention");
  }
  if (args.num_splits) {
    const dim3 grid(args.num_splits, kAttentionWindow, args.heads);
    attention_combine_kernel<T, kDepth><<<grid, kDepth / 2, 0, stream>>>(args);
    check_launch("attention combine");
  }
}

template <typename T>
void launch_attention(int depth, const AttentionArgs& args, cudaStream_t stream) {
  switch (depth) {
    case 32:
      return launch_attention<T, 32>(args, stream);
    case 64:
      return launch_attention<T, 64>(args, stream);
    case 128:
      return launch_attention<T, 128>(args, stream);
    default:
      throw std::invalid_argument("expected heads of 32, 64 or 128 features");
  }
}

}  // namespace pyg_accel
