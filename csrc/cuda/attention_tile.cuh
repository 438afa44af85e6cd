// What both passes of attention over tiles are made of: fragments of 16-bit numbers, and the rows
// that a tile's columns name, in shared memory.
#pragma once

#include "cuda/attention.h"
#include "cuda/mma.cuh"
#include "cuda/pipeline.cuh"

namespace pyg_accel {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionStages = 3;  // tiles' rows in shared memory
constexpr unsigned kWarp = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Where a 16-byte chunk of row `row` lies in shared memory: eight rows' chunks in eight banks.
template <int kDepth>
__device__ __forceinline__ int chunk_place(int row, int chunk) {
  constexpr int kChunks = kDepth / 8;
  const int turn = kChunks >= 8 ? row & 7 : (row >> 1) & (kChunks - 1);
  return (row * kChunks + (chunk ^ turn)) * 16;
}

// Four threads copy a row of each of two matrices: which row of a tile is this thread's?
__device__ __forceinline__ int copied_row() {
  return threadIdx.x >> 2;
}

template <typename T, int kDepth>
__device__ __forceinline__ void copy_pair(uint32_t to,
                                          const T* first,
                                          const T* second,
                                          int padded) {
  constexpr uint32_t kBytes = kTileColumns * kDepth * sizeof(T);
  const int part = threadIdx.x & 3;
#pragma unroll
  for (int c = part; c < kDepth / 8; c += 4) {
    if (8 * c < padded) {
      const uint32_t place = to + chunk_place<kDepth>(copied_row(), c);
      copy_async(place, reinterpret_cast<uint64_t>(first + 8 * c));
      copy_async(place + kBytes, reinterpret_cast<uint64_t>(second + 8 * c));
    }
  }
}

// A row's features in a head.
template <typename T>
__device__ __forceinline__ const T* row_of(const Heads& matrix, int64_t row, int head) {
  return static_cast<const T*>(matrix.data) + row * matrix.stride + head * matrix.head;
}

}  // namespace pyg_accel
