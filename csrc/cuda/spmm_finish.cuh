// The end of the SpMM: sums are added up over divided windows, scaled and stored.
#pragma once

#include "cuda/kernels.h"
#include "cuda/mma.cuh"

namespace pyg_accel {

template <typename T>
__device__ __noinline__ float repeat_element(const SpmmArgs& args, int row, int feature) {
  const T* x = static_cast<const T*>(args.x);
  const T* weight = static_cast<const T*>(args.weight);
  float sum = 0.0f;
  for (int32_t e = args.rowptr[row]; e < args.rowptr[row + 1]; ++e) {
    const float value = static_cast<float>(x[args.csr_col[e] * args.x_stride + feature]);
    sum += weight ? static_cast<float>(weight[args.eid ? args.eid[e] : e]) * value : value;
  }
  return sum;
}

// Adds the current values of the output to the sums of neighbouring features of a row.
template <typename T, int kCount>
__device__ __forceinline__ void add_output(const SpmmArgs& args,
                                           const T* out,
                                           int feature,
                                           float (&sum)[kCount]) {
  constexpr int kVector = Mma<T>::kVector;
  alignas(16) T value[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    value[i] = rounded<T>(0.0f);
  if (args.width == args.padded) {
#pragma unroll
    for (int i = 0; i < kCount; i += kVector)
      if (feature + i < args.width)
        *reinterpret_cast<uint4*>(value + i) = *reinterpret_cast<const uint4*>(out + i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (feature + i < args.width)
        value[i] = out[i];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    sum[i] += static_cast<float>(value[i]);
}

// Writes neighbouring features of a row: scaled, and computed again if not finite.
template <typename T, int kCount>
__device__ __forceinline__ void finish(const SpmmArgs& args,
                                       int row,
                                       int feature,
                                       float (&sum)[kCount]) {
  constexpr int kVector = Mma<T>::kVector;
  if (row >= args.num_rows || feature >= args.width)
    return;
  float scale = 1.0f;
  if (args.mean) {
    const int degree = args.rowptr[row + 1] - args.rowptr[row];
    scale = degree > 0 ? static_cast<float>(degree) : 1.0f;
  }
  T* out = static_cast<T*>(args.out) + static_cast<int64_t>(row) * args.width + feature;
  if (args.add)
    add_output<T>(args, out, feature, sum);
  alignas(16) T value[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!isfinite(sum[i]) && feature + i < args.width)
      sum[i] = repeat_element<T>(args, row, feature + i);
    value[i] = rounded<T>(args.mean ? sum[i] / scale : sum[i]);
  }
  if (args.width == args.padded) {  // whole vectors
#pragma unroll
    for (int i = 0; i < kCount; i += kVector)
      if (feature + i < args.width)
        *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(value + i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (feature + i < args.width)
        out[i] = value[i];
  }
}

// Adds the partial sums of divided windows, in order: a block has one row of one window.
template <typename T, int kBlocks>
__global__ void combine_kernel(const __grid_constant__ SpmmArgs args) {
  constexpr int kWindow = 16 * kBlocks;
  constexpr int kVector = Mma<T>::kVector;
  const Split split = args.splits[blockIdx.x];
  const int local = blockIdx.y;
  for (int feature = threadIdx.x * kVector; feature < args.padded;
       feature += blockDim.x * kVector) {
    float sum[kVector] = {};
    for (int part = 0; part < split.count; ++part) {
      const int64_t at = static_cast<int64_t>(split.first + part) * kWindow + local;
      const float* from = args.partial + at * args.padded + feature;
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        sum[i] += from[i];
    }
    finish<T>(args, split.window * kWindow + local, feature, sum);
  }
}

}  // namespace pyg_accel
