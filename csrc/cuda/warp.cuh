// Operations outside of C++: launches, shared memory by its address, and single
// instructions. tests/cuda_on_cpu has another version of this file.
#pragma once

#include <type_traits>

#include "cuda/check.cuh"

namespace pyg_accel {

constexpr int kBlockThreads = 256;  // of a block whose warps wait for one another

template <typename... Args>
void launch_kernel(const char* what,
                   void (*kernel)(Args...),
                   dim3 blocks,
                   int threads,
                   int shared_bytes,
                   cudaStream_t stream,
                   const std::type_identity_t<Args>&... args) {
  if (shared_bytes > 0)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          what);
  kernel<<<blocks, threads, shared_bytes, stream>>>(args...);
  check_launch(what);
}

__device__ inline float4* shared_memory() {
  extern __shared__ float4 shared[];
  return shared;
}

// Shared memory by its address: no sum of a base and an offset at every access.
__device__ inline uint32_t address_of(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ inline float load_shared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ inline void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// Store {first, second} at an address and move on if `key` is at least `least`.
__device__ inline void store_if(uint32_t key,
                                uint32_t least,
                                uint32_t first,
                                uint32_t second,
                                uint32_t& address) {
  asm volatile(
      "{ .reg .pred p; setp.ge.u32 p, %1, %2; @p st.shared.v2.b32 [%0], {%3, %4};\n\t"
      "@p add.u32 %0, %0, 8; }"
      : "+r"(address)
      : "r"(key), "r"(least), "r"(first), "r"(second)
      : "memory");
}

// Count if `key` is at least `least`: two instructions, where C++ makes three.
__device__ inline void count_if(uint32_t key, uint32_t least, int& count) {
  asm("{ .reg .pred p; setp.ge.u32 p, %1, %2; @p add.s32 %0, %0, 1; }"
      : "+r"(count)
      : "r"(key), "r"(least));
}

// Approximately.
__device__ inline float log2_of(float x) {
  float out;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ inline float inverse_of(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// Add four floats atomically, each by itself.
__device__ inline void add_four(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    atomicAdd(to + i, x[i]);
#endif
}

}  // namespace pyg_accel
