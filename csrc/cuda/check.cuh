// Errors of the CUDA runtime as exceptions, which the bindings pass on to torch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace pyg_accel {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline void check_launch(const char* what) {
  check(cudaGetLastError(), what);
}

}  // namespace pyg_accel
