// Weighted SpMM over condensed tiles on Tensor Cores (TC-GNN, section 4.2, algorithm 2).
//
// A block sums the tiles of one window, or of a part of it: D = A X with A the tile and X the rows
// that its columns name. Its warps have two roles. One writes the entries of tile after tile into a
// ring of buffers in shared memory, and takes them out again when the tile was multiplied: a tile
// is mostly zeros, and to clear all of it would cost more. The others multiply; each has features
// of its own, 128 bytes of a row, and copies the rows of X for the next tiles into a ring of its
// own.
//
// Which feature is which column of B is ours to choose: one 16-byte load gives a lane its elements
// for kVector instructions. The chunks of a row are stored at places that depend on the row, so
// that neither copies nor loads meet in a bank. (Straight into registers, without shared memory, a
// load would touch four rows for every 8 lanes, which takes the L1 four times as long.)
//
// Zeros of A times an infinite x are NaN in rows that do not have that neighbour. A result that is
// not finite is therefore computed again from its row's own entries.
#pragma once

#include "cuda/check.cuh"
#include "cuda/kernels.h"
#include "cuda/mma.cuh"
#include "cuda/pipeline.cuh"

namespace pyg_accel {

constexpr int kCopies = 3;       // tiles' rows of X in shared memory, for each warp
constexpr int kRowBytes = 128;   // of X that a warp has
constexpr int kBlock = 256;      // entries that are copied together
constexpr int kEntryBlocks = 4;  // of those, in shared memory
constexpr int kMostWarps = 4;    // that multiply
constexpr unsigned kAll = 0xffffffffu;

template <typename T, int kBlocks>
struct SpmmShape {
  static constexpr int kWindow = 16 * kBlocks;
  static constexpr int kVector = Mma<T>::kVector;
  static constexpr int kFeatures = 8 * kVector;  // of a warp: 128 bytes
  static constexpr int kSteps = kTileColumns / Mma<T>::kDepth;
  static constexpr int kLoads = Mma<T>::kDepth / 4;  // rows of X that a lane loads a step
  static constexpr int kTile = kWindow * kTileColumns;
  // Tiles in shared memory. Large ones leave room for three blocks a multiprocessor if they are
  // two.
  static constexpr int kStages = kTile * sizeof(T) > 4096 ? 2 : 3;

