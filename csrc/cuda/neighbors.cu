// Neighbour sampling for mini-batches. A hop is counted, drawn, and its sources are numbered: every
// edge inserts its source and its position into a table, which keeps the smallest position; a node
// first appears at the edge with this position. So results do not depend on the order in which
// threads run.
#include "cuda/check.cuh"
#include "cuda/neighbors.cuh"
#include "cuda/scan.cuh"

namespace pyg_accel {
namespace {

// Returns the slot of a node, which is in the table afterwards at this position or a smaller one.
__device__ inline uint64_t insert(const SampledNodes& nodes, uint64_t key, uint32_t position) {
  uint64_t at = start_of(nodes, key);
  for (;; at = (at + 1) & nodes.mask) {
    uint64_t found = nodes.keys[at];
    if (found == kFree)
      found =
          atomicCAS(reinterpret_cast<unsigned long long*>(nodes.keys + at),
                    static_cast<unsigned long long>(kFree), static_cast<unsigned long long>(key));
    if (found == kFree || found == key)
      break;
  }
  if (nodes.positions[at] > position)  // most edges of a hub are not its first
    atomicMin(nodes.positions + at, position);
  return at;
}

template <typename Index>
__global__ void write_seeds(SampledNodes nodes,
                            const int64_t* seed,
                            int64_t count,
                            int64_t first_batch,
                            int64_t* fault) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count)
    return;
  const bool exists = seed[i] >= 0 && seed[i] < nodes.num_nodes;
  if (!exists)
    report(fault, Fault::kSeed);
  static_cast<Index*>(nodes.id)[i] = static_cast<Index>(exists ? seed[i] : 0);
  if (nodes.batch)
    static_cast<Index*>(nodes.batch)[i] = static_cast<Index>(first_batch + i);
}

template <typename Index>
__global__ void fill_table(SampledNodes nodes, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count)
    insert(nodes, key_of(nodes, static_cast<const Index*>(nodes.id)[i], batch_of<Index>(nodes, i)),
           static_cast<uint32_t>(i));
}

template <typename Index>
__device__ EdgeRange range_of(const HopArgs& args, int64_t position) {
  const bool timed = args.graph.timed();
  Fault fault = Fault::kNone;
  const EdgeRange range =
      range_of<Index>(args.graph, static_cast<const Index*>(args.targets.id)[position],
                      timed ? args.seed_time[batch_of<Index>(args.targets, position)] : 0,
                      args.last ? args.k : -1, fault);
  if (fault != Fault::kNone)
    report(args.fault, fault);
  return range;
}

constexpr int64_t kMost = int64_t{1} << 31;  // of a node; as many nodes can be numbered in all

template <typename Index>
__global__ void count_edges(HopArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i > args.count)
    return;
  EdgeRange range;
  if (i < args.count && args.first + i < *args.num_targets)
    range = range_of<Index>(args, args.first + i);
  const int64_t degree = range.end - range.begin;
  int64_t size = degree > 0 && !args.takes_all(degree, args.k) ? args.k : degree;
  if (size > kMost) {
    report(args.fault, Fault::kMany);
    size = 0;
  }
  args.offset[i] = size;
  if (i == args.count)
    return;
  args.begin[i] = range.begin;
  args.degree[i] = degree;
}

// Edges without weight are drawn nowhere but where all are: a warp a target.
__global__ void count_weights(HopArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (i >= args.count)
    return;
  const int64_t degree = args.degree[i];
  if (degree == 0 || args.takes_all(degree, args.k))
    return;
  int eligible = 0;
  for (int64_t j = threadIdx.x % 32; j < degree; j += 32) {
    const double weight = args.graph.weight_of(args.begin[i] + j);
    if (!(weight >= 0 && isfinite(weight)))
      report(args.fault, Fault::kWeights);
    eligible += weight > 0;
  }
  eligible = __reduce_add_sync(kAll, eligible);
  if (threadIdx.x % 32 == 0 && eligible < (args.replace ? 1 : args.k))
    args.offset[i] = eligible;
}

// Floyd's algorithm, a warp a target: draw j is of the first degree - k + j + 1 edges, and where it
// has been drawn before, the last of these. A lane holds draws `lane` and `lane + 32`.
template <typename Index>
__global__ void draw_few(HopArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (i >= args.count || args.degree[i] <= args.k)
    return;
  const Random random = random_of(args, i);
  const int lane = threadIdx.x % 32, size = static_cast<int>(args.k);
  const int64_t least = args.degree[i] - size;
  int64_t low = lane < size ? random.below(least + lane + 1, lane) : 0;
  int64_t high = lane + 32 < size ? random.below(least + lane + 33, lane + 32) : 0;
  for (int j = 1; j < size; ++j) {
    const int64_t drawn = __shfl_sync(kAll, j < 32 ? low : high, j % 32);
    const bool same = (lane < j && low == drawn) || (lane + 32 < j && high == drawn);
    if (__any_sync(kAll, same) && lane == j % 32)
      (j < 32 ? low : high) = least + j;
  }
  Index* out = static_cast<Index*>(args.edge) + args.offset[i];
  if (lane < size)
    out[lane] = static_cast<Index>(args.begin[i] + low);
  if (lane + 32 < size)
    out[lane + 32] = static_cast<Index>(args.begin[i] + high);
}

