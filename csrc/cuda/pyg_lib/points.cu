// The nearest points of each query. A warp has a query: its lanes compute the distances of 32
// points and hold the nearest ones so far, sorted.
#include "cuda/pyg_lib/points.h"

#include "cuda/check.cuh"
#include "cuda/scan.cuh"
#include "cuda/warp.cuh"

namespace pyg_accel {
namespace {

constexpr unsigned kAll = ~0u;
constexpr int64_t kNothing = INT64_MAX;
constexpr int kWarps = kBlockThreads / 32;

dim3 blocks_of(int64_t queries) {
  return dim3(static_cast<unsigned>((queries + kWarps - 1) / kWarps));
}

constexpr int kQueue = 64;  // keys of a warp that wait until there are 32

// Sort one key of every lane by steps that compare lanes at a distance: all of them, or the last
// ones, for keys that ascend and then descend.
__device__ inline int64_t sorted(int64_t key, int lane, int from) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2)
#pragma unroll
    for (int apart = size / 2; apart > 0; apart /= 2)
      if (size >= from) {
        const int64_t other = __shfl_xor_sync(kAll, key, apart);
        const bool smaller = ((lane & apart) == 0) == ((lane & size) == 0 || size == 32);
        key = (other < key) == smaller ? other : key;
      }
  return key;
}

// The smallest `most` keys of a warp: element `32 * s + lane`, ascending, is in `best[s]`. Keys
// that may be among them wait in shared memory and are merged 32 at a time.
template <int kSlots>
struct Smallest {
  int64_t best[kSlots];
  int64_t worst = kNothing;  // of `most`
  int64_t* queue;
  int lane, most, waiting = 0;

  __device__ Smallest(int64_t* queue, int lane, int most) : queue(queue), lane(lane), most(most) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      best[s] = kNothing;
  }

  // Take the value of each lane, including kNothing.
  __device__ void offer(int64_t key) {
    const unsigned better = __ballot_sync(kAll, key < worst);
    if (better == 0)
      return;
    if (key < worst)
      queue[waiting + __popc(better & ((1u << lane) - 1))] = key;
    waiting += __popc(better);
    __syncwarp();
    if (waiting >= 32)
      merge();
  }

  // Merge the first 32 keys that wait, or all.
  __device__ void merge() {
    int64_t key = sorted(lane < waiting ? queue[lane] : kNothing, lane, 2);
    const int64_t next = queue[32 + lane];
    waiting = max(waiting - 32, 0);
    __syncwarp();
    queue[lane] = next;
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int64_t other = __shfl_sync(kAll, key, 31 - lane);
      const int64_t low = min(best[s], other), high = max(best[s], other);
      best[s] = sorted(low, lane, 32);
      if (s + 1 < kSlots)
        key = sorted(high, lane, 32);
      if (s == (most - 1) / 32)
        worst = __shfl_sync(kAll, best[s], (most - 1) % 32);
    }
  }

  __device__ int count() const {
    int sum = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      sum += __popc(__ballot_sync(kAll, s * 32 + lane < most && best[s] != kNothing));
    return sum;
  }
};

// A query, whose neighbours are points of kDims dimensions; of any number for 0.
template <int kSlots, int kDims>
class Search {
 public:
  __device__ Search(const PointArgs& args, int64_t query, float4* mine)
      : args_(args),
        query_(query),
        mine_(mine + kQueue / 2),
        lane_(threadIdx.x % 32),
        best_(reinterpret_cast<int64_t*>(mine), lane_, args.most) {
    float* to = reinterpret_cast<float*>(mine_);
    for (int d = lane_; d < args.dims; d += 32)
      to[d] = args.y[query * args.dims + d];
    __syncwarp();
    if constexpr (kDims > 0)
#pragma unroll
      for (int d = 0; d < kDims; ++d)
        y_[d] = to[d];
  }

  // Compare with points from `begin` to `end`.
  __device__ void scan(int64_t begin, int64_t end) {
    for (; begin < end; begin += 32) {
      const int64_t at = min(begin + lane_, end - 1);
      const float distance = distance_to(args_.x + at);
      const int64_t id = args_.cells.point != nullptr ? args_.cells.point[at] : at;
      const bool valid =
          begin + lane_ < end && distance < args_.limit && !(args_.skip_same && id == query_);
      best_.offer(valid ? static_cast<int64_t>(__float_as_uint(distance)) << 32 | id : kNothing);
    }
  }