  // Where an entry lies in shared memory: as the lanes read A, one 16-byte load each.
  static __device__ __forceinline__ int place(int slot) {
    const int row = slot / kTileColumns, k = slot % kTileColumns;
    const int block = row >> 4, half = (row >> 3) & 1, g = row & 7;
    if constexpr (sizeof(T) == 4) {
      const int step = k >> 3, high = (k >> 2) & 1, t = k & 3;
      return (((step * kBlocks + block) * 32 + g * 4 + t) << 2) + high * 2 + half;
    } else {
      const int step = k >> 4, high = (k >> 3) & 1, t = (k >> 1) & 3;
      return (((step * kBlocks + block) * 32 + g * 4 + t) << 3) + (high * 2 + half) * 2 + (k & 1);
    }
  }
};

template <typename T>
__device__ __noinline__ float repeat_element(const SpmmArgs& args, int row, int feature) {
  const T* x = static_cast<const T*>(args.x);
  const T* weight = static_cast<const T*>(args.weight);
  float sum = 0.0f;
  for (int32_t e = args.rowptr[row]; e < args.rowptr[row + 1]; ++e) {
    const float value = to_float(x[args.csr_col[e] * args.x_stride + feature]);
    sum += weight ? to_float(weight[args.eid ? args.eid[e] : e]) * value : value;
  }
  return sum;
}

// Writes 2 kVector neighbouring features of a row: scaled, and computed again if not finite.
template <typename T, int kCount>
__device__ __forceinline__ void finish(const SpmmArgs& args,
                                       int row,
                                       int feature,
                                       float (&sum)[kCount]) {
  constexpr int kVector = Mma<T>::kVector;
  if (row >= args.num_rows || feature >= args.width)
    return;
  float scale = 1.0f;
  if (args.mean) {
    const int degree = args.rowptr[row + 1] - args.rowptr[row];
    scale = degree > 0 ? static_cast<float>(degree) : 1.0f;
  }
  T* out = static_cast<T*>(args.out) + static_cast<int64_t>(row) * args.width + feature;
  alignas(16) T value[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!isfinite(sum[i]) && feature + i < args.width)
      sum[i] = repeat_element<T>(args, row, feature + i);
    value[i] = from_float<T>(args.mean ? sum[i] / scale : sum[i]);
  }
  if (args.width == args.padded) {  // whole vectors
#pragma unroll
    for (int i = 0; i < kCount; i += kVector)
      if (feature + i < args.width)
        *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(value + i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (feature + i < args.width)
        out[i] = value[i];
  }
}

// What a block has in shared memory.
template <typename T, int kBlocks>
struct alignas(128) SpmmMemory {
  static constexpr int kStages = SpmmShape<T, kBlocks>::kStages;
  alignas(16) T tiles[kStages][SpmmShape<T, kBlocks>::kTile];
  alignas(16) T values[kEntryBlocks][kBlock];
  alignas(16) int16_t slots[kEntryBlocks][kBlock];
  int16_t places[kStages][kBlock];  // of a tile's entries, for clearing it
  uint64_t full[kStages], empty[kStages];
};

// The warp that writes tiles. Entries of successive tiles are successive, so they are copied in
// blocks, far ahead of the tile that is written, whatever the tiles' sizes.
template <typename T, int kBlocks, bool kExact>
__device__ __forceinline__ void write_tiles(const SpmmArgs& args,
                                            const Item& item,
                                            SpmmMemory<T, kBlocks>& memory,
                                            int lane) {
  using Shape = SpmmShape<T, kBlocks>;
  constexpr int kStages = Shape::kStages;
  constexpr int kSlots = 8, kValues = 16 / sizeof(T);  // of a 16-byte copy
  const T* values = static_cast<const T*>(args.value);
  const T zero = from_float<T>(0.0f);
  const int last = item.end;
  // Ends of tiles, 32 at a time, the next 32 ahead of need.
  const auto pointers = [&](int tile) { return args.tile_ptr[min(tile + lane, last)]; };
  int ends = pointers(item.begin + 1), later = pointers(item.begin + 33);
  int begin = args.tile_ptr[item.begin];
  const int stop = args.tile_ptr[last];

  const auto copy_block = [&](int block) {
    const int ring = block % kEntryBlocks, start = block * kBlock;
    if (start < stop) {
      const int slot = lane * kSlots;
      const int left = min(max(stop - start - slot, 0), kSlots);
      copy_async(memory.slots[ring] + slot, args.slot + (left ? start + slot : 0), 2 * left);
#pragma unroll
      for (int at = lane * kValues; at < kBlock; at += 32 * kValues) {
        const int count = min(max(stop - start - at, 0), kValues);
        if (values)
          copy_async(memory.values[ring] + at, values + (count ? start + at : 0),
                     count * static_cast<int>(sizeof(T)));
      }
    }
    commit_copies();
  };
  int block = begin / kBlock - 1;  // whose entries may be read
#pragma unroll
  for (int i = 1; i < kEntryBlocks; ++i)
    copy_block(block + i);

  int written[kStages] = {};
  for (int tile = item.begin, stage = 0, round = 0; tile < last; ++tile) {
    const int number = (tile - item.begin) & 31;
    const int end = __shfl_sync(kAll, ends, number);
    T* const to = memory.tiles[stage];
    int16_t* const places = memory.places[stage];
    if (round > 0) {
      barrier_wait(&memory.empty[stage], (round - 1) & 1);
      int count = 0;
#pragma unroll
      for (int s = 0; s < kStages; ++s)
        count = s == stage ? written[s] : count;
      if (count > kBlock) {
        for (int i = lane; i < Shape::kTile * static_cast<int>(sizeof(T)) / 16; i += 32)
          reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
      } else {
        for (int i = lane; i < count; i += 32)
          to[places[i]] = zero;
      }
      __syncwarp();
    }
#pragma unroll
    for (int s = 0; s < kStages; ++s)
      written[s] = s == stage ? end - begin : written[s];

    for (int at = begin; at < end;) {
      if (at / kBlock != block) {
        ++block;
        wait_copies<kEntryBlocks - 2>();
        __syncwarp();
        copy_block(block + kEntryBlocks - 1);
      }
      const int until = min(end, (block + 1) * kBlock), ring = block % kEntryBlocks;
      for (int e = at + lane; e < until; e += 32) {
        const int place = Shape::place(memory.slots[ring][e % kBlock]);
        T value = from_float<T>(1.0f);
        if (values)
          value = memory.values[ring][e % kBlock];
        if constexpr (sizeof(T) == 4 && !kExact)
          value = __uint_as_float(to_tf32(value));
        to[place] = value;
        if (e - begin < kBlock)
          places[e - begin] = static_cast<int16_t>(place);
      }
      at = until;
    }
    __syncwarp();
    if (lane == 0)
      barrier_arrive(&memory.full[stage]);
    begin = end;
    if (number == 31) {
      ends = later;
      later = pointers(tile + 34);
    }
    if (++stage == kStages)
      stage = 0, ++round;
  }
}

template <typename T, int kBlocks, bool kExact>
__device__ __forceinline__ void multiply_step(const SpmmArgs& args,
                                              const T* tile,
                                              int step,
                                              int lane,
                                              const uint4 (&x)[Mma<T>::kDepth / 4],
                                              float (&sum)[kBlocks][Mma<T>::kVector][4]) {
  constexpr int kVector = Mma<T>::kVector;
  const uint4* fragments = reinterpret_cast<const uint4*>(tile) + step * kBlocks * 32 + lane;
  uint32_t b0[kVector], b1[kVector], low0[kVector], low1[kVector];
  if constexpr (sizeof(T) == 4) {
    const uint32_t words[2][4] = {{x[0].x, x[0].y, x[0].z, x[0].w},
                                  {x[1].x, x[1].y, x[1].z, x[1].w}};
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if constexpr (kExact) {
        split_tf32(words[0][j], b0[j], low0[j]);
        split_tf32(words[1][j], b1[j], low1[j]);
      } else {
        b0[j] = almost_tf32(words[0][j]);
        b1[j] = almost_tf32(words[1][j]);
      }
    }
  } else {  // pairs of rows 2 t, 2 t + 1, and of those 8 further on
    const uint32_t words[4][4] = {{x[0].x, x[0].y, x[0].z, x[0].w},
                                  {x[1].x, x[1].y, x[1].z, x[1].w},
                                  {x[2].x, x[2].y, x[2].z, x[2].w},
                                  {x[3].x, x[3].y, x[3].z, x[3].w}};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      b0[2 * q] = __byte_perm(words[0][q], words[1][q], 0x5410);
      b0[2 * q + 1] = __byte_perm(words[0][q], words[1][q], 0x7632);
      b1[2 * q] = __byte_perm(words[2][q], words[3][q], 0x5410);
      b1[2 * q + 1] = __byte_perm(words[2][q], words[3][q], 0x7632);
    }
  }
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    const uint4 raw = fragments[m * 32];
    uint32_t a[4] = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (kExact) {
      uint32_t low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        split_tf32(a[i], a[i], low[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        Mma<T>::multiply(sum[m][j], a, low0[j], low1[j]);
      if (args.value) {  // weights of 1 have no low part
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          Mma<T>::multiply(sum[m][j], low, b0[j], b1[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      Mma<T>::multiply(sum[m][j], a, b0[j], b1[j]);
  }
}

// Blocks of a multiprocessor: as many as the accumulators leave registers for.
template <typename T, int kBlocks, bool kExact>
constexpr int kResident = kBlocks * Mma<T>::kVector * (kExact ? 2 : 1) > 16 ? 2 : 3;

template <typename T, int kBlocks, bool kExact>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), kResident<T, kBlocks, kExact>)
    spmm_kernel(const __grid_constant__ SpmmArgs args) {
  using Shape = SpmmShape<T, kBlocks>;
  constexpr int kVector = Shape::kVector, kStages = Shape::kStages;
  extern __shared__ uint4 bytes[];
  SpmmMemory<T, kBlocks>& memory = *reinterpret_cast<SpmmMemory<T, kBlocks>*>(bytes);

  const Item item = args.items[blockIdx.x];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_slice = blockIdx.y * args.warps * Shape::kFeatures;
  const int busy = min(args.warps, (args.padded - first_slice + Shape::kFeatures - 1) /
                                       Shape::kFeatures);  // warps that have features

  uint4* words = reinterpret_cast<uint4*>(&memory.tiles[0][0]);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(memory.tiles) / 16); i += blockDim.x)
    words[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < kStages) {
    barrier_init(&memory.full[threadIdx.x], 1);
    barrier_init(&memory.empty[threadIdx.x], busy);
  }
  __syncthreads();
  if (warp == args.warps) {
    write_tiles<T, kBlocks, kExact>(args, item, memory, lane);
    return;
  }
  if (warp >= busy)
    return;

  const int g = lane >> 2, t = lane & 3;
  const int slice = first_slice + warp * Shape::kFeatures;
  float sum[kBlocks][kVector][4] = {};
  float total[kExact ? kBlocks : 1][kVector][4] = {};
  const int last = item.end;

  char* const ring = reinterpret_cast<char*>(bytes) + sizeof(SpmmMemory<T, kBlocks>) +
                     warp * kCopies * kTileColumns * kRowBytes;
  // Past the item's last tile, of that one again: nothing is done with them.
  const auto columns_of = [&](int tile) {
    return args.col[static_cast<int64_t>(min(tile, last - 1)) * kTileColumns + lane];
  };
  // A quarter of the warp copies a row, its lanes 16 bytes each.
  const int quarter = lane >> 3, chunk = lane & 7;
  const uint64_t x = reinterpret_cast<uint64_t>(static_cast<const T*>(args.x) + slice) + 16 * chunk;
  const bool valid = slice + chunk * kVector < args.padded;  // what is not is never stored
  uint32_t stride = static_cast<uint32_t>(args.x_stride * sizeof(T));
  uint32_t to[2];  // of even and odd quadruples of rows
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 4 * i + quarter;
    const int turned = chunk ^ (2 * ((sizeof(T) == 4 ? row : row >> 1) & 3));
    to[i] = shared_address(ring) + row * kRowBytes + 16 * turned;
    keep(to[i]);
  }
  keep(stride);
  const auto copy = [&](int tile, int stage, int columns) {
    if (tile < last) {
      const uint32_t offset = stage * kTileColumns * kRowBytes;
#pragma unroll
      for (int i = 0; i < kTileColumns / 4; ++i) {
        const int source = __shfl_sync(kAll, columns, 4 * i + quarter);
        if (valid)
          copy_async(to[i & 1] + offset + (i / 2) * 8 * kRowBytes, row_address(x, source, stride));
      }
    }
    commit_copies();
  };

  if (item.begin < last) {
    int columns = columns_of(item.begin);
#pragma unroll
    for (int i = 0; i < kCopies - 1; ++i) {
      copy(item.begin + i, i, columns);
      columns = columns_of(item.begin + i + 1);
    }
    int stage = 0, parity = 0, old = kCopies - 1, fresh = 0;
    for (int tile = item.begin; tile < last; ++tile) {
      wait_copies<kCopies - 2>();
      __syncwarp();
      copy(tile + kCopies - 1, old, columns);
      columns = columns_of(tile + kCopies);
      barrier_wait(&memory.full[stage], parity);
      const char* const rows = ring + fresh * kTileColumns * kRowBytes;
#pragma unroll
      for (int step = 0; step < Shape::kSteps; ++step) {
        uint4 x_rows[Shape::kLoads];
#pragma unroll
        for (int i = 0; i < Shape::kLoads; ++i) {
          int k = step * Mma<T>::kDepth;
          k += sizeof(T) == 4 ? t + 4 * i : 2 * t + (i & 1) + 8 * (i >> 1);
          x_rows[i] = *reinterpret_cast<const uint4*>(rows + k * kRowBytes + 16 * (g ^ (2 * t)));
        }
        multiply_step<T, kBlocks, kExact>(args, memory.tiles[stage], step, lane, x_rows, sum);
      }
      __syncwarp();
      if (lane == 0)
        barrier_arrive(&memory.empty[stage]);
      if constexpr (kExact) {
        // Tensor Cores round sums towards zero: short sums, added up in the usual way.
#pragma unroll
        for (int m = 0; m < kBlocks; ++m)
#pragma unroll
          for (int j = 0; j < kVector; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              total[m][j][i] += sum[m][j][i];
              sum[m][j][i] = 0.0f;
            }
      }
      if (++stage == kStages)
        stage = 0, parity ^= 1;
      old = fresh;
      if (++fresh == kCopies)
        fresh = 0;
    }
  }

  // Of rows g and g + 8 a lane has the features 2 kVector t to 2 kVector t + 2 kVector - 1.
  const int feature = slice + 2 * kVector * t;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row[2 * kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if constexpr (kExact) {
          row[j] = total[m][j][2 * half];
          row[kVector + j] = total[m][j][2 * half + 1];
        } else {
          row[j] = sum[m][j][2 * half];
          row[kVector + j] = sum[m][j][2 * half + 1];
        }
      }
      const int local = m * 16 + half * 8 + g;
      if (item.partial < 0) {
        finish<T>(args, item.window * Shape::kWindow + local, feature, row);
      } else {
        const int64_t at = static_cast<int64_t>(item.partial) * Shape::kWindow + local;
        float4* out = reinterpret_cast<float4*>(args.partial + at * args.padded + feature);
#pragma unroll
        for (int i = 0; i < 2 * kVector; i += 4)
          if (feature + i < args.padded)
            out[i / 4] = make_float4(row[i], row[i + 1], row[i + 2], row[i + 3]);
      }
    }
  }
}

