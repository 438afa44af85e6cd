// Shared by the kernels of neighbour sampling.
#pragma once

#include "cuda/neighbors.h"
#include "cuda/warp.cuh"

namespace pyg_accel {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = ~0u;
constexpr int64_t kFloyd = 64;  // most draws without replacement that a warp holds

inline dim3 blocks_of(int64_t count, int each = kThreads) {
  return dim3(static_cast<unsigned>((count + each - 1) / each));
}

__device__ inline void report(int64_t* fault, Fault what) {
  atomicMax(reinterpret_cast<unsigned long long*>(fault), static_cast<unsigned long long>(what));
}

template <typename Index>
__device__ inline int64_t batch_of(const SampledNodes& nodes, int64_t position) {
  return nodes.batch ? static_cast<const Index*>(nodes.batch)[position] : 0;
}

__device__ inline Random random_of(const HopArgs& args, int64_t target) {
  return {args.seed, args.stream + static_cast<uint64_t>(target)};
}

__device__ inline uint64_t key_of(const SampledNodes& nodes, int64_t id, int64_t batch) {
  return static_cast<uint64_t>(id) +
         static_cast<uint64_t>(batch) * static_cast<uint64_t>(nodes.num_nodes);
}

__device__ inline uint64_t start_of(const SampledNodes& nodes, uint64_t key) {
  return key * 0x9E3779B97F4A7C15u >> nodes.shift;
}

constexpr uint64_t kFree = ~uint64_t{0};

}  // namespace pyg_accel
