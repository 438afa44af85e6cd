// Sums of all elements in front of each. tests/cuda_on_cpu has another version of this file.
#pragma once

#define CCCL_DISABLE_NVTX  // it would look for a profiler's library
#include <cub/device/device_scan.cuh>

#include "cuda/allocate.h"
#include "cuda/check.cuh"

namespace pyg_accel {

// In place.
template <typename T>
void exclusive_sum(T* data, int64_t count, const Allocate& allocate, cudaStream_t stream) {
  size_t bytes = 0;
  check(cub::DeviceScan::ExclusiveSum(nullptr, bytes, data, data, count, stream), "scan");
  void* scratch = allocate(bytes);
  check(cub::DeviceScan::ExclusiveSum(scratch, bytes, data, data, count, stream), "scan");
}

}  // namespace pyg_accel
