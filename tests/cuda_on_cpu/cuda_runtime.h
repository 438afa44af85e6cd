// As much of CUDA as the kernels of MaxK, of neighbour sampling and of nearest points use, for a
// processor: the 32 lanes of a warp are fibers that take turns and wait for one another wherever
// lanes exchange values. Warps run one after another.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) {
  return "";
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
inline cudaError_t cudaMemcpyAsync(void* to,
                                   const void* from,
                                   size_t bytes,
                                   cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

using std::isfinite, std::isinf, std::isnan, std::max, std::min;
inline float max(float a, float b) {  // of a number and NaN, the number
  return std::fmax(a, b);
}
inline float min(float a, float b) {
  return std::fmin(a, b);
}

namespace fibers {
extern dim3 thread, block, block_size;
extern char* shared;
// The values that all lanes of the warp have given.
const uint64_t* exchange(uint64_t mine);
int lane();
void run(dim3 blocks, int threads, int shared_bytes, std::function<void()> kernel);
}  // namespace fibers

#define threadIdx (fibers::thread)
#define blockIdx (fibers::block)
#define blockDim (fibers::block_size)

template <typename T>
const uint64_t* given(T x) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(x));
  return fibers::exchange(bits);
}

template <typename T>
T taken(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline void __syncwarp() {
  fibers::exchange(0);
}

template <typename T>
T __shfl_sync(unsigned, T x, int from) {
  return taken<T>(given(x)[from & 31]);
}

template <typename T>
T __shfl_xor_sync(unsigned, T x, int with) {
  return taken<T>(given(x)[fibers::lane() ^ with]);
}

template <typename T>
T __shfl_up_sync(unsigned, T x, int by) {
  const uint64_t* all = given(x);
  return fibers::lane() < by ? x : taken<T>(all[fibers::lane() - by]);
}

inline unsigned __ballot_sync(unsigned, bool x) {
  const uint64_t* all = given(x);
  unsigned mask = 0;
  for (int lane = 0; lane < 32; ++lane)
    mask |= (all[lane] ? 1u : 0u) << lane;
  return mask;
}

inline bool __any_sync(unsigned, bool x) {
  return __ballot_sync(~0u, x) != 0;
}

template <typename T>
T __reduce_add_sync(unsigned, T x) {
  const uint64_t* all = given(x);
  T sum = 0;
  for (int lane = 0; lane < 32; ++lane)
    sum += taken<T>(all[lane]);
  return sum;
}

inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  const uint64_t* all = given(x);
  return static_cast<unsigned>(*std::min_element(all, all + 32));
}

inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const uint64_t* all = given(x);
  return static_cast<unsigned>(*std::max_element(all, all + 32));
}

inline void __syncthreads() {  // of blocks of one warp
  __syncwarp();
}

template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> x) {
  const T old = *to;
  *to = old + x;
  return old;
}

template <typename T>
T atomicMin(T* to, std::type_identity_t<T> x) {
  const T old = *to;
  *to = min(old, x);
  return old;
}

template <typename T>
T atomicMax(T* to, std::type_identity_t<T> x) {
  const T old = *to;
  *to = max(old, x);
  return old;
}

template <typename T>
T atomicCAS(T* to, std::type_identity_t<T> expected, std::type_identity_t<T> x) {
  const T old = *to;
  *to = old == expected ? x : old;
  return old;
}

inline uint64_t __umul64hi(uint64_t x, uint64_t y) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(x) * y >> 64);
}

inline int __popc(unsigned x) {
  return std::popcount(x);
}

inline unsigned __dp4a(unsigned x, unsigned y, unsigned sum) {
  for (int byte = 0; byte < 32; byte += 8)
    sum += (x >> byte & 255) * (y >> byte & 255);
  return sum;
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<unsigned>(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}

struct __nv_bfloat16 {
  uint16_t bits;
  operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) {
  return {bits};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) {
  return x.bits;
}
inline __nv_bfloat16 __float2bfloat16(float x) {
  const unsigned bits = __float_as_uint(x);
  const unsigned up = bits + 0x7fff + (bits >> 16 & 1);
  return {static_cast<uint16_t>(std::isnan(x) ? 0x7fffu : up >> 16)};
}

using __half = _Float16;
inline __half __ushort_as_half(uint16_t bits) {
  return std::bit_cast<__half>(bits);
}
inline uint16_t __half_as_ushort(__half x) {
  return std::bit_cast<uint16_t>(x);
}
inline __half __float2half(float x) {
  return static_cast<__half>(x);
}
