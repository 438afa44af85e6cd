// Weighted SpMM over condensed tiles on Tensor Cores (TC-GNN, section 4.2, algorithm 2).
//
// A block sums the tiles of one window, or of a part of it: D = A X with A the tile and X the rows
// that its columns name. Its warps have two roles. One writes the entries of tile after tile into a
// ring of buffers in shared memory, and takes them out again when the tile was multiplied: a tile
// is mostly zeros, and clearing all of it would cost more. The others multiply; each has features
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
#include "cuda/spmm_finish.cuh"
#include "cuda/spmm_memory.cuh"
#include "cuda/spmm_multiply.cuh"
#include "cuda/spmm_write.cuh"

namespace pyg_accel {

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
  if (args.add && !args.mean && item.begin == item.end)
    return;  // a window without tiles adds nothing
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_slice = blockIdx.y * args.warps * Shape::kFeatures;
  const int busy = min(args.warps, (args.padded - first_slice + Shape::kFeatures - 1) /
                                       Shape::kFeatures);  // warps that have features

  uint4* words = reinterpret_cast<uint4*>(&memory.tiles[0][0]);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(memory.tiles) / 16); i += blockDim.x)
    words[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < kStages) {
    barrier_init(&memory.full[threadIdx.x], 32);
    barrier_init(&memory.empty[threadIdx.x], 32 * busy);
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
  const bool valid = slice + chunk * kVector < args.padded;  // invalid ones are never stored
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
