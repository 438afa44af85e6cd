// Edge lists without self-loops, and the normalisation of GCN: what PyG computes by some twenty
// operators.
#include "cuda/self_loops.h"

#include <cassert>

#include "cuda/check.cuh"
#include "cuda/scan.cuh"
#include "cuda/warp.cuh"

namespace pyg_accel {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

__global__ void mark(SelfLoopArgs args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at > args.count)
    return;
  bool stays = false;
  if (at < args.count) {
    const int64_t row = args.row[at * args.row_stride], col = args.col[at * args.col_stride];
    stays = row != col;
    if (stays && args.degree) {
      assert(row >= 0 && row < args.num_nodes && "found ids outside of the graph");
      assert(col >= 0 && col < args.num_nodes && "found ids outside of the graph");
      atomicAdd(args.degree + (args.by_col ? col : row), 1);
    }
  }
  args.place[at] = stays;
}

template <typename Weight>
__global__ void write(SelfLoopArgs args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t size = args.kept + args.num_nodes;
  const auto scale = [&](int64_t node) {
    return Weight{1} / sqrt(static_cast<Weight>(args.degree[node] + 1));
  };
  auto* weight = static_cast<Weight*>(args.weight);
  if (at < args.num_nodes) {
    args.out[args.kept + at] = at;
    args.out[size + args.kept + at] = at;
    if (weight)
      weight[args.kept + at] = scale(at) * scale(at);
  }
  if (at >= args.count)
    return;
  const int64_t row = args.row[at * args.row_stride], col = args.col[at * args.col_stride];
  if (row == col)
    return;
  const int64_t to = args.place[at];
  args.out[to] = row;
  args.out[size + to] = col;
  if (weight)
    weight[to] = scale(row) * scale(col);
}

}  // namespace

void place_edges_cuda(const SelfLoopArgs& args, const Allocate& allocate, cudaStream_t stream) {
  if (args.degree)
    check(cudaMemsetAsync(args.degree, 0, args.num_nodes * sizeof(int32_t), stream), "self_loops");
  launch_kernel("self_loops", mark, blocks_of(args.count + 1), kThreads, 0, stream, args);
  exclusive_sum(args.place, args.count + 1, allocate, stream);
}

void write_edges_cuda(const SelfLoopArgs& args, cudaStream_t stream) {
  const int64_t threads = args.count > args.num_nodes ? args.count : args.num_nodes;
  if (threads == 0)
    return;
  launch_kernel("self_loops", args.double_weight ? write<double> : write<float>, blocks_of(threads),
                kThreads, 0, stream, args);
}

}  // namespace pyg_accel
