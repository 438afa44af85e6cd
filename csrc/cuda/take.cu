// Edge data in the order of the tiles. Entries of a tile belong to a few neighbouring rows, so the
// gather stays within a window of the source and mostly hits the caches.
#include "cuda/check.cuh"
#include "cuda/kernels.h"

namespace pyg_accel {
namespace {

constexpr int kThreads = 256;

template <typename Value, typename Index>
__global__ void take_kernel(const Value* __restrict__ values,
                            const Index* __restrict__ order,
                            const Index* __restrict__ eid,
                            Value* __restrict__ out,
                            int64_t count) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count)
    return;
  const Index from = order[at];
  out[at] = values[eid ? eid[from] : from];
}

template <typename Value, typename Index>
void launch(const TakeArgs& args, cudaStream_t stream) {
  const int64_t blocks = (args.count + kThreads - 1) / kThreads;
  take_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const Value*>(args.values), static_cast<const Index*>(args.order),
      static_cast<const Index*>(args.eid), static_cast<Value*>(args.out), args.count);
  check_launch("take");
}

template <typename Value>
void launch(const TakeArgs& args, cudaStream_t stream) {
  args.wide ? launch<Value, int64_t>(args, stream) : launch<Value, int32_t>(args, stream);
}

}  // namespace

void take_cuda(const TakeArgs& args, cudaStream_t stream) {
  if (args.count == 0)
    return;
  if (args.bytes == 2)
    launch<uint16_t>(args, stream);
  else if (args.bytes == 4)
    launch<uint32_t>(args, stream);
  else
    launch<uint64_t>(args, stream);
}

}  // namespace pyg_accel
