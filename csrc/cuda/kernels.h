// The CUDA kernels as the bindings see them: plain pointers, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pyg_accel {

// Features and edge data, in the order that the bindings number them.
enum class Scalar { kFloat, kBFloat16, kHalf };

// out[i] = values[order[i]], or values[eid[order[i]]] with eid.
struct TakeArgs {
  const void* values;
  const void* order;
  const void* eid;
  void* out;
  int64_t count;
  int bytes;  // of a value: 2, 4 or 8
  bool wide;  // order and eid are int64
};

void take_cuda(const TakeArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
