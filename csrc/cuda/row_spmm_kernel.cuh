// Reductions of the rows of a CSR matrix: a group of lanes has a row, some columns each; groups of
// a warp share a long row, or have rows of their own. Rows that are too long are cut into pieces,
// which are combined in their order: results are the same in every run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <type_traits>

#include "cuda/rounded.cuh"
#include "cuda/row_spmm.h"
#include "cuda/warp.cuh"

namespace pyg_accel {

constexpr int kRowWarps = 4;  // of a block
constexpr int kCombineColumns = 8, kCombineLanes = 4;
constexpr unsigned kWholeWarp = 0xffffffffu;

template <typename T, int kVector>
struct alignas(kVector * sizeof(T)) Vector {
  T at[kVector];
};

// A sum, or the largest of a column so far and the entry that it is of.
template <typename Index, RowReduce kReduce>
struct Column {
  float value = kReduce == RowReduce::kSum ? 0.f : -std::numeric_limits<float>::infinity();
  Index at = -1;

  // The first of equal ones wins, and NaN over all others.
  __device__ void add(float x, Index from) {
    if constexpr (kReduce == RowReduce::kSum) {
      value += x;
    } else {
      bool better = x > value || (x != x && value == value);
      if constexpr (kReduce == RowReduce::kWinners) {
        better = from >= 0 && (better || at < 0);
        at = better ? from : at;
      }
      value = better ? x : value;
    }
  }

  // What another part of the row has.
  __device__ void merge(float x, Index from) {
    if constexpr (kReduce == RowReduce::kWinners) {
      const bool equal = x == value || (x != x && value != value);
      if (equal && from >= 0 && at >= 0) {
        at = from < at ? from : at;
        return;
      }
    }
    add(x, from);
  }

  __device__ void merge_lane(int distance) {
    const float x = __shfl_xor_sync(kWholeWarp, value, distance);
    Index from = -1;
    if constexpr (kReduce == RowReduce::kWinners)
      from = __shfl_xor_sync(kWholeWarp, at, distance);
    merge(x, from);
  }
};

// Stores finished columns of a row, of which `count` exist.
template <typename T, typename Index, RowReduce kReduce, int kVector>
__device__ inline void store_row(const RowSpmmArgs& a,
                                 int64_t place,
                                 int count,
                                 Index degree,
                                 const Column<Index, kReduce>* columns) {
  Vector<T, kVector> out;
  Vector<Index, kVector> winner;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    float value = columns[i].value;
    if constexpr (kReduce == RowReduce::kSum)
      value = a.mean && degree > 1 ? value / static_cast<float>(degree) : value;
    else
      value = degree == 0 ? 0.f : a.smallest ? -value : value;
    out.at[i] = rounded<T>(value);
    if constexpr (kReduce == RowReduce::kWinners) {
      const Index at = columns[i].at;
      winner.at[i] = at < 0 || !a.winner_of ? at : static_cast<const Index*>(a.winner_of)[at];
    }
  }
  T* to = static_cast<T*>(a.out) + place;
  Index* winners = static_cast<Index*>(a.winner) + place;
  if (kVector > 1 && a.width == a.out_width) {
    *reinterpret_cast<Vector<T, kVector>*>(to) = out;
    if constexpr (kReduce == RowReduce::kWinners)
      *reinterpret_cast<Vector<Index, kVector>*>(winners) = winner;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) {
      to[i] = out.at[i];
      if constexpr (kReduce == RowReduce::kWinners)
        winners[i] = winner.at[i];
    }
  }
}

// Where column `column` of a row with padded parts is in the results, and how many of the columns
// from there on exist.
__device__ inline int64_t place_of(const RowSpmmArgs& a, int64_t row, int column, int* count) {
  const int head = a.width == a.columns ? 0 : column / a.width;
  const int inside = column - head * a.width;
  *count = a.out_width - inside;
  return row * (static_cast<int64_t>(a.columns / a.width) * a.out_width) + head * a.out_width +
         inside;
}

// The columns of a lane: kParts vectors.
template <typename T, typename Index, RowReduce kReduce, int kVector, int kParts>
struct Lane {
  int first[kParts];  // column of the row
  int head[kParts];   // of the weights
  Column<Index, kReduce> columns[kVector * kParts];

