// csrc/cuda/warp.cuh for a processor. Addresses of shared memory count from its beginning.
#pragma once

#include "cuda_runtime.h"

namespace pyg_accel {

constexpr int kBlockThreads = 32;  // warps run one after another

template <typename... Args>
void launch_kernel(const char*,
                   void (*kernel)(Args...),
                   dim3 blocks,
                   int threads,
                   int shared_bytes,
                   cudaStream_t,
                   const std::type_identity_t<Args>&... args) {
  fibers::run(blocks, threads, shared_bytes, [&] { kernel(args...); });
}

inline float4* shared_memory() {
  return reinterpret_cast<float4*>(fibers::shared);
}

inline uint32_t address_of(const void* shared) {
  return static_cast<uint32_t>(static_cast<const char*>(shared) - fibers::shared);
}

inline float load_shared(uint32_t address) {
  return *reinterpret_cast<const float*>(fibers::shared + address);
}

inline void store_shared(uint32_t address, float x) {
  *reinterpret_cast<float*>(fibers::shared + address) = x;
}

inline void store_if(uint32_t key,
                     uint32_t least,
                     uint32_t first,
                     uint32_t second,
                     uint32_t& address) {
  if (key < least)
    return;
  *reinterpret_cast<uint2*>(fibers::shared + address) = {first, second};
  address += 8;
}

inline void count_if(uint32_t key, uint32_t least, int& count) {
  count += key >= least;
}

inline float log2_of(float x) {
  return std::log2(x);
}
inline float inverse_of(float x) {
  return 1 / x;
}

inline void add_four(float* to, const float (&x)[4]) {
  for (int i = 0; i < 4; ++i)
    to[i] += x[i];
}

}  // namespace pyg_accel
