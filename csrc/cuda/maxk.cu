// The k largest of each row, exactly and without sorting: a warp has a row in registers and
// searches for the k-th largest by counting how many elements reach a threshold. (The MaxK-GNN
// paper, section 5.4, bisects on 8-bit features and keeps approximately the largest.)
#include "cuda/cbsr.cuh"

namespace pyg_accel {
namespace {

constexpr int kWarps = 4;
constexpr int kGuesses = 8;  // steps that read the values; later steps halve the range of keys

// Whole numbers in the order of floats, -0.0 equal to 0.0. None is 0.
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits ^ (static_cast<int32_t>(bits) >> 31 | 0x80000000u);
}

__device__ inline float float_of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// How many of a lane's keys reach `least`.
template <int kItems>
__device__ inline int count_here(const uint32_t* key, uint32_t least) {
  int count[2] = {};
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    count_if(key[i], least, count[i % 2]);
  return count[0] + count[1];
}

template <int kItems>
__device__ inline int count_of(const uint32_t (&key)[kItems], uint32_t least) {
  return __reduce_add_sync(~0u, count_here<kItems>(key, least));
}

// The largest number that at least k of the keys reach, and how many do. Keys of 0 are none.
template <int kItems>
__device__ inline uint32_t search(const uint32_t (&key)[kItems], const MaxkArgs& args, int& reach) {
  uint32_t low = ~0u, high = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    low = min(low, key[i] - 1);  // 0 becomes the largest
    high = max(high, key[i]);
  }
  low = __reduce_min_sync(~0u, low) + 1;
  high = __reduce_max_sync(~0u, high);
  reach = args.width;
  // The k-th largest lies between low and high. It is looked for where it would be if the logarithm
  // of how many reach a value fell evenly, as it does in the tails of many distributions.
  const float wanted = log2_of(2 * args.k + 1) - 1;
  float from = float_of_key(low), to = float_of_key(high);
  float below = log2_of(args.width), above = -1, share = args.first;
  for (int step = 0; low < high; ++step) {
    const float value = fmaf(to - from, share, from);
    uint32_t middle = key_of(value);
    if (step >= kGuesses || middle <= low || middle > high)
      middle = high - (high - low) / 2;
    const int count = count_of(key, middle);
    if (count >= args.k) {
      low = middle;
      from = value;
      reach = count;
      if (count == args.k)
        break;
      below = log2_of(count);
    } else {
      high = middle - 1;
      to = value;
      above = count == 0 ? -1.f : log2_of(count);
    }
    share = fminf(fmaxf((below - wanted) * inverse_of(below - above), 0.05f), 0.95f);
  }
  return low;
}

// Sums over the previous lanes; `total` is the sum of all lanes.
__device__ inline uint32_t sum_before(uint32_t x, int lane, uint32_t& total) {
  uint32_t sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    sum += lane >= step ? other : 0;
  }
  total = __shfl_sync(~0u, sum, 31);
  return sum - x;
}

// Of the keys equal to `low` as many as there is room for, of the lowest columns; the others become
// 0.
template <int kItems>
__device__ inline void settle_ties(uint32_t (&key)[kItems], uint32_t low, int room, int lane) {
  uint32_t ties = 0;  // of the quads before
#pragma unroll
  for (int q = 0; q < kItems; q += kQuad) {
    uint32_t equal = 0, total;
#pragma unroll
    for (int i = q; i < q + kQuad; ++i)
      equal += key[i] == low;
    equal = sum_before(equal, lane, total) + ties;
    ties += total;
#pragma unroll
    for (int i = q; i < q + kQuad; ++i)
      if (key[i] == low && equal++ >= room)
        key[i] = 0;
  }
}

