// Which device the library is for. tests/cuda_on_cpu has another version of this file.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#define PYG_ACCEL_DEVICE CUDA

// Declared by torch's header only where torch itself was built with CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace pyg_accel {

inline bool is_on_device(const torch::stable::Tensor& t) {
  return t.is_cuda();
}

inline torch::stable::accelerator::DeviceGuard guard_of(const torch::stable::Tensor& t) {
  return torch::stable::accelerator::DeviceGuard(t.get_device_index());
}

inline cudaStream_t stream_of(const torch::stable::Tensor& t) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == 0,
                  "cannot tell the current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

}  // namespace pyg_accel
