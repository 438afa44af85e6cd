// Sampled dense-dense product over condensed tiles on Tensor Cores (TC-GNN, section 4.2,
// algorithm 3): out[e] = dot(target[i], source[j]) for every entry e = (i, j).
//
// A block has the target rows of a window in shared memory; each of its warps takes tiles of the
// window in turn and multiplies them by the tile's source rows, 128 bytes of each after the other,
// which it copies into a ring of its own. 16 bytes of a row are a lane's share of two instructions,
// for any type. The products of entries are written to their edges through shared memory.
#pragma once

#include "cuda/check.cuh"
#include "cuda/kernels.h"
#include "cuda/mma.cuh"
#include "cuda/pipeline.cuh"

namespace pyg_accel {

constexpr int kSddmmWarps = 4;
constexpr int kChunk = 128;  // bytes of a row that are copied together
constexpr int kRing = 3;     // chunks in shared memory
constexpr int kColumnBlocks = kTileColumns / 8;
constexpr int kPitch = kTileColumns + 8;  // of the results, floats: rows start 8 banks apart
constexpr int kFetched = 4;               // entries of a tile that a lane fetches ahead
constexpr unsigned kEvery = 0xffffffffu;

template <typename T>
__device__ __noinline__ float repeat_dot(const SddmmArgs& args, int row, int source) {
  const T* a = static_cast<const T*>(args.target) + row * args.target_stride;
  const T* b = static_cast<const T*>(args.source) + source * args.source_stride;
  float sum = 0.0f;
  for (int f = args.begin; f < args.end; ++f)
    sum += static_cast<float>(a[f]) * static_cast<float>(b[f]);
  return sum;
}

template <typename T, bool kExact>
__device__ __forceinline__ void prepare(const uint4& raw, uint32_t (&high)[4], uint32_t (&low)[4]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kExact)
      split_tf32(words[i], high[i], low[i]);
    else if constexpr (sizeof(T) == 4)
      high[i] = almost_tf32(words[i]);
    else
      high[i] = words[i];
  }
}

