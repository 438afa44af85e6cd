// The role of the SpMM that writes the entries of tile after tile into shared memory.
#pragma once

#include "cuda/kernels.h"
#include "cuda/mma.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/spmm_memory.cuh"

namespace pyg_accel {

// The warp that writes tiles. Entries of successive tiles are successive, so they are copied in
// blocks, far ahead of the tile that is written, whatever the tiles' sizes.
constexpr int kAtOnce = 4;  // entries of a lane that are on their way through registers together

template <typename T, int kBlocks, bool kExact>
__device__ __forceinline__ void write_tiles(const SpmmArgs& args,
                                            const Item& item,
                                            SpmmMemory<T, kBlocks>& memory,
                                            int lane) {
  using Shape = SpmmShape<T, kBlocks>;
  constexpr int kStages = Shape::kStages;
  constexpr int kSlots = 8, kValues = 16 / sizeof(T);  // of a 16-byte copy
  const T* values = static_cast<const T*>(args.value);
  const T zero = rounded<T>(0.0f);
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
        for (int first = lane; first < count + lane; first += 32 * kAtOnce) {
          int place[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            place[i] = places[first + 32 * i];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            if (first + 32 * i < count)
              to[place[i]] = zero;
        }
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
      for (int first = at + lane; first < until + lane; first += 32 * kAtOnce) {
        int place[kAtOnce];
        T value[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int e = (first + 32 * i) % kBlock;
          place[i] = Shape::place(memory.slots[ring][e]);
          value[i] = values ? memory.values[ring][e] : rounded<T>(1.0f);
          if constexpr (sizeof(T) == 4 && !kExact)
            value[i] = __uint_as_float(to_tf32(value[i]));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int e = first + 32 * i;
          if (e < until) {
            to[place[i]] = value[i];
            if (e - begin < kBlock)
              places[e - begin] = static_cast<int16_t>(place[i]);
          }
        }
      }
      at = until;
    }
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

}  // namespace pyg_accel
