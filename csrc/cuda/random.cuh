// Random numbers by their number: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", 2011). Threads need no state, and results do not depend on which thread drew what.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace pyg_accel {

struct Random {
  uint64_t seed;
  uint64_t stream;

  __device__ uint64_t at(uint64_t index) const {
    uint32_t a = static_cast<uint32_t>(index), b = static_cast<uint32_t>(index >> 32);
    uint32_t c = static_cast<uint32_t>(stream), d = static_cast<uint32_t>(stream >> 32);
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint64_t x = static_cast<uint64_t>(0xD2511F53u) * a;
      const uint64_t y = static_cast<uint64_t>(0xCD9E8D57u) * c;
      a = static_cast<uint32_t>(y >> 32) ^ b ^ low;
      b = static_cast<uint32_t>(y);
      c = static_cast<uint32_t>(x >> 32) ^ d ^ high;
      d = static_cast<uint32_t>(x);
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
    return static_cast<uint64_t>(b) << 32 | a;
  }

  __device__ int64_t below(int64_t n, uint64_t index) const {
    return static_cast<int64_t>(__umul64hi(at(index), static_cast<uint64_t>(n)));
  }

  __device__ double uniform(uint64_t index) const {  // in (0, 1]
    return static_cast<double>((at(index) >> 11) + 1) * 0x1p-53;
  }
};

}  // namespace pyg_accel
