// Tensor Core instructions, and how the numbers of a warp's fragments are laid out.
//
// A warp multiplies a 16 x kDepth block of A by a kDepth x 8 block of B. Lane 4 g + t holds of A
// the rows g and g + 8, of B the column g, of the result the rows g, g + 8 and columns 2 t, 2 t
// + 1.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/rounded.cuh"

namespace pyg_accel {

template <typename T>
struct Mma {
  static constexpr int kDepth = 32 / sizeof(T);   // of the instruction
  static constexpr int kVector = 16 / sizeof(T);  // elements of a 16-byte load

  static __device__ __forceinline__ void multiply(float (&c)[4],
                                                  const uint32_t (&a)[4],
                                                  uint32_t b0,
                                                  uint32_t b1) {
#define PYG_ACCEL_MMA(shape_and_types)                                                             \
  asm("mma.sync.aligned." shape_and_types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (std::is_same_v<T, float>)
      PYG_ACCEL_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
    else if constexpr (std::is_same_v<T, __nv_bfloat16>)
      PYG_ACCEL_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
    else
      PYG_ACCEL_MMA("m16n8k16.row.col.f32.f16.f16.f32");
#undef PYG_ACCEL_MMA
  }
};

// The nearest tf32: 8 bits of exponent, 10 of mantissa.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// The same in one instruction: Tensor Cores drop the bits below tf32, so values are moved away from
// zero first, by 0.35 to 0.7 of the last bit. Values in tf32 are unchanged.
__device__ __forceinline__ uint32_t almost_tf32(uint32_t value) {
  return __float_as_uint(__uint_as_float(value) * 1.00034179688f);
}

// value = high + low, with 22 significant bits; an infinity or NaN makes the low part NaN.
__device__ __forceinline__ void split_tf32(uint32_t value, uint32_t& high, uint32_t& low) {
  const float whole = __uint_as_float(value);  // `high` may be where `value` is
  high = value & 0xffffe000u;
  low = __float_as_uint(whole - __uint_as_float(high));
}

}  // namespace pyg_accel
