// Draws that read all edges of a target, a block per target. Without replacement, edges with the
// smallest keys are drawn: random numbers, or with weights the times of an exponential clock an
// edge (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006). A key is a
// function of the edge's number, so that it is computed again wherever it is needed.
#include "cuda/neighbors.cuh"

namespace pyg_accel {
namespace {

constexpr int kDigits = 256;

// Whose bits are in the order of the keys. Edges without weight come last.
__device__ inline uint64_t sort_key(const HopArgs& args,
                                    const Random& random,
                                    int64_t e,
                                    int64_t j) {
  if (!args.graph.weighted())
    return random.at(j);
  const double weight = args.graph.weight_of(e);
  if (!(weight > 0))
    return ~uint64_t{0};
  const double clock = fabs(log(random.uniform(j))) / weight;
  uint64_t bits = 0;
  memcpy(&bits, &clock, sizeof(bits));
  return bits;
}

// Numbers the threads with a flag behind `*total`, which grows by as many as there are.
__device__ inline int64_t place(bool flag, int64_t* total) {
  __shared__ int counts[kBlockThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned flags = __ballot_sync(kAll, flag);
  __syncthreads();
  if (lane == 0)
    counts[warp] = __popc(flags);
  __syncthreads();
  int64_t mine = *total + __popc(flags & ((1u << lane) - 1));
  for (int i = 0; i < kBlockThreads / 32; ++i) {
    mine += i < warp ? counts[i] : 0;
    *total += counts[i];
  }
  return mine;
}

template <typename Index>
__device__ void draw_smallest(const HopArgs& args, int64_t target, Index* out, int64_t size) {
  __shared__ int counts[kDigits];
  __shared__ uint64_t chosen;
  __shared__ int64_t left;
  __shared__ bool whole;
  const int64_t begin = args.begin[target], degree = args.degree[target];
  const Random random = random_of(args, target);
  const auto key = [&](int64_t j) { return sort_key(args, random, begin + j, j); };
  // Digit by digit, the upper bits that the last drawn key has, until all keys with them are drawn.
  uint64_t prefix = 0;
  int64_t remaining = size;  // of the keys with these bits
  int shift = 64;
  for (bool done = false; !done && shift > 0;) {
    shift -= 8;
    for (int i = threadIdx.x; i < kDigits; i += kBlockThreads)
      counts[i] = 0;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < degree; j += kBlockThreads) {
      const uint64_t k = key(j) >> shift;
      if (k >> 8 == prefix)
        atomicAdd(counts + (k & 255), 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      constexpr int kEach = kDigits / 32;
      const int lane = threadIdx.x;
      int64_t sum = 0;
      for (int i = 0; i < kEach; ++i)
        sum += counts[lane * kEach + i];
      int64_t before = sum;
      for (int by = 1; by < 32; by *= 2) {
        const int64_t more = __shfl_up_sync(kAll, before, by);
        before += lane >= by ? more : 0;
      }
      before -= sum;
      if (before < remaining && before + sum >= remaining) {
        int digit = lane * kEach;
        for (; before + counts[digit] < remaining; ++digit)
          before += counts[digit];
        chosen = prefix << 8 | digit;
        left = remaining - before;
        whole = counts[digit] == remaining - before;
      }
    }
    __syncthreads();
    prefix = chosen, remaining = left, done = whole;
    __syncthreads();
  }
  int64_t below = 0, equal = 0;
  for (int64_t base = 0; base < degree; base += kBlockThreads) {
    const int64_t j = base + threadIdx.x;
    const uint64_t k = j < degree ? key(j) >> shift : ~uint64_t{0};
    const int64_t first = place(j < degree && k < prefix, &below);
    const int64_t second = place(j < degree && k == prefix, &equal);
    if (j < degree && k < prefix)
      out[first] = static_cast<Index>(begin + j);
    else if (j < degree && k == prefix && second < remaining)
      out[size - remaining + second] = static_cast<Index>(begin + j);
  }
}

// With replacement: each thread has the sum of weights of some edges; a draw selects a thread, and
// then one of its edges.
template <typename Index>
__device__ void draw_again(const HopArgs& args, int64_t target, Index* out, int64_t size) {
  __shared__ double sums[kBlockThreads];
  const int64_t begin = args.begin[target], degree = args.degree[target];
  const int64_t each = (degree + kBlockThreads - 1) / kBlockThreads;
  const auto end_of = [&](int64_t part) { return min((part + 1) * each, degree); };
  double sum = 0;
  for (int64_t j = threadIdx.x * each; j < end_of(threadIdx.x); ++j)
    sum += args.graph.weight_of(begin + j);
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < kBlockThreads; ++i)
      sums[i] += sums[i - 1];
  __syncthreads();
  const Random random = random_of(args, target);
  for (int64_t at = threadIdx.x; at < size; at += kBlockThreads) {
    const double draw = random.uniform(at) * sums[kBlockThreads - 1];
    int part = 0;  // the first sum that reaches the draw, which is positive
    while (part < kBlockThreads - 1 && sums[part] < draw)
      ++part;
    double reached = part > 0 ? sums[part - 1] : 0;
    int64_t found = part * each;
    for (int64_t j = part * each; j < end_of(part) && reached < draw; ++j) {
      const double weight = args.graph.weight_of(begin + j);
      reached += weight;
      found = weight > 0 ? j : found;
    }
    out[at] = static_cast<Index>(begin + found);
  }
}

template <typename Index>
__global__ void __launch_bounds__(kBlockThreads) draw_many(HopArgs args) {
  const int64_t target = blockIdx.x, size = args.offset[target + 1] - args.offset[target];
  if (size == 0 || args.takes_all(args.degree[target], args.k))
    return;
  Index* out = static_cast<Index*>(args.edge) + args.offset[target];
  if (args.replace)
    draw_again(args, target, out, size);
  else
    draw_smallest(args, target, out, size);
}

}  // namespace

void neighbor_select_cuda(const HopArgs& args, cudaStream_t stream) {
  launch_kernel("neighbors", args.wide ? draw_many<int64_t> : draw_many<int32_t>,
                dim3(static_cast<unsigned>(args.count)), kBlockThreads, 0, stream, args);
}

}  // namespace pyg_accel
