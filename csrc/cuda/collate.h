// Parts of tensors that become a batch, as the bindings see them: plain pointers, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pyg_accel {

// Parts of a launch. Their places are arguments of the kernel, of which 4 KiB are allowed: a copy
// of them to the device would take longer than all else, and wait for it.
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
  int32_t each;               // numbers to add to a part: 0, 1, or 2, where `outer` is 2
  int32_t begin[kParts + 1];  // entries behind the first before each part
  int64_t from[kParts];       // its first entry in the value
  int64_t shift[2 * kParts];  // what is added to int64 entries
};

void take_parts_cuda(const PartsArgs& args, cudaStream_t stream);

// Some groups of entries.
struct GroupsArgs {
  int64_t* group;  // [total], of each entry
  int64_t* ptr;    // [groups + 1], where each group begins, and the last ends
  int64_t first;   // number of the first group
  int32_t count;
  int64_t begin[kParts + 1];
};

void ptr2index_cuda(const GroupsArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
