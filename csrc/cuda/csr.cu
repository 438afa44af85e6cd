// Building CSR from edge lists, and its transpose, by one stable radix sort. The key of an entry is
// its row and its column side by side in as few bits as they need. An edge list is sorted by both.
// A CSR matrix has its entries in the order of their rows already: with the two exchanged, its
// transpose is sorted by the upper half of the key alone, which takes the row along.
#include "cuda/csr.h"

#define CCCL_DISABLE_NVTX  // the sort would look for a profiler's library when it first runs
#include <cassert>
#include <cub/block/block_radix_sort.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cuda/std/bit>
#include <type_traits>

#include "cuda/check.cuh"

namespace pyg_accel {
namespace {

constexpr int kThreads = 256;
// A matrix of up to kTile entries is sorted by one block.
constexpr int kTileThreads = 1024;
constexpr int kTileItems = 8;
constexpr int kTile = kTileThreads * kTileItems;
constexpr int kTileRows = 4 * kTile;

// Where the first of `count` sorted elements is that reaches `least`.
template <typename Element>
__device__ inline int64_t first_of(int64_t count, int64_t least, const Element& element) {
  int64_t begin = 0, end = count;
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (static_cast<int64_t>(element(middle)) < least)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

template <bool kTranspose, typename Index>
using Out = std::conditional_t<kTranspose, Index, int32_t>;

// The key of entry `at`, with its lower half in `shift` bits.
template <bool kTranspose, typename Key, typename Index>
__device__ inline Key key_of(const CsrArgs& args, int shift, int64_t at) {
  const Index* rows = static_cast<const Index*>(args.row);
  const Index* cols = static_cast<const Index*>(args.col);
  if constexpr (kTranspose) {
    const int64_t row = first_of(args.num_rows, at + 1, [&](int64_t r) { return rows[r + 1]; });
    return static_cast<Key>(cols[at]) << shift | static_cast<Key>(row);
  } else {
    const int64_t row = rows[at * args.row_stride], col = cols[at * args.col_stride];
    assert(row >= 0 && row < args.num_rows && "found target ids outside of the graph");
    assert(col >= 0 && col < args.num_cols && "found source ids outside of the graph");
    return static_cast<Key>(row) << shift | static_cast<Key>(col);
  }
}

template <typename Key, typename Result>
__device__ inline void write_entry(const CsrArgs& args,
                                   int shift,
                                   int64_t at,
                                   Key key,
                                   uint32_t order) {
  static_cast<Result*>(args.id)[at] = static_cast<Result>(key & ((Key{1} << shift) - 1));
  static_cast<Result*>(args.perm)[at] = static_cast<Result>(order);
}

template <bool kTranspose, typename Key, typename Index>
__global__ void make_keys(CsrArgs args, int shift, Key* keys, uint32_t* order) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= args.count)
    return;
  keys[at] = key_of<kTranspose, Key, Index>(args, shift, at);
  order[at] = static_cast<uint32_t>(at);
}

// A search for every row, not a step from row to row: many may be empty in a sequence.
template <typename Key, typename Result>
__global__ void write_csr(CsrArgs args,
                          int64_t num_rows,
                          int shift,
                          const Key* keys,
                          const uint32_t* order) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at <= num_rows)
    static_cast<Result*>(args.ptr)[at] =
        static_cast<Result>(first_of(args.count, at, [&](int64_t k) { return keys[k] >> shift; }));
  if (at < args.count)
    write_entry<Key, Result>(args, shift, at, keys[at], order[at]);
}

// How a matrix is sorted.
struct Layout {
  int64_t rows;  // of the result
  int shift;     // bits of a key's lower half
  int begin;     // of the bits to sort by
  int end;
  bool narrow;  // keys have 32 bits
};

// All steps for a small matrix, in one launch of one block.
template <bool kTranspose, typename Index>
__global__ void __launch_bounds__(kTileThreads) sort_tile(CsrArgs args, Layout layout) {
  using Sort = cub::BlockRadixSort<uint32_t, kTileThreads, kTileItems, uint32_t>;
  __shared__ union {
    typename Sort::TempStorage sort;
    uint32_t keys[kTile];
  } shared;
  const int thread = static_cast<int>(threadIdx.x), count = static_cast<int>(args.count);
  uint32_t keys[kTileItems], order[kTileItems];
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    const int at = thread * kTileItems + i;
    keys[i] = ~0u;  // absent entries come last
    order[i] = at;
    if (at < count)
      keys[i] = key_of<kTranspose, uint32_t, Index>(args, layout.shift, at);
  }
  Sort(shared.sort).SortBlockedToStriped(keys, order, layout.begin, layout.end);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    const int at = i * kTileThreads + thread;
    shared.keys[at] = keys[i];
    if (at < count)
      write_entry<uint32_t, Out<kTranspose, Index>>(args, layout.shift, at, keys[i], order[i]);
  }
  __syncthreads();
  auto* ptr = static_cast<Out<kTranspose, Index>*>(args.ptr);
  for (int64_t row = thread; row <= layout.rows; row += kTileThreads)
    ptr[row] = first_of(count, row, [&](int64_t k) { return shared.keys[k] >> layout.shift; });
}

