// The gradient of a sum of CBSR features without atomics: a warp has a row of the transposed graph
// and gathers the columns that the row stores, a slice of columns at a time, so that the
// reads of all warps stay in the L2 cache. Sums have a fixed order.
#include "cuda/cbsr.cuh"

namespace pyg_accel {
namespace {

constexpr int kWarps = 4;
constexpr int kMost = 8;  // edges of a group of lanes whose features are under way

// How many of the k columns, which ascend, are below `bound`.
template <typename Column>
__device__ inline int below(const Column* columns, int k, int bound) {
  int count = 0;
  for (int from = 0; from < k; from += 32) {
    const int slot = from + threadIdx.x % 32;
    count += __popc(__ballot_sync(~0u, slot < k && columns[slot] < bound));
  }
  return count;
}

// The sums of up to kSlots slots, one per lane, over the edges of each group of lanes.
template <typename Value, int kSlots>
__device__ inline float gather(const CbsrPullArgs& args, const Task& task, int column, bool live) {
  constexpr int kGroups = 32 / kSlots, kAhead = kSlots < kMost ? kSlots : kMost;
  const int lane = threadIdx.x % 32, group = lane / kSlots;
  const Value* x = static_cast<const Value*>(args.x) + column;
  float sum = 0;
  for (int32_t base = task.begin; base < task.end; base += 32) {
    const int count = min(task.end - base, 32);
    const uint32_t node = lane < count ? args.rows.col[base + lane] : 0;
    const float scale = args.weight && lane < count ? args.weight[base + lane] : 1.f;
#pragma unroll
    for (int from = 0; from < 32; from += kGroups * kAhead) {
      if (from >= count)
        break;
      float value[kAhead], factor[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int edge = from + a * kGroups + group;
        const uint64_t source = __shfl_sync(~0u, node, edge & 31);
        factor[a] = __shfl_sync(~0u, scale, edge & 31);
        value[a] = live && edge < count ? static_cast<float>(x[source * args.width]) : 0.f;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (from + a * kGroups + group < count)
          sum = fmaf(factor[a], value[a], sum);
    }
  }
#pragma unroll
  for (int step = kSlots; step < 32; step *= 2)
    sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

template <typename Value, typename Column>
__global__ void cbsr_pull_kernel(CbsrPullArgs args) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  Task task;
  if (!task.find(args.rows, number))
    return;
  const Column* columns = static_cast<const Column*>(args.indices) + task.row * args.k;
  const int first = below(columns, args.k, blockIdx.y * args.slice);
  const int last = below(columns, args.k, (blockIdx.y + 1) * args.slice);
  const int lane = threadIdx.x % 32;
  for (int from = first; from < last; from += 32) {
    const int slots = min(last - from, 32);
    const int width = slots <= 2 ? 2 : slots <= 4 ? 4 : slots <= 8 ? 8 : slots <= 16 ? 16 : 32;
    const int slot = from + (lane & (width - 1));
    const bool live = slot < last;
    const int column = live ? columns[slot] : 0;
    float sum;
    if (width == 2)
      sum = gather<Value, 2>(args, task, column, live);
    else if (width == 4)
      sum = gather<Value, 4>(args, task, column, live);
    else if (width == 8)
      sum = gather<Value, 8>(args, task, column, live);
    else if (width == 16)
      sum = gather<Value, 16>(args, task, column, live);
    else
      sum = gather<Value, 32>(args, task, column, live);
    if (lane >= slots)
      continue;
    if (task.piece)
      args.partial[number * args.k + slot] = sum;
    else
      static_cast<Value*>(args.out)[task.row * args.k + slot] = rounded<Value>(sum);
  }
}

template <typename Value>
void launch(const CbsrPullArgs& args, cudaStream_t stream) {
  const dim3 blocks(blocks_of(args.rows, kWarps), (args.width + args.slice - 1) / args.slice);
  const auto kernel =
      args.wide_columns ? cbsr_pull_kernel<Value, uint16_t> : cbsr_pull_kernel<Value, uint8_t>;
  launch_kernel("cbsr_pull", kernel, blocks, kWarps * 32, 0, stream, args);
}

}  // namespace

void cbsr_pull_cuda(const CbsrPullArgs& args, cudaStream_t stream) {
  if (args.stored == Stored::kBFloat16)
    launch<__nv_bfloat16>(args, stream);
  else if (args.stored == Stored::kHalf)
    launch<__half>(args, stream);
  else
    launch<float>(args, stream);
}

}  // namespace pyg_accel
