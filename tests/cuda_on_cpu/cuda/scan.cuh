// csrc/cuda/scan.cuh for a processor.
#pragma once

#include <numeric>

#include "cuda/allocate.h"
#include "cuda_runtime.h"

namespace pyg_accel {

template <typename T>
void exclusive_sum(T* data, int64_t count, const Allocate&, cudaStream_t) {
  std::exclusive_scan(data, data + count, data, T{0});
}

}  // namespace pyg_accel
