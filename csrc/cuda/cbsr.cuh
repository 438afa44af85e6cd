// Shared by the kernels on CBSR features: the layout of a row of features in shared memory.
//
// A warp takes 32 / kLanes edges at a time, kLanes lanes each, and every group of lanes has a copy
// of the row to itself, in kLanes banks of its own. Bank b of a copy holds a range of 2^shift
// consecutive columns. The columns of a CBSR row ascend, and a lane takes a range of its slots, one
// in each step. So a step takes every so-many-th slot: a sample spread over all columns, hence over
// all banks, where 32 neighbouring slots would meet by chance. With k = 32 of 256 a step then
// takes 2.1 cycles of shared memory for 32 features instead of 3.3.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/cbsr.h"
#include "cuda/rounded.cuh"
#include "cuda/warp.cuh"

namespace pyg_accel {

constexpr int kQuad = 4;  // slots that are read at once

// Four elements as they are read: words, taken apart where they are used.
template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  uint32_t word[sizeof(T)];

  __device__ uint32_t bits(int i) const {
    return word[i * sizeof(T) / 4] >> (i * sizeof(T) % 4 * 8) &
           (0xffffffffu >> (32 - 8 * sizeof(T)));
  }
};

template <typename T>
__device__ inline Quad<T> load_row(const void* base, uint32_t row, uint32_t stride, int slot) {
  const T* begin = static_cast<const T*>(base) + slot;
  return *reinterpret_cast<const Quad<T>*>(begin + static_cast<uint64_t>(row) * stride);
}

template <typename T>
__device__ inline T value_of(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>)
    return __ushort_as_half(static_cast<uint16_t>(bits));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __ushort_as_bfloat16(static_cast<uint16_t>(bits));
  else
    return __uint_as_float(bits);
}

template <typename T>
__device__ inline uint32_t bits_of(T x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half_as_ushort(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat16_as_ushort(x);
  else
    return __float_as_uint(x);
}

template <typename T>
__device__ inline float float_of(uint32_t bits) {
  return static_cast<float>(value_of<T>(bits));
}

template <typename T>
struct alignas(4 * sizeof(T)) Rounded {
  T at[kQuad];
};

template <typename T>
__device__ inline void store_quad(T* out, const float (&x)[kQuad]) {
  Rounded<T> quad;
#pragma unroll
  for (int i = 0; i < kQuad; ++i)
    quad.at[i] = rounded<T>(x[i]);
  *reinterpret_cast<Rounded<T>*>(out) = quad;
}

// The addresses of a quad's columns in shared memory, from the start of the copy of the lane's
// group; kNowhere for columns outside of the `size` columns from `first`.
struct Places {
  uint32_t address[kQuad];
};

constexpr uint32_t kNowhere = ~0u;

__device__ inline Places places_of(const Quad<uint8_t>& columns,
                                   uint32_t copy,
                                   int shift,
                                   int,
                                   int) {
  // There are 256 at most, and all fit. All four at once: depth within the bank and bank, then
  // 128 * depth + 4 * bank.
  const uint32_t word = columns.word[0];
  const uint32_t depth = word & (0x01010101u * ((1u << shift) - 1));
  const uint32_t bank = word >> shift & (0x01010101u * (0xffu >> shift));
  Places places;
#pragma unroll
  for (int i = 0; i < kQuad; ++i)
    places.address[i] = __dp4a(depth, 128u << (8 * i), __dp4a(bank, 4u << (8 * i), copy));
  return places;
}

__device__ inline Places places_of(const Quad<uint16_t>& columns,
                                   uint32_t copy,
                                   int shift,
                                   int first,
                                   int size) {
  Places places;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const uint32_t column = columns.bits(i) - first;
    places.address[i] = (column & ((1u << shift) - 1)) * 128 + (column >> shift) * 4 + copy;
    if (column >= static_cast<uint32_t>(size))
      places.address[i] = kNowhere;
  }
  return places;
}

// The row or piece of a warp, or nothing. Pieces come first, since they take longest.
struct Task {
  int64_t row;
  int32_t begin, end;
  bool piece;

  __device__ bool find(const Rows& rows, int64_t task) {
    piece = task < rows.pieces;
    if (piece) {
      row = rows.row[task];
      begin = rows.begin[task];
      end = rows.end[task];
      return true;
    }
    row = task - rows.pieces;
    if (row >= rows.rows)
      return false;
    begin = rows.rowptr[row];
    end = rows.rowptr[row + 1];
    return end - begin <= rows.limit;
  }
};

inline unsigned blocks_of(const Rows& rows, int warps) {
  return (static_cast<unsigned>(rows.rows) + static_cast<unsigned>(rows.pieces) + warps - 1) /
         warps;
}

}  // namespace pyg_accel
