// A step of the SpMM: the columns of a tile that one instruction takes, times their rows of X.
#pragma once

#include "cuda/kernels.h"
#include "cuda/mma.cuh"

namespace pyg_accel {

template <typename T, int kBlocks, bool kExact>
__device__ __forceinline__ void multiply_step(const SpmmArgs& args,
                                              const T* tile,
                                              int step,
                                              int lane,
                                              const uint4 (&x)[Mma<T>::kDepth / 4],
                                              float (&sum)[kBlocks][Mma<T>::kVector][4]) {
  constexpr int kVector = Mma<T>::kVector;
  const uint4* fragments = reinterpret_cast<const uint4*>(tile) + step * kBlocks * 32 + lane;
  uint32_t b0[kVector], b1[kVector], low0[kVector], low1[kVector];
  if constexpr (sizeof(T) == 4) {
    const uint32_t words[2][4] = {{x[0].x, x[0].y, x[0].z, x[0].w},
                                  {x[1].x, x[1].y, x[1].z, x[1].w}};
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if constexpr (kExact) {
        split_tf32(words[0][j], b0[j], low0[j]);
        split_tf32(words[1][j], b1[j], low1[j]);
      } else {
        b0[j] = almost_tf32(words[0][j]);
        b1[j] = almost_tf32(words[1][j]);
      }
    }
  } else {  // pairs of rows 2 t, 2 t + 1, and 8 further on
    const uint32_t words[4][4] = {{x[0].x, x[0].y, x[0].z, x[0].w},
                                  {x[1].x, x[1].y, x[1].z, x[1].w},
                                  {x[2].x, x[2].y, x[2].z, x[2].w},
                                  {x[3].x, x[3].y, x[3].z, x[3].w}};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      b0[2 * q] = __byte_perm(words[0][q], words[1][q], 0x5410);
      b0[2 * q + 1] = __byte_perm(words[0][q], words[1][q], 0x7632);
      b1[2 * q] = __byte_perm(words[2][q], words[3][q], 0x5410);
      b1[2 * q + 1] = __byte_perm(words[2][q], words[3][q], 0x7632);
    }
  }
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    const uint4 raw = fragments[m * 32];
    uint32_t a[4] = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (kExact) {
      uint32_t low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        split_tf32(a[i], a[i], low[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        Mma<T>::multiply(sum[m][j], a, low0[j], low1[j]);
      if (args.value) {  // weights of 1 have no low part
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          Mma<T>::multiply(sum[m][j], low, b0[j], b1[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      Mma<T>::multiply(sum[m][j], a, b0[j], b1[j]);
  }
}

}  // namespace pyg_accel
