// Plain types shared by the operators and the kernels of every instruction set.
#pragma once

#include <bit>
#include <cstdint>

namespace pyg_accel {

// 16-bit storage types. Arithmetic is in fp32 (vec.h), so they only have bits.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

enum class DType : int { kFloat = 0, kDouble = 1, kBFloat16 = 2, kHalf = 3 };
inline constexpr int kDTypes = 4;

inline uint16_t float_to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((u >> 16) | 0x40u);  // a NaN stays a (quiet) NaN
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);  // nearest, ties to even
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t body = static_cast<uint32_t>(h & 0x7fffu) << 13;
  if (body >= 0x0f800000u)  // inf and NaN keep an all-ones exponent
    return std::bit_cast<float>(sign | 0x70000000u | body);
  // Multiplying by 2^112 moves the exponent bias from 15 to 127 and renormalises subnormals.
  return std::bit_cast<float>(sign |
                              std::bit_cast<uint32_t>(std::bit_cast<float>(body) * 0x1p112f));
}

inline uint16_t float_to_half(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t abs = u & 0x7fffffffu;
  if (abs > 0x7f800000u)
    return sign | 0x7e00u;
  if (abs >= 0x477ff000u)  // at or above 65520: rounds to infinity
    return sign | 0x7c00u;
  if (abs < 0x38800000u) {  // below 2^-14: a subnormal; adding 0.5 lets the FPU round at bit 2^-24
    const float shifted = std::bit_cast<float>(abs) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = abs + 0xfffu + ((abs >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

}  // namespace pyg_accel
