// Building CSR from edge lists, and its transpose, by one stable radix sort. The key of an entry is
// its row and its column side by side in as few bits as they need. An edge list is sorted by both.
// A CSR matrix has its entries in the order of their rows already: with the two exchanged, its
// transpose is sorted by the upper half of the key alone, which takes the row along.
#include "cuda/csr.h"

#define CCCL_DISABLE_NVTX
#include <cassert>
#include <cub/device/device_radix_sort.cuh>
#include <cuda/std/bit>
#include <type_traits>

#include "cuda/check.cuh"

namespace pyg_accel {
namespace {

constexpr int kThreads = 256;

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

template <typename Key, typename Index>
__global__ void edge_keys(CsrArgs args, int shift, Key* keys, uint32_t* order) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= args.count)
    return;
  const int64_t row = static_cast<const Index*>(args.row)[at * args.row_stride];
  const int64_t col = static_cast<const Index*>(args.col)[at * args.col_stride];
  assert(row >= 0 && row < args.num_rows && "found target ids outside of the graph");
  assert(col >= 0 && col < args.num_cols && "found source ids outside of the graph");
  keys[at] = static_cast<Key>(row) << shift | static_cast<Key>(col);
  order[at] = static_cast<uint32_t>(at);
}

template <typename Key, typename Index>
__global__ void transposed_keys(CsrArgs args, int shift, Key* keys, uint32_t* order) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= args.count)
    return;
  const Index* rowptr = static_cast<const Index*>(args.row);
  const int64_t row = first_of(args.num_rows, at + 1, [&](int64_t r) { return rowptr[r + 1]; });
  const int64_t col = static_cast<const Index*>(args.col)[at];
  keys[at] = static_cast<Key>(col) << shift | static_cast<Key>(row);
  order[at] = static_cast<uint32_t>(at);
}

// A search for every row, not a step from row to row: many may be empty in a sequence.
template <typename Key, typename Out>
__global__ void write_csr(CsrArgs args,
                          int64_t num_rows,
                          int shift,
                          const Key* keys,
                          const uint32_t* order) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at <= num_rows)
    static_cast<Out*>(args.ptr)[at] =
        static_cast<Out>(first_of(args.count, at, [&](int64_t k) { return keys[k] >> shift; }));
  if (at < args.count) {
    static_cast<Out*>(args.id)[at] = static_cast<Out>(keys[at] & ((Key{1} << shift) - 1));
    static_cast<Out*>(args.perm)[at] = static_cast<Out>(order[at]);
  }
}

// How many bits ids below `size` need.
int bits_of(int64_t size) {
  return cuda::std::bit_width(static_cast<uint64_t>(size > 0 ? size - 1 : 0));
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// How a matrix is sorted: `upper` is the row of the result and `lower` the column.
struct Layout {
  int64_t rows;
  int lower;
  int upper;
  bool narrow;  // keys have 32 bits
};

Layout layout_of(const CsrArgs& args, bool transpose) {
  const int rows = bits_of(args.num_rows), cols = bits_of(args.num_cols);
  const bool narrow = rows + cols <= 32;
  return transpose ? Layout{args.num_cols, rows, cols, narrow}
                   : Layout{args.num_rows, cols, rows, narrow};
}

// What the sort goes to and fro between, in one piece of memory.
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
void build(const CsrArgs& args,
           const Layout& layout,
           const Allocate& allocate,
           cudaStream_t stream) {
  using Out = std::conditional_t<kTranspose, Index, int32_t>;
  const auto count = static_cast<uint32_t>(args.count);
  const int begin = kTranspose ? layout.lower : 0, end = layout.lower + layout.upper;
  size_t rest_bytes = 0;
  cub::DoubleBuffer<Key> no_keys;
  cub::DoubleBuffer<uint32_t> no_order;
  check(cub::DeviceRadixSort::SortPairs(nullptr, rest_bytes, no_keys, no_order, count, begin, end,
                                        stream),
        "csr");
  Buffers<Key> buffers(args.count, rest_bytes, allocate);
  if (count > 0) {
    const auto make_keys = kTranspose ? &transposed_keys<Key, Index> : &edge_keys<Key, Index>;
    make_keys<<<blocks_of(count), kThreads, 0, stream>>>(args, layout.lower, buffers.keys.Current(),
                                                         buffers.order.Current());
    check_launch("csr");
    check(cub::DeviceRadixSort::SortPairs(buffers.rest, rest_bytes, buffers.keys, buffers.order,
                                          count, begin, end, stream),
          "csr");
  }
  const int64_t threads = args.count > layout.rows ? args.count : layout.rows + 1;
  write_csr<Key, Out><<<blocks_of(threads), kThreads, 0, stream>>>(
      args, layout.rows, layout.lower, buffers.keys.Current(), buffers.order.Current());
  check_launch("csr");
}

template <bool kTranspose>
void build(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream) {
  const Layout layout = layout_of(args, kTranspose);
  if (layout.narrow)
    args.wide ? build<kTranspose, uint32_t, int64_t>(args, layout, allocate, stream)
              : build<kTranspose, uint32_t, int32_t>(args, layout, allocate, stream);
  else
    args.wide ? build<kTranspose, uint64_t, int64_t>(args, layout, allocate, stream)
              : build<kTranspose, uint64_t, int32_t>(args, layout, allocate, stream);
}

}  // namespace

void csr_from_coo_cuda(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream) {
  build<false>(args, allocate, stream);
}

void csr_transpose_cuda(const CsrArgs& args, const Allocate& allocate, cudaStream_t stream) {
  build<true>(args, allocate, stream);
}

}  // namespace pyg_accel
