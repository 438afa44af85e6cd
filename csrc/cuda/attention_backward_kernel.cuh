// The gradient of dot-product attention over condensed tiles on Tensor Cores.
//
// With p the weight of an edge, g the gradient of the result and delta = g . out, the gradient of a
// score is ds = p (g . v - delta). One pass over the graph adds up ds k, gradients of queries; one
// over the transposed graph p g and ds q, those of values and keys. Both make p anew from scores
// and the logarithms of their sums: nothing is kept for an edge, and nothing is added up by atomics
// (the passes of Dao, "FlashAttention-2", each over the tiles of its own graph).
//
// A block has a window of 64 rows, as forward, and its rows' two matrices in shared memory: their
// products with a tile's two matrices are the scores and g . v. What becomes of them is in the
// layout of the next product's left factor already.
//
// Zeros times infinities are dealt with as forward: a result that is not finite is computed again
// from its row's own edges.
#pragma once

#include "cuda/attention.h"
#include "cuda/attention_tile.cuh"
#include "cuda/check.cuh"

namespace pyg_accel {

// A warp has a row of the result and of its gradient.
template <typename T>
__global__ void target_numbers_kernel(const __grid_constant__ TargetNumbersArgs args) {
  const int64_t place = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (place >= args.targets * args.heads)
    return;
  const int64_t row = place / args.heads;
  const int head = static_cast<int>(place % args.heads), lane = threadIdx.x & 31;
  const T* grad = row_of<T>(args.grad, row, head);
  const T* out = static_cast<const T*>(args.out) + place * args.width;
  float delta = 0.0f;
  for (int f = lane; f < args.width; f += 32)
    delta += to_float(grad[f]) * to_float(out[f]);
#pragma unroll
  for (int step = 16; step; step >>= 1)
    delta += __shfl_xor_sync(kWarp, delta, step);
  if (lane)
    return;
  float scale = args.scale;
  if (args.coefficient)
    scale *= args.coefficient[row * args.coefficient_stride + head * args.coefficient_head];
  args.numbers[place] = {scale, scale * kLog2E, args.total[place] * kLog2E, delta};
}

__device__ __forceinline__ TargetNumbers numbers_of(const AttentionBackwardArgs& args,
                                                    int64_t target,
                                                    int head) {
  const float4 raw =
      __ldg(reinterpret_cast<const float4*>(args.numbers) + target * args.heads + head);
  return {raw.x, raw.y, raw.z, raw.w};
}

template <typename T, bool kSources>
__device__ __noinline__ float repeat_gradient(const AttentionBackwardArgs& args,
                                              int row,
                                              int head,
                                              int feature,
                                              int which) {
  const T* first = row_of<T>(args.own[0], row, head);
  const T* second = row_of<T>(args.own[1], row, head);
  float sum = 0.0f;
  for (int e = args.rowptr[row]; e < args.rowptr[row + 1]; ++e) {
    const int column = args.csr_col[e];
    const TargetNumbers target = numbers_of(args, kSources ? column : row, head);
    const T* x = row_of<T>(args.other[0], column, head);
    const T* y = row_of<T>(args.other[1], column, head);
    float dot = 0.0f, inner = 0.0f;
    for (int f = 0; f < args.width; ++f) {
      dot += to_float(first[f]) * to_float(x[f]);
      inner += to_float(second[f]) * to_float(y[f]);
    }
    const float p = exp2f(dot * target.power - target.total);
    const float factor = which ? p : p * (inner - target.delta) * target.scale;
    sum += factor * to_float((which ? y : x)[feature]);
  }
  return sum;
}

// Writes two neighbouring features of a finished row.
template <typename T, bool kSources>
__device__ __forceinline__ void finish_gradient(const AttentionBackwardArgs& args,
                                                int row,
                                                int head,
                                                int feature,
                                                int which,
                                                float first,
                                                float second) {
  if (row >= args.num_rows)
    return;
  const float scale = kSources ? 1.0f : numbers_of(args, row, head).scale;
  const float values[2] = {first * scale, second * scale};
  T* out = static_cast<T*>(args.out[which]) +
           (static_cast<int64_t>(row) * args.heads + head) * args.width + feature;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (feature + i >= args.width)
      break;
    const float value = isfinite(values[i])
                            ? values[i]
                            : repeat_gradient<T, kSources>(args, row, head, feature + i, which);
    out[i] = from_float<T>(value);
  }
}