  // Takes kAhead entries of a row that begins at `begin` and has `degree` of them, from number
  // `offset` on: first all loads, then the arithmetic.
  template <int kAhead>
  __device__ void step(const RowSpmmArgs& a, Index begin, unsigned degree, unsigned offset) {
    bool there[kAhead];
    Index entry[kAhead], source[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const unsigned number = offset + u * a.lanes;
      there[u] = number < degree;
      entry[u] = begin + static_cast<Index>(number);
      source[u] = there[u] ? static_cast<const Index*>(a.col)[entry[u]] : Index(0);
    }
    float weight[kAhead][kParts];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        weight[u][p] = 1.f;
    if (a.weight) {
      Index from[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        from[u] = a.by_source ? source[u] : entry[u];
      if (a.eid) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u)
          from[u] = there[u] ? static_cast<const Index*>(a.eid)[entry[u]] : Index(0);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const T* weights = static_cast<const T*>(a.weight) + offset_of(from[u], a.weight_heads);
#pragma unroll
        for (int p = 0; p < kParts; ++p)
          if (there[u] && first[p] < a.columns)
            weight[u][p] = static_cast<float>(weights[head[p]]);
      }
    }
    Vector<T, kVector> read[kAhead][kParts];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const T* row = static_cast<const T*>(a.x) + offset_of(source[u], a.x_stride);
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        read[u][p] = {};
        if (there[u] && first[p] < a.columns)
          read[u][p] = *reinterpret_cast<const Vector<T, kVector>*>(row + first[p]);
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
#pragma unroll
      for (int p = 0; p < kParts; ++p)
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const float x = static_cast<float>(read[u][p].at[i]) * weight[u][p];
          Column<Index, kReduce>& mine = columns[p * kVector + i];
          if constexpr (kReduce == RowReduce::kSum)
            mine.value += x;  // 0 of entries that are not there
          else if (there[u])
            mine.add(a.smallest ? -x : x, entry[u]);
        }
  }

  // One multiplication where indices have 32 bits.
  __device__ static uint64_t offset_of(Index source, int64_t stride) {
    if constexpr (sizeof(Index) == 4)
      return static_cast<uint64_t>(static_cast<uint32_t>(source)) * static_cast<uint32_t>(stride);
    else
      return static_cast<uint64_t>(source) * static_cast<uint64_t>(stride);
  }
};

// Rows, or with `cut` the pieces of long ones.
template <typename T, typename Index, RowReduce kReduce, int kVector, int kParts, int kAhead>
__global__ void __launch_bounds__(kRowWarps * 32)
    row_spmm_kernel(const RowSpmmArgs a, const bool cut) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int group = a.slice / (kVector * kParts), shared = group * a.lanes;  // lanes of a row
  const int across = lane % group, side = lane % shared / group;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kRowWarps + thread / 32;
  const int64_t task = warp * (32 / shared) + lane / shared;
  Lane<T, Index, kReduce, kVector, kParts> mine;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    mine.first[p] = static_cast<int>(blockIdx.y) * a.slice + (p * group + across) * kVector;
    mine.head[p] = a.weight_heads > 1 ? mine.first[p] / a.width : 0;
  }
  int64_t row = task;
  Index begin = 0, end = 0;
  bool keep = task < (cut ? a.pieces : a.num_rows);
  if (keep && cut) {
    begin = static_cast<const Index*>(a.piece_begin)[task];
    end = static_cast<const Index*>(a.piece_end)[task];
  } else if (keep) {
    row = a.order ? static_cast<int64_t>(static_cast<const Index*>(a.order)[task]) : task;
    begin = static_cast<const Index*>(a.rowptr)[row];
    end = static_cast<const Index*>(a.rowptr)[row + 1];
    if (a.pieces > 0 && end - begin > static_cast<Index>(a.limit)) {
      keep = false;
      end = begin;
    }
  }
  const unsigned degree = static_cast<unsigned>(end - begin);
  // All rows of a warp take as many steps as the longest.
  const unsigned longest = __reduce_max_sync(kWholeWarp, degree);
  for (unsigned done = 0; done < longest;) {
    constexpr int kHalf = kAhead / 2;
    if (longest - done > static_cast<unsigned>(kHalf * a.lanes)) {
      mine.template step<kAhead>(a, begin, degree, done + side);
      done += kAhead * a.lanes;
    } else {
      mine.template step<kHalf>(a, begin, degree, done + side);
      done += kHalf * a.lanes;
    }
  }
  for (int distance = group; distance < shared; distance *= 2)
#pragma unroll
    for (int i = 0; i < kVector * kParts; ++i)
      mine.columns[i].merge_lane(distance);
  if (!keep || side > 0)
    return;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    if (mine.first[p] >= a.columns)
      continue;
    const Column<Index, kReduce>* columns = mine.columns + p * kVector;
    if (!cut) {
      int count;
      const int64_t place = place_of(a, row, mine.first[p], &count);
      store_row<T, Index, kReduce, kVector>(a, place, count, end - begin, columns);
      continue;
    }
    const int64_t place = task * a.columns + mine.first[p];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      a.partial[place + i] = columns[i].value;
      if constexpr (kReduce == RowReduce::kWinners)
        static_cast<Index*>(a.partial_at)[place + i] = columns[i].at;
    }
  }
}

