// Edge data in the order of the tiles, and back. Entries of a tile belong to a few neighbouring
// rows, so the gather stays within a window of the source and mostly hits the caches.
#include "cuda/kernels.h"
#include "cuda/warp.cuh"

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
__global__ void put_kernel(const Value* __restrict__ values,
                           const Index* __restrict__ order,
                           Value* __restrict__ out,
                           int64_t count) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < count)
    out[order[at]] = values[at];
}

template <bool kPut, typename Value, typename Index>
void launch(const TakeArgs& args, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((args.count + kThreads - 1) / kThreads));
  const auto* values = static_cast<const Value*>(args.values);
  const auto* order = static_cast<const Index*>(args.order);
  auto* out = static_cast<Value*>(args.out);
  if constexpr (kPut)
    launch_kernel("put", put_kernel<Value, Index>, blocks, kThreads, 0, stream, values, order, out,
                  args.count);
  else
    launch_kernel("take", take_kernel<Value, Index>, blocks, kThreads, 0, stream, values, order,
                  static_cast<const Index*>(args.eid), out, args.count);
}

template <bool kPut, typename Value>
void launch(const TakeArgs& args, cudaStream_t stream) {
  args.wide ? launch<kPut, Value, int64_t>(args, stream)
            : launch<kPut, Value, int32_t>(args, stream);
}

template <bool kPut>
void launch(const TakeArgs& args, cudaStream_t stream) {
  if (args.count == 0)
    return;
  if (args.bytes == 2)
    launch<kPut, uint16_t>(args, stream);
  else if (args.bytes == 4)
    launch<kPut, uint32_t>(args, stream);
  else
    launch<kPut, uint64_t>(args, stream);
}

}  // namespace

void take_cuda(const TakeArgs& args, cudaStream_t stream) {
  launch<false>(args, stream);
}

void put_cuda(const TakeArgs& args, cudaStream_t stream) {
  launch<true>(args, stream);
}

}  // namespace pyg_accel