template <typename T, int kDepth, bool kSources>
struct BackwardShape {
  static constexpr int kMatrix = kTileColumns * kDepth * sizeof(T);   // bytes of a tile's matrix
  static constexpr int kOwn = kAttentionWindow * kDepth * sizeof(T);  // of a window's
  static constexpr int kNumbers = kSources ? kTileColumns * sizeof(TargetNumbers) : 0;
  static constexpr int kStage = 2 * kMatrix + kNumbers;
  static constexpr int kMemory = 2 * kOwn + kAttentionStages * kStage;
  static constexpr int kSums = kSources ? 2 : 1;
  static constexpr int kPartial = kSources ? 2 * kDepth : kDepth + 2;
  static constexpr int kResident = kDepth == 128 ? 2 : kDepth == 64 ? 3 : 4;
};

template <typename T, int kDepth, bool kSources>
__global__ void __launch_bounds__(32 * kAttentionWarps,
                                  BackwardShape<T, kDepth, kSources>::kResident)
    attention_backward_kernel(const __grid_constant__ AttentionBackwardArgs args) {
  using Shape = BackwardShape<T, kDepth, kSources>;
  constexpr int kSteps = kDepth / 16;        // of the first products
  constexpr int kBlocks = kTileColumns / 8;  // of columns
  constexpr int kFeatures = kDepth / 8;      // blocks of features
  extern __shared__ uint4 memory[];
  const uint32_t own = shared_address(memory), ring = own + 2 * Shape::kOwn;
  const Item item = args.items[blockIdx.x];
  const int head = blockIdx.y;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int row0 = item.window * kAttentionWindow + 16 * warp + g;  // and row0 + 8

  const auto column_of = [&](int tile) {
    return args.col[static_cast<int64_t>(min(tile, item.end - 1)) * kTileColumns + copied_row()];
  };
  const auto copy = [&](int tile, int stage, int column) {
    if (tile < item.end) {
      const uint32_t to = ring + stage * Shape::kStage;
      copy_pair<T, kDepth>(to, row_of<T>(args.other[0], column, head),
                           row_of<T>(args.other[1], column, head), args.padded);
      if (kSources && (threadIdx.x & 3) == 0) {
        const int64_t place = static_cast<int64_t>(column) * args.heads + head;
        copy_async(to + 2 * Shape::kMatrix + copied_row() * sizeof(TargetNumbers),
                   reinterpret_cast<uint64_t>(args.numbers + place));
      }
    }
    commit_copies();
  };
  const auto mask_of = [&](int tile, int half) {
    const int64_t at = static_cast<int64_t>(min(tile, item.end - 1)) * kAttentionWindow;
    return args.masks[at + 16 * warp + g + 8 * half];
  };
  // Of the window's matrices, the rows of this warp as a left factor.
  const auto load_own = [&](uint32_t (&to)[4], int which, int step) {
    const int place = chunk_place<kDepth>(16 * warp + (lane & 15), 2 * step + (lane >> 4));
    load_matrices(to, own + which * Shape::kOwn + place);
  };

  float sum[Shape::kSums][kFeatures][4] = {};
  float dots[2] = {};
  if (item.begin < item.end) {
    if (args.padded < kDepth) {  // what is not copied must be zero
      for (int i = threadIdx.x; i < Shape::kMemory / 16; i += blockDim.x)
        memory[i] = make_uint4(0, 0, 0, 0);
      __syncthreads();
    }
    for (int i = threadIdx.x; i < 2 * kAttentionWindow * kFeatures; i += blockDim.x) {
      const int chunk = i % kFeatures, row = i / kFeatures % kAttentionWindow;
      const int which = i / kFeatures / kAttentionWindow;
      const int global = item.window * kAttentionWindow + row;
      if (global < args.num_rows && 8 * chunk < args.padded) {
        const T* from = row_of<T>(args.own[which], global, head) + 8 * chunk;
        copy_async(own + which * Shape::kOwn + chunk_place<kDepth>(row, chunk),
                   reinterpret_cast<uint64_t>(from));
      }
    }
    TargetNumbers mine[2] = {};
    if constexpr (!kSources) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (row0 + 8 * half < args.num_rows)
          mine[half] = numbers_of(args, row0 + 8 * half, head);
    }
    int column = column_of(item.begin);
#pragma unroll
    for (int i = 0; i < kAttentionStages - 1; ++i) {  // the window's rows come with the first
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
      const uint32_t first = ring + stage * Shape::kStage, second = first + Shape::kMatrix;
      const TargetNumbers* const theirs = reinterpret_cast<const TargetNumbers*>(
          reinterpret_cast<const char*>(memory) + 2 * Shape::kOwn + stage * Shape::kStage +
          2 * Shape::kMatrix);

      float dot[kBlocks][4] = {}, inner[kBlocks][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          load_own(a[i], 0, s + i);
          load_own(b[i], 1, s + i);
        }
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          const int place = chunk_place<kDepth>(8 * j + (lane & 7), 2 * s + (lane >> 3));
          uint32_t x[4], y[4];
          load_matrices(x, first + place);
          Mma<T>::multiply(dot[j], a[0], x[0], x[1]);
          Mma<T>::multiply(dot[j], a[1], x[2], x[3]);
          load_matrices(y, second + place);
          Mma<T>::multiply(inner[j], b[0], y[0], y[1]);
          Mma<T>::multiply(inner[j], b[1], y[2], y[3]);
        }
      }

      // Of the block j a lane has the columns 8 j + 2 t and the next, of both its rows. From here
      // on `inner` is what the first matrix is multiplied by, and `dot` what the second is.
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 8 * j + 2 * t + (i & 1);
          const bool edge = now[i >> 1] >> at & 1;
          const TargetNumbers target = kSources ? theirs[at] : mine[i >> 1];
          const float p = edge ? exp2f(dot[j][i] * target.power - target.total) : 0.0f;
          const float of_score = edge ? p * (inner[j][i] - target.delta) : 0.0f;
          if constexpr (kSources) {
            inner[j][i] = of_score * target.scale;
            dot[j][i] = p;
          } else {
            if (edge)
              dots[i >> 1] += of_score * dot[j][i];
            inner[j][i] = of_score;
          }
        }
      }
