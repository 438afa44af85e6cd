// csrc/cuda/device.h for a processor.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "cuda_runtime.h"

#define PYG_ACCEL_DEVICE CPU

namespace pyg_accel {

inline bool is_on_device(const torch::stable::Tensor& t) {
  return t.is_cpu();
}
inline int guard_of(const torch::stable::Tensor&) {
  return 0;
}
inline cudaStream_t stream_of(const torch::stable::Tensor&) {
  return nullptr;
}

}  // namespace pyg_accel