  // Compare with the cells around, until no point of others is nearer.
  __device__ void scan_cells(int64_t example) {
    const Cells& cells = args_.cells;
    float from[3];
    int cell[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      if (!isfinite(y_[d]))
        return;
      from[d] = y_[d] - cells.origin[d];
      cell[d] = static_cast<int>(min(max(from[d] / cells.size, 0.0f), cells.sizes[d] - 1.0f));
    }
    for (int before = -1, around = 1;; before = around, around *= 2) {
      // The middle first, then 1, -1, 2, -2 ...: the nearest points leave least to insert.
      for (int i = 0; i < (2 * around + 1) * (2 * around + 1); ++i) {
        const int dz = alternate(i / (2 * around + 1)), dy = alternate(i % (2 * around + 1));
        const int z = cell[2] + dz, v = cell[1] + dy;
        if (z < 0 || z >= cells.sizes[2] || v < 0 || v >= cells.sizes[1])
          continue;
        const int64_t row = ((example * cells.sizes[2] + z) * cells.sizes[1] + v) * cells.sizes[0];
        const bool seen = max(abs(dz), abs(dy)) <= before;  // the middle of the row
        for (int side = 0; side <= (seen ? 1 : 0); ++side) {
          const int left = max(cell[0] + (side == 0 ? -around : before + 1), 0);
          const int right =
              min(cell[0] + (seen && side == 0 ? -before - 1 : around), cells.sizes[0] - 1);
          if (left <= right)
            scan(cells.ptr[row + left], cells.ptr[row + right + 1]);
        }
      }
      // How far the cells reach that were read; without end at the sides of the grid.
      float far = INFINITY;
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        if (cell[d] > around)
          far = min(far, from[d] - (cell[d] - around) * cells.size);
        if (cell[d] + around + 1 < cells.sizes[d])
          far = min(far, (cell[d] + around + 1) * cells.size - from[d]);
      }
      far = max(far - cells.slack, 0.0f);
      best_.merge();
      const float farthest = best_.worst == kNothing
                                 ? args_.limit
                                 : __uint_as_float(static_cast<unsigned>(best_.worst >> 32));
      if (!(farthest > far * far))
        return;
    }
  }

  __device__ void write() {
    best_.merge();
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      if (s * 32 + lane_ < args_.most)
        args_.keys[query_ * args_.most + s * 32 + lane_] = best_.best[s];
    const int count = best_.count();
    if (lane_ == 0)
      args_.begin[query_] = count;
  }

 private:
  __device__ static int alternate(int i) { return i % 2 == 0 ? -(i / 2) : (i + 1) / 2; }

  __device__ float distance_to(const float* x) const {
    float sum = 0;
    if constexpr (kDims > 0) {
#pragma unroll
      for (int d = 0; d < kDims; ++d, x += args_.num_points) {
        const float gap = y_[d] - *x;
        sum += gap * gap;
      }
    } else {
      for (int d = 0; d < args_.dims; d += 4) {
        const float4 y = mine_[d / 4];
        const float each[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (d + i < args_.dims) {
            const float gap = each[i] - *x;
            sum += gap * gap;
            x += args_.num_points;
          }
      }
    }
    return sum;
  }

  const PointArgs& args_;
  const int64_t query_;
  float4* mine_;  // the query, in shared memory
  const int lane_;
  float y_[kDims > 0 ? kDims : 1];
  Smallest<kSlots> best_;
};

__device__ inline int64_t example_of(const PointArgs& args, int64_t query) {
  int64_t low = 0, high = args.examples;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (args.ptr_y[middle] <= query ? low : high) = middle;
  }
  return low;
}

template <int kSlots, int kDims, bool kCells>
__global__ void search_points(const PointArgs args) {
  const int warp = threadIdx.x / 32;
  const int64_t turn = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (turn >= args.num_queries)
    return;
  const int64_t query = kCells ? args.cells.query[turn] : turn;
  Search<kSlots, kDims> search(args, query, shared_memory() + warp * args.shared);
  const int64_t example = example_of(args, query);
  if constexpr (kCells)
    search.scan_cells(example);
  else
    search.scan(max(args.ptr_x[example], int64_t{0}),
                min(args.ptr_x[example + 1], args.num_points));
  search.write();
}

template <int kDims, bool kCells>
auto kernel_of(const PointArgs& args) {
  return args.most <= 32    ? search_points<1, kDims, kCells>
         : args.most <= 64  ? search_points<2, kDims, kCells>
         : args.most <= 128 ? search_points<4, kDims, kCells>
                            : search_points<8, kDims, kCells>;
}

__global__ void write_neighbors(const PointArgs args, int64_t* query, int64_t* point) {
  const int64_t turn = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (turn >= args.num_queries)
    return;
  const int64_t begin = args.begin[turn], count = args.begin[turn + 1] - begin;
  for (int64_t i = threadIdx.x % 32; i < count; i += 32) {
    query[begin + i] = turn;
    point[begin + i] = args.keys[turn * args.most + i] & UINT32_MAX;
  }
}

}  // namespace

void nearest_points_cuda(PointArgs& args, const Allocate& allocate, cudaStream_t stream) {
  args.shared = kQueue / 2 + (args.dims + 3) / 4;
  const auto kernel = args.cells.ptr != nullptr ? kernel_of<3, true>(args)
                      : args.dims == 3          ? kernel_of<3, false>(args)
                                                : kernel_of<0, false>(args);
  const int shared = kWarps * args.shared * static_cast<int>(sizeof(float4));
  launch_kernel("nearest points", kernel, blocks_of(args.num_queries), kBlockThreads, shared,
                stream, args);
  check(cudaMemsetAsync(args.begin + args.num_queries, 0, sizeof(int64_t), stream), "memset");
  exclusive_sum(args.begin, args.num_queries + 1, allocate, stream);
}

void write_neighbors_cuda(const PointArgs& args,
                          int64_t* query,
                          int64_t* point,
                          cudaStream_t stream) {
  launch_kernel("neighbors", write_neighbors, blocks_of(args.num_queries), kBlockThreads, 0, stream,
                args, query, point);
}

}  // namespace pyg_accel