#pragma unroll
      for (int which = 0; which < Shape::kSums; ++which) {
        const float (&factor)[kBlocks][4] = which ? dot : inner;
        const uint32_t rows = which ? second : first;
#pragma unroll
        for (int s = 0; s < kTileColumns / 16; ++s) {
          const uint32_t p[4] = {pack(factor[2 * s][0], factor[2 * s][1], T()),
                                 pack(factor[2 * s][2], factor[2 * s][3], T()),
                                 pack(factor[2 * s + 1][0], factor[2 * s + 1][1], T()),
                                 pack(factor[2 * s + 1][2], factor[2 * s + 1][3], T())};
#pragma unroll
          for (int f = 0; f < kFeatures; f += 2) {
            uint32_t x[4];
            load_transposed(x, rows + chunk_place<kDepth>(16 * s + (lane & 15), f + (lane >> 4)));
            Mma<T>::multiply(sum[which][f], p, x[0], x[1]);
            Mma<T>::multiply(sum[which][f + 1], p, x[2], x[3]);
          }
        }
      }
      old = stage;
      if (++stage == kAttentionStages)
        stage = 0;
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (!kSources) {
      dots[half] += __shfl_xor_sync(kWarp, dots[half], 1);
      dots[half] += __shfl_xor_sync(kWarp, dots[half], 2);
    }
    const int row = row0 + 8 * half;
    const int64_t place = static_cast<int64_t>(item.partial) * args.heads + head;
    float* const partial =
        args.partial + (place * kAttentionWindow + 16 * warp + g + 8 * half) * Shape::kPartial;