// How many bits ids below `size` need.
int bits_of(int64_t size) {
  return cuda::std::bit_width(static_cast<uint64_t>(size > 0 ? size - 1 : 0));
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

Layout layout_of(const CsrArgs& args, bool transpose) {
  const int rows = bits_of(args.num_rows), cols = bits_of(args.num_cols), all = rows + cols;
  const bool narrow = all <= 32;
  if (transpose)
    return {args.num_cols, rows, rows, all > rows ? all : rows + 1, narrow};
  return {args.num_rows, cols, 0, all > 0 ? all : 1, narrow};
}

// The two buffers of the sort, in one allocation.
template <typename Key>
struct Buffers {
  cub::DoubleBuffer<Key> keys;
  cub::DoubleBuffer<uint32_t> order;
  void* rest = nullptr;  // the sort's own

  Buffers(int64_t count, size_t rest_bytes, const Allocate& allocate) {
    const size_t key_bytes = aligned(count * sizeof(Key));
    const size_t order_bytes = aligned(count * sizeof(uint32_t));
    char* base = static_cast<char*>(allocate(2 * (key_bytes + order_bytes) + rest_bytes));
    for (int i = 0; i < 2; ++i) {
      keys.d_buffers[i] = reinterpret_cast<Key*>(base + i * key_bytes);
      order.d_buffers[i] = reinterpret_cast<uint32_t*>(base + 2 * key_bytes + i * order_bytes);
    }
    rest = base + 2 * (key_bytes + order_bytes);
  }

  static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }
};

template <bool kTranspose, typename Key, typename Index>
void build_any(const CsrArgs& args,
               const Layout& layout,
               const Allocate& allocate,
               cudaStream_t stream) {
  const auto count = static_cast<uint32_t>(args.count);
  size_t rest_bytes = 0;
  cub::DoubleBuffer<Key> no_keys;
  cub::DoubleBuffer<uint32_t> no_order;
  check(cub::DeviceRadixSort::SortPairs(nullptr, rest_bytes, no_keys, no_order, count, layout.begin,
                                        layout.end, stream),
        "csr");
  Buffers<Key> buffers(args.count, rest_bytes, allocate);
  if (count > 0) {
    make_keys<kTranspose, Key, Index><<<blocks_of(count), kThreads, 0, stream>>>(
        args, layout.shift, buffers.keys.Current(), buffers.order.Current());
    check_launch("csr");
    check(cub::DeviceRadixSort::SortPairs(buffers.rest, rest_bytes, buffers.keys, buffers.order,
                                          count, layout.begin, layout.end, stream),
          "csr");
  }
  const int64_t threads = args.count > layout.rows ? args.count : layout.rows + 1;
  write_csr<Key, Out<kTranspose, Index>><<<blocks_of(threads), kThreads, 0, stream>>>(
      args, layout.rows, layout.shift, buffers.keys.Current(), buffers.order.Current());
  check_launch("csr");
}

template <bool kTranspose, typename Index>
void build(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream) {
  const Layout layout = layout_of(args, kTranspose);
  if (layout.narrow && args.count <= kTile && layout.rows <= kTileRows) {
    sort_tile<kTranspose, Index><<<1, kTileThreads, 0, stream>>>(args, layout);
    check_launch("csr");
  } else if (layout.narrow) {
    build_any<kTranspose, uint32_t, Index>(args, layout, allocate, stream);
  } else {
    build_any<kTranspose, uint64_t, Index>(args, layout, allocate, stream);
  }
}

template <bool kTranspose>
void build(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream) {
  args.wide ? build<kTranspose, int64_t>(args, allocate, stream)
            : build<kTranspose, int32_t>(args, allocate, stream);
}

}  // namespace

void csr_from_coo_cuda(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream) {
  build<false>(args, allocate, stream);
}

void csr_transpose_cuda(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream) {
  build<true>(args, allocate, stream);
}

}  // namespace pyg_accel