// Adds the partial sums of divided windows, in order: a block has one row of one window.
template <typename T, int kBlocks>
__global__ void combine_kernel(const __grid_constant__ SpmmArgs args) {
  constexpr int kWindow = 16 * kBlocks;
  constexpr int kVector = Mma<T>::kVector;
  const Split split = args.splits[blockIdx.x];
  const int local = blockIdx.y;
  for (int feature = threadIdx.x * kVector; feature < args.padded;
       feature += blockDim.x * kVector) {
    float sum[kVector] = {};
    for (int part = 0; part < split.count; ++part) {
      const int64_t at = static_cast<int64_t>(split.first + part) * kWindow + local;
      const float* from = args.partial + at * args.padded + feature;
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        sum[i] += from[i];
    }
    finish<T>(args, split.window * kWindow + local, feature, sum);
  }
}

template <typename T, int kBlocks, bool kExact>
void launch_spmm(const SpmmArgs& args, cudaStream_t stream) {
  const int features = SpmmShape<T, kBlocks>::kFeatures * args.warps;
  if (args.num_items) {
    const dim3 grid(args.num_items, (args.width + features - 1) / features);
    const auto kernel = spmm_kernel<T, kBlocks, kExact>;
    const int memory = static_cast<int>(sizeof(SpmmMemory<T, kBlocks>)) +
                       args.warps * kCopies * kTileColumns * kRowBytes;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory),
          "shared memory for spmm");
    kernel<<<grid, 32 * (args.warps + 1), memory, stream>>>(args);
    check_launch("spmm");
  }
  if (args.num_splits) {
    const dim3 grid(args.num_splits, 16 * kBlocks);
    combine_kernel<T, kBlocks><<<grid, 64, 0, stream>>>(args);
    check_launch("spmm combine");
  }
}

template <typename T, bool kExact>
void launch_spmm(int window, const SpmmArgs& args, cudaStream_t stream) {
  switch (window) {
    case 16:
      return launch_spmm<T, 1, kExact>(args, stream);
    case 32:
      return launch_spmm<T, 2, kExact>(args, stream);
    case 64:
      return launch_spmm<T, 4, kExact>(args, stream);
    default:
      throw std::invalid_argument("expected windows of 16, 32 or 64 rows");
  }
}

}  // namespace pyg_accel
