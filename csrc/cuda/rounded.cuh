// A float as the dtype that results are stored in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace pyg_accel {

template <typename T>
__device__ inline T rounded(float x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(x);
  else
    return x;
}

}  // namespace pyg_accel