template <typename Value, typename Column, int kQuads>
__global__ void maxk_kernel(MaxkArgs args) {
  constexpr int kItems = kQuads * kQuad;
  float4* shared = shared_memory();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= args.rows)
    return;
  const int lane = threadIdx.x % 32;
  const Value* x = static_cast<const Value*>(args.x) + row * args.width;
  const bool whole = args.width % kQuad == 0;
  Value item[kItems];
  uint32_t key[kItems];
  float sum = 0;  // NaN if there is one
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int column = (q * 32 + lane) * kQuad, there = args.width - column;
    if (whole) {
      Quad<Value> quad{};
      if (there > 0)
        quad = *reinterpret_cast<const Quad<Value>*>(x + column);
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        item[q * kQuad + i] = value_of<Value>(quad.bits(i));
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        item[q * kQuad + i] = i < there ? x[column + i] : value_of<Value>(0);
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float number = static_cast<float>(item[q * kQuad + i]);
      key[q * kQuad + i] = (whole ? 0 : i) < there ? key_of(number) : 0;
      sum += number;
    }
  }
  if (__any_sync(~0u, isnan(sum))) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)  // valid items: NaN is largest, all NaN equal
      if (key[i] != 0 && isnan(static_cast<float>(item[i])))
        key[i] = ~0u;
  }
  int reach;
  const uint32_t low = search(key, args, reach);

  if (reach != args.k) {
    const int more = low == ~0u ? 0 : count_of(key, low + 1);
    settle_ties(key, low, args.k - more, lane);
  }
  uint2* entry = reinterpret_cast<uint2*>(shared) + threadIdx.x / 32 * args.k;
  uint32_t address = address_of(entry);
#pragma unroll
  for (int q = 0; q < kItems; q += 2 * kQuad) {  // two quads in one scan
    constexpr bool kTwo = kQuads > 1;
    uint32_t counts = count_here<kQuad>(key + q, low), total;
    if constexpr (kTwo)
      counts |= count_here<kQuad>(key + q + kQuad, low) << 16;
    const uint32_t before = sum_before(counts, lane, total);
    uint32_t first = address + (before & 0xffff) * 8, second = address;
    second += ((total & 0xffff) + (before >> 16)) * 8;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const int column = q * 32 + lane * kQuad + i;
      store_if(key[q + i], low, bits_of(item[q + i]), column, first);
      if constexpr (kTwo)
        store_if(key[q + kQuad + i], low, bits_of(item[q + kQuad + i]), column + 128, second);
    }
    address += ((total & 0xffff) + (total >> 16)) * 8;
  }
  __syncwarp();
  Value* values = static_cast<Value*>(args.values) + row * args.k;
  Column* indices = static_cast<Column*>(args.indices) + row * args.k;
#pragma unroll 1
  for (int slot = lane; slot < args.k; slot += 32) {
    const uint2 kept = entry[slot];
    values[slot] = value_of<Value>(kept.x);
    indices[slot] = static_cast<Column>(kept.y);
  }
}

template <typename Value, typename Column, int kQuads>
void launch(const MaxkArgs& args, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((args.rows + kWarps - 1) / kWarps);
  const int bytes = kWarps * args.k * static_cast<int>(sizeof(uint2));
  launch_kernel("maxk", maxk_kernel<Value, Column, kQuads>, blocks, kWarps * 32, bytes, stream,
                args);
}

template <typename Value>
void launch(const MaxkArgs& args, cudaStream_t stream) {
  if (args.width <= 128)
    launch<Value, uint8_t, 1>(args, stream);
  else if (args.width <= 256)
    launch<Value, uint8_t, 2>(args, stream);
  else if (args.width <= 512)
    launch<Value, uint16_t, 4>(args, stream);
  else
    launch<Value, uint16_t, 8>(args, stream);
}

}  // namespace

void maxk_cuda(const MaxkArgs& args, cudaStream_t stream) {
  if (args.rows == 0)
    return;
  if (args.stored == Stored::kBFloat16)
    launch<__nv_bfloat16>(args, stream);
  else if (args.stored == Stored::kHalf)
    launch<__half>(args, stream);
  else
    launch<float>(args, stream);
}

}  // namespace pyg_accel
