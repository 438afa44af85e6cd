// The shared memory of a block of the SpMM, and the layout of a tile.
#pragma once

#include "cuda/kernels.h"
#include "cuda/mma.cuh"

namespace pyg_accel {

constexpr int kCopies = 3;       // tiles' rows of X in shared memory, for each warp
constexpr int kRowBytes = 128;   // of X that a warp has
constexpr int kBlock = 256;      // entries that are copied together
constexpr int kEntryBlocks = 4;  // blocks of entries in shared memory
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

// The shared memory of a block.
template <typename T, int kBlocks>
struct alignas(128) SpmmMemory {
  static constexpr int kStages = SpmmShape<T, kBlocks>::kStages;
  alignas(16) T tiles[kStages][SpmmShape<T, kBlocks>::kTile];
  alignas(16) T values[kEntryBlocks][kBlock];
  alignas(16) int16_t slots[kEntryBlocks][kBlock];
  int16_t places[kStages][kBlock];  // of a tile's entries, for clearing it
  uint64_t full[kStages], empty[kStages];
};

}  // namespace pyg_accel