#pragma unroll
    for (int which = 0; which < Shape::kSums; ++which) {
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) {
        const float low = sum[which][f][2 * half], high = sum[which][f][2 * half + 1];
        if (item.partial < 0)
          finish_gradient<T, kSources>(args, row, head, 8 * f + 2 * t, which, low, high);
        else
          *reinterpret_cast<float2*>(partial + which * kDepth + 8 * f + 2 * t) =
              make_float2(low, high);
      }
    }
    if (!kSources && t == 0) {
      if (item.partial >= 0)
        partial[kDepth] = dots[half];
      else if (row < args.num_rows)
        args.dots[static_cast<int64_t>(row) * args.heads + head] = dots[half];
    }
  }
}

// Adds the parts of divided windows, in order: a block has one row of one window and head.
template <typename T, int kDepth, bool kSources>
__global__ void attention_backward_combine_kernel(
    const __grid_constant__ AttentionBackwardArgs args) {
  using Shape = BackwardShape<T, kDepth, kSources>;
  const Split split = args.splits[blockIdx.x];
  const int head = blockIdx.z, feature = 2 * threadIdx.x;
  const int row = split.window * kAttentionWindow + blockIdx.y;
  float sum[Shape::kSums][2] = {}, dots = 0.0f;
  for (int part = 0; part < split.count; ++part) {
    const int64_t place = static_cast<int64_t>(split.first + part) * args.heads + head;
    const float* from = args.partial + (place * kAttentionWindow + blockIdx.y) * Shape::kPartial;
#pragma unroll
    for (int which = 0; which < Shape::kSums; ++which) {
      const float2 x = *reinterpret_cast<const float2*>(from + which * kDepth + feature);
      sum[which][0] += x.x;
      sum[which][1] += x.y;
    }
    if (!kSources)
      dots += from[kDepth];
  }
#pragma unroll
  for (int which = 0; which < Shape::kSums; ++which)
    finish_gradient<T, kSources>(args, row, head, feature, which, sum[which][0], sum[which][1]);
  if (!kSources && threadIdx.x == 0 && row < args.num_rows)
    args.dots[static_cast<int64_t>(row) * args.heads + head] = dots;
}

template <typename T>
void launch_target_numbers(const TargetNumbersArgs& args, cudaStream_t stream) {
  constexpr int kWarps = 8;
  const int64_t blocks = (args.targets * args.heads + kWarps - 1) / kWarps;
  if (blocks == 0)
    return;
  target_numbers_kernel<T><<<static_cast<unsigned>(blocks), 32 * kWarps, 0, stream>>>(args);
  check_launch("numbers of targets");
}

template <typename T, int kDepth, bool kSources>
void launch_attention_backward(const AttentionBackwardArgs& args, cudaStream_t stream) {
  using Shape = BackwardShape<T, kDepth, kSources>;
  if (args.num_items) {
    const auto kernel = attention_backward_kernel<T, kDepth, kSources>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kMemory),
          "shared memory for the gradient of attention");
    const dim3 grid(args.num_items, args.heads);
    kernel<<<grid, 32 * kAttentionWarps, Shape::kMemory, stream>>>(args);
    check_launch("gradient of attention");
  }
  if (args.num_splits) {
    const auto kernel = attention_backward_combine_kernel<T, kDepth, kSources>;
    const dim3 grid(args.num_splits, kAttentionWindow, args.heads);
    kernel<<<grid, kDepth / 2, 0, stream>>>(args);
    check_launch("gradient of attention, combined");
  }
}

template <typename T, bool kSources>
void launch_attention_backward(int depth, const AttentionBackwardArgs& args, cudaStream_t stream) {
  switch (depth) {
    case 32:
      return launch_attention_backward<T, 32, kSources>(args, stream);
    case 64:
      return launch_attention_backward<T, 64, kSources>(args, stream);
    case 128:
      return launch_attention_backward<T, 128, kSources>(args, stream);
    default:
      throw std::invalid_argument("expected heads of 32, 64 or 128 features");
  }
}

template <typename T>
void launch_attention_backward(int depth, const AttentionBackwardArgs& args, cudaStream_t stream) {
  if (args.sources)
    launch_attention_backward<T, true>(depth, args, stream);
  else
    launch_attention_backward<T, false>(depth, args, stream);
}

}  // namespace pyg_accel