template <typename T, int kBlocks, bool kExact>
__global__ void __launch_bounds__(32 * kSddmmWarps)
    sddmm_kernel(const __grid_constant__ SddmmArgs args) {
  constexpr int kWindow = 16 * kBlocks;
  extern __shared__ uint4 memory[];
  const Item item = args.items[blockIdx.x];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int bytes = (args.end - args.begin) * static_cast<int>(sizeof(T));
  const int chunks = (bytes + kChunk - 1) / kChunk;
  uint32_t* const targets = reinterpret_cast<uint32_t*>(memory);
  char* const rings = reinterpret_cast<char*>(memory) + kWindow * chunks * kChunk;
  char* const ring = rings + warp * kRing * kTileColumns * kChunk;
  float* const results =
      reinterpret_cast<float*>(rings + kSddmmWarps * kRing * kTileColumns * kChunk) +
      warp * 16 * kPitch;

  // Target rows, as the lanes read A: rows g and g + 8, neighbouring words of both, 16 bytes a
  // lane.
  const int vectors = chunks * (kChunk / 16);
  for (int i = threadIdx.x; i < kWindow * vectors; i += blockDim.x) {
    const int row = i % kWindow, vector = i / kWindow;
    const int global = item.window * kWindow + row;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (global < args.num_rows && vector * 16 < bytes) {
      const T* from = static_cast<const T*>(args.target) + global * args.target_stride + args.begin;
      value = __ldg(reinterpret_cast<const uint4*>(from) + vector);
    }
    const uint32_t words[4] = {value.x, value.y, value.z, value.w};
    const int at = (row / 16 * (vectors / 4) + vector / 4) * 64 + row % 8 * 4 + vector % 4;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t word = words[w];
      if constexpr (sizeof(T) == 4 && !kExact)
        word = to_tf32(__uint_as_float(word));
      targets[(at + w / 2 * 32) * 4 + w % 2 * 2 + (row >> 3 & 1)] = word;
    }
  }
  if (bytes % kChunk) {  // the end of the last chunk is not copied: it must be zero
    uint4* const words = reinterpret_cast<uint4*>(rings);
    for (int i = threadIdx.x; i < kSddmmWarps * kRing * kTileColumns * kChunk / 16; i += blockDim.x)
      words[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  const int first = item.begin + warp;
  if (first >= item.end)
    return;
  const int quarter = lane >> 3, part = lane & 7;  // a quarter of the warp copies a row
  const uint64_t sources =
      reinterpret_cast<uint64_t>(static_cast<const T*>(args.source) + args.begin) + 16 * part;
  uint32_t stride = static_cast<uint32_t>(args.source_stride * sizeof(T));
  uint32_t to = shared_address(ring) + quarter * kChunk + 16 * (part ^ (4 * (quarter & 1)));
  keep(stride);
  keep(to);
  const auto columns_of = [&](int tile) {
    return args.col[static_cast<int64_t>(min(tile, item.end - 1)) * kTileColumns + lane];
  };
  // Copies run ahead of the products: theirs is chunk `ahead` of tile `coming`.
  int coming = first, ahead = 0, fill = 0;
  int columns = columns_of(first), columns_after = columns_of(first + kSddmmWarps);
  const auto copy = [&]() {
    if (coming < item.end) {
      const uint32_t offset = fill * kTileColumns * kChunk;
      const uint64_t from = sources + ahead * kChunk;
      const bool valid = ahead * kChunk + 16 * part < bytes;
#pragma unroll
      for (int i = 0; i < kTileColumns / 4; ++i) {
        const int source = __shfl_sync(kEvery, columns, 4 * i + quarter);
        if (valid)
          copy_async(to + offset + i * 4 * kChunk, row_address(from, source, stride));
      }
    }
    commit_copies();
    if (++fill == kRing)
      fill = 0;
    if (++ahead == chunks) {
      ahead = 0;
      coming += kSddmmWarps;
      columns = columns_after;
      columns_after = columns_of(coming + kSddmmWarps);
    }
  };
#pragma unroll
  for (int i = 0; i < kRing - 1; ++i)
    copy();

  int use = 0;
  int begin_after = args.tile_ptr[first], end_after = args.tile_ptr[first + 1];
  for (int tile = first; tile < item.end; tile += kSddmmWarps) {
    const int begin = begin_after, end = end_after;
    const int tile_after = min(tile + kSddmmWarps, item.end - 1);
    begin_after = args.tile_ptr[tile_after], end_after = args.tile_ptr[tile_after + 1];
    int slots[kFetched], places[kFetched];
#pragma unroll
    for (int i = 0; i < kFetched; ++i) {
      const int e = begin + i * 32 + lane;
      slots[i] = e < end ? args.slot[e] : -1;
      places[i] = e < end ? args.order[e] : 0;
    }
    float sum[kBlocks][kColumnBlocks][4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      wait_copies<kRing - 2>();
      __syncwarp();
      copy();
      const char* const rows = ring + use * kTileColumns * kChunk;
      if (++use == kRing)
        use = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t high[kColumnBlocks][4], low[kColumnBlocks][4];
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          const int at = (4 * half + t) ^ (4 * (g & 1));
          prepare<T, kExact>(*reinterpret_cast<const uint4*>(rows + (j * 8 + g) * kChunk + 16 * at),
                             high[j], low[j]);
        }
        const uint4* at = reinterpret_cast<const uint4*>(targets) + (chunk * 2 + half) * 64 + lane;
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            const uint4 raw = at[(m * chunks * 4 + i / 2) * 32];
            uint32_t a[4] = {raw.x, raw.y, raw.z, raw.w}, rest[4];
            if constexpr (kExact) {
#pragma unroll
              for (int w = 0; w < 4; ++w)
                split_tf32(a[w], a[w], rest[w]);
            }
#pragma unroll
            for (int j = 0; j < kColumnBlocks; ++j) {
              if constexpr (kExact) {
                Mma<T>::multiply(sum[m][j], rest, high[j][i], high[j][i + 1]);
                Mma<T>::multiply(sum[m][j], a, low[j][i], low[j][i + 1]);
              }
              Mma<T>::multiply(sum[m][j], a, high[j][i], high[j][i + 1]);
            }
          }
        }
      }
    }

    const auto write = [&](int slot, int place) {
      const int row = slot / kTileColumns, column = slot % kTileColumns;
      float value = results[row % 16 * kPitch + column];
      if (!isfinite(value))  // infinities do not survive being split
        value = repeat_dot<T>(args, item.window * kWindow + row,
                              args.col[static_cast<int64_t>(tile) * kTileColumns + column]);
      if (args.sum)
        args.sum[place] = args.first ? value : args.sum[place] + value;
      else
        static_cast<T*>(args.out)[place] = rounded<T>(value);
    };
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        float* to = results + g * kPitch + j * 8 + 2 * t;
        *reinterpret_cast<float2*>(to) = make_float2(sum[m][j][0], sum[m][j][1]);
        *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(sum[m][j][2], sum[m][j][3]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kFetched; ++i)
        if (slots[i] >= 0 && slots[i] / (16 * kTileColumns) == m)
          write(slots[i], places[i]);
      for (int e = begin + kFetched * 32 + lane; e < end; e += 32)
        if (args.slot[e] / (16 * kTileColumns) == m)
          write(args.slot[e], args.order[e]);
    }
  }
}

template <typename T, int kBlocks, bool kExact>
void launch_sddmm(const SddmmArgs& args, cudaStream_t stream) {
  if (args.num_items == 0)
    return;
  const int bytes = (args.end - args.begin) * static_cast<int>(sizeof(T));
  const int memory = 16 * kBlocks * ((bytes + kChunk - 1) / kChunk) * kChunk +
                     kSddmmWarps * (kRing * kTileColumns * kChunk + 16 * kPitch * 4);
  const auto kernel = sddmm_kernel<T, kBlocks, kExact>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory),
        "shared memory for sddmm");
  kernel<<<args.num_items, 32 * kSddmmWarps, memory, stream>>>(args);
  check_launch("sddmm");
}

template <typename T, bool kExact>
void launch_sddmm(int window, const SddmmArgs& args, cudaStream_t stream) {
  switch (window) {
    case 16:
      return launch_sddmm<T, 1, kExact>(args, stream);
    case 32:
      return launch_sddmm<T, 2, kExact>(args, stream);
    case 64:
      return launch_sddmm<T, 4, kExact>(args, stream);
    default:
      throw std::invalid_argument("expected windows of 16, 32 or 64 rows");
  }
}

}  // namespace pyg_accel