// A warp puts the pieces of a long row together, kCombineColumns columns at a time.
template <typename T, typename Index, RowReduce kReduce>
__global__ void __launch_bounds__(kRowWarps * 32) row_combine_kernel(const RowSpmmArgs a) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int chunk = static_cast<int>(blockIdx.y) * kRowWarps + thread / 32;
  const int column = chunk * kCombineColumns + lane % kCombineColumns;
  const auto* first = static_cast<const Index*>(a.long_first) + blockIdx.x;
  Column<Index, kReduce> mine;
  if (column < a.columns) {
#pragma unroll 4
    for (int64_t p = first[0] + lane / kCombineColumns; p < first[1]; p += kCombineLanes) {
      const int64_t place = p * a.columns + column;
      Index at = -1;
      if constexpr (kReduce == RowReduce::kWinners)
        at = static_cast<const Index*>(a.partial_at)[place];
      mine.merge(a.partial[place], at);
    }
  }
  for (int distance = kCombineColumns; distance < 32; distance *= 2)
    mine.merge_lane(distance);
  const auto row = static_cast<int64_t>(static_cast<const Index*>(a.long_row)[blockIdx.x]);
  const auto* rowptr = static_cast<const Index*>(a.rowptr) + row;
  int count;
  const int64_t place = place_of(a, row, column, &count);
  if (lane < kCombineColumns && column < a.columns && count > 0)
    store_row<T, Index, kReduce, 1>(a, place, count, rowptr[1] - rowptr[0], &mine);
}

template <typename T, typename Index, RowReduce kReduce, int kVector, int kParts, int kAhead>
void run_rows(const RowSpmmArgs& a, cudaStream_t stream) {
  const auto kernel = row_spmm_kernel<T, Index, kReduce, kVector, kParts, kAhead>;
  const int shared = a.slice / (kVector * kParts) * a.lanes;
  const auto slices = static_cast<unsigned>((a.columns + a.slice - 1) / a.slice);
  const auto launch = [&](int64_t tasks, bool cut) {
    const int64_t of_block = kRowWarps * (32 / shared);
    const dim3 blocks(static_cast<unsigned>((tasks + of_block - 1) / of_block), slices);
    launch_kernel("row_spmm", kernel, blocks, kRowWarps * 32, 0, stream, a, cut);
  };
  launch(a.num_rows, false);
  if (a.pieces == 0)
    return;
  launch(a.pieces, true);
  constexpr int kOfBlock = kRowWarps * kCombineColumns;
  const dim3 blocks(static_cast<unsigned>(a.long_rows),
                    static_cast<unsigned>((a.columns + kOfBlock - 1) / kOfBlock));
  launch_kernel("row_combine", row_combine_kernel<T, Index, kReduce>, blocks, kRowWarps * 32, 0,
                stream, a);
}

template <typename T, typename Index, RowReduce kReduce>
void run_vectors(const RowSpmmArgs& a, cudaStream_t stream) {
  constexpr int kWhole = 16 / sizeof(T);
  if (a.slice > 32 * a.vector) {  // two vectors a lane
    if constexpr (kWhole == 4) {
      if (a.vector == kWhole)
        return run_rows<T, Index, kReduce, kWhole, 2, 4>(a, stream);
    }
    return run_rows<T, Index, kReduce, 1, 2, 4>(a, stream);
  }
  const auto run = [&]<int kVector>(std::integral_constant<int, kVector>) {
    a.few ? run_rows<T, Index, kReduce, kVector, 1, 4>(a, stream)
          : run_rows<T, Index, kReduce, kVector, 1, 8>(a, stream);
  };
  if (a.vector == kWhole)
    run(std::integral_constant<int, kWhole>());
  else if (kWhole > 4 && a.vector == 4)
    run(std::integral_constant<int, 4>());
  else if (a.vector == 2)
    run(std::integral_constant<int, 2>());
  else
    run(std::integral_constant<int, 1>());
}

template <typename T, typename Index>
void run_reduce(RowReduce reduce, const RowSpmmArgs& a, cudaStream_t stream) {
  if (reduce == RowReduce::kSum)
    run_vectors<T, Index, RowReduce::kSum>(a, stream);
  else if (reduce == RowReduce::kExtreme)
    run_vectors<T, Index, RowReduce::kExtreme>(a, stream);
  else
    run_vectors<T, Index, RowReduce::kWinners>(a, stream);
}

template <typename T>
void row_spmm(RowReduce reduce, const RowSpmmArgs& a, cudaStream_t stream) {
  a.wide ? run_reduce<T, int64_t>(reduce, a, stream) : run_reduce<T, int32_t>(reduce, a, stream);
}

}  // namespace pyg_accel