// A thread an edge, since rows may be of any length.
template <typename Index>
__global__ void put_sources(HopArgs args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= args.size)
    return;
  int64_t target = 0;  // the last whose edges do not begin behind this one
  for (int64_t end = args.count; target + 1 < end;) {
    const int64_t middle = target + (end - target) / 2;
    if (args.offset[middle] <= at)
      target = middle;
    else
      end = middle;
  }
  const int64_t number = at - args.offset[target], degree = args.degree[target];
  Index* edge = static_cast<Index*>(args.edge) + at;
  if (args.takes_all(degree, args.k))
    *edge = static_cast<Index>(args.begin[target] + number);
  else if (args.replace && !args.graph.weighted())
    *edge = static_cast<Index>(args.begin[target] + random_of(args, target).below(degree, number));
  Index id = static_cast<const Index*>(args.graph.row)[*edge];
  if (id < 0 || id >= args.sources.num_nodes) {
    report(args.fault, Fault::kRow);
    id = 0;
  }
  static_cast<Index*>(args.row)[at] = id;
  static_cast<Index*>(args.col)[at] = static_cast<Index>(args.first + target);
  const int64_t batch = batch_of<Index>(args.targets, args.first + target);
  args.slot[at] = static_cast<uint32_t>(insert(args.sources, key_of(args.sources, id, batch),
                                               static_cast<uint32_t>(*args.before + at)));
}

__global__ void mark_new(HopArgs args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at <= args.size)
    args.rank[at] = at < args.size && args.sources.positions[args.slot[at]] == *args.before + at;
}

template <typename Index>
__global__ void add_new(HopArgs args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at == 0)
    *args.after = *args.before + args.rank[args.size];
  if (at >= args.size || args.rank[at] == args.rank[at + 1])
    return;
  const int64_t position = *args.before + args.rank[at];
  args.sources.positions[args.slot[at]] = static_cast<uint32_t>(position);
  static_cast<Index*>(args.sources.id)[position] = static_cast<const Index*>(args.row)[at];
  if (args.sources.batch)
    static_cast<Index*>(args.sources.batch)[position] =
        static_cast<Index>(batch_of<Index>(args.targets, static_cast<const Index*>(args.col)[at]));
}

template <typename Index>
__global__ void number_sources(HopArgs args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < args.size)
    static_cast<Index*>(args.row)[at] = static_cast<Index>(args.sources.positions[args.slot[at]]);
}

template <typename Index>
void draw(const HopArgs& args, const Allocate& allocate, cudaStream_t stream) {
  const dim3 edges = blocks_of(args.size), with_end = blocks_of(args.size + 1);
  if (args.k >= 0 && (args.graph.weighted() || (!args.replace && args.k > kFloyd)))
    neighbor_select_cuda(args, stream);
  else if (args.k >= 0 && !args.replace)
    launch_kernel("neighbors", draw_few<Index>, blocks_of(args.count, kWarps), kThreads, 0, stream,
                  args);
  launch_kernel("neighbors", put_sources<Index>, edges, kThreads, 0, stream, args);
  launch_kernel("neighbors", mark_new, with_end, kThreads, 0, stream, args);
  exclusive_sum(args.rank, args.size + 1, allocate, stream);
  launch_kernel("neighbors", add_new<Index>, edges, kThreads, 0, stream, args);
  launch_kernel("neighbors", number_sources<Index>, edges, kThreads, 0, stream, args);
}

}  // namespace

void neighbor_seeds_cuda(const SampledNodes& nodes,
                         const int64_t* seed,
                         int64_t count,
                         int64_t first_batch,
                         bool wide,
                         int64_t* fault,
                         cudaStream_t stream) {
  launch_kernel("neighbors", wide ? write_seeds<int64_t> : write_seeds<int32_t>, blocks_of(count),
                kThreads, 0, stream, nodes, seed, count, first_batch, fault);
}

void neighbor_table_cuda(const SampledNodes& nodes, int64_t count, bool wide, cudaStream_t stream) {
  check(cudaMemsetAsync(nodes.keys, 0xff, (nodes.mask + 1) * sizeof(uint64_t), stream),
        "neighbors");
  check(cudaMemsetAsync(nodes.positions, 0xff, (nodes.mask + 1) * sizeof(uint32_t), stream),
        "neighbors");
  if (count > 0)
    launch_kernel("neighbors", wide ? fill_table<int64_t> : fill_table<int32_t>, blocks_of(count),
                  kThreads, 0, stream, nodes, count);
}

void neighbor_count_cuda(const HopArgs& args, const Allocate& allocate, cudaStream_t stream) {
  launch_kernel("neighbors", args.wide ? count_edges<int64_t> : count_edges<int32_t>,
                blocks_of(args.count + 1), kThreads, 0, stream, args);
  if (args.k >= 0 && args.graph.weighted())
    launch_kernel("neighbors", count_weights, blocks_of(args.count, kWarps), kThreads, 0, stream,
                  args);
  exclusive_sum(args.offset, args.count + 1, allocate, stream);
}

void neighbor_draw_cuda(const HopArgs& args, const Allocate& allocate, cudaStream_t stream) {
  args.wide ? draw<int64_t>(args, allocate, stream) : draw<int32_t>(args, allocate, stream);
}

}  // namespace pyg_accel
