// Parts of tensors that become a batch, as the bindings see them: plain pointers, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pyg_accel {

// Parts of a launch. Their places are kernel arguments, at most 4 KiB: copying them to the device
// would take longer than the rest, and wait for it.
constexpr int kParts = 128;

// Some parts of a tensor along one of its dimensions, copied behind each other.
struct PartsArgs {
  const void* value;  // [outer, size, inner]
  void* out;          // [outer, total, inner]
  int64_t outer;
  int64_t size;
  int64_t total;
  int64_t inner;  // bytes
  int64_t first;  // entries of the result before these parts
  int32_t count;
  bool shifted;
  int32_t begin[kParts + 1];  // entries behind the first before each part
  int64_t from[kParts];       // its first entry in the value
  int64_t shift[kParts];      // added to int64 entries, if `shifted`
};

void take_parts_cuda(const PartsArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
