// A float32 and its column in one word: the upper 24 bits of the float, rounded to nearest, ties to
// even, and 8 bits of column. The float is then off by at most 2^-16 of itself.
#include "cuda/cbsr.cuh"

namespace pyg_accel {
namespace {

constexpr int kThreads = 256;

__global__ void pack_kernel(const float* values,
                            const uint8_t* indices,
                            uint32_t* out,
                            int64_t count) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count)
    return;
  const uint32_t bits = __float_as_uint(values[at]);
  uint32_t upper = (bits + 127 + (bits >> 8 & 1)) & ~255u;
  if (isnan(values[at]))
    upper = 0x7fc00000;
  else if (isinf(__uint_as_float(upper)))  // infinite before, or too large to round upwards
    upper = bits & ~255u;
  out[at] = upper | indices[at];
}

}  // namespace

void pack_cuda(const float* values,
               const uint8_t* indices,
               uint32_t* out,
               int64_t count,
               cudaStream_t stream) {
  if (count == 0)
    return;
  const unsigned blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  launch_kernel("pack", pack_kernel, blocks, kThreads, 0, stream, values, indices, out, count);
}

}  // namespace pyg_accel
