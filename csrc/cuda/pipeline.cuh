// Asynchronous copies into shared memory (PTX cp.async), and barriers there through which warps
// hand tiles to one another (PTX mbarrier).
#pragma once

#include <cstdint>

namespace pyg_accel {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies the first so many of 16 bytes, past the L1, and writes zeros for the others.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_async(uint32_t to, uint64_t from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Row `row` of features whose rows are `stride` bytes apart: one instruction.
__device__ __forceinline__ uint64_t row_address(uint64_t base, uint32_t row, uint32_t stride) {
  uint64_t address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(stride), "l"(base));
  return address;
}

// Keeps the compiler from computing a value again wherever it is used.
__device__ __forceinline__ void keep(uint32_t& value) {
  asm("" : "+r"(value));
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most so many groups of this thread's copies are on their way.
template <int kGroups>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// Waiting threads see the earlier writes of this thread. (One lane for a warp, after __syncwarp,
// would do as well and is no faster; but racecheck does not follow it.)
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
      : "memory");
}

// Waits until the phase of this parity is over; the first phase has parity 0.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#endif
  }
}

}  // namespace pyg_accel
