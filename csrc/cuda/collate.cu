// Graphs become one batch: parts of tensors are copied behind each other, a thread an element.
#include "cuda/collate.h"

#include "cuda/warp.cuh"

namespace pyg_accel {
namespace {

constexpr int kThreads = 256;

// The last part that begins at an entry or before it.
__device__ inline int part_of(const PartsArgs& args, int64_t entry) {
  int part = 0;
  for (int end = args.count; part + 1 < end;) {
    const int middle = (part + end) / 2;
    if (args.begin[middle] <= entry)
      part = middle;
    else
      end = middle;
  }
  return part;
}

template <typename Element, bool kShift>
__global__ void take_parts_kernel(const PartsArgs args, int64_t width) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t entries = args.begin[args.count];
  if (at >= args.outer * entries * width)
    return;
  const int64_t entry = at / width % entries, outer = at / width / entries;
  const int part = part_of(args, entry);
  const int64_t from = outer * args.size + args.from[part] + (entry - args.begin[part]);
  Element element = static_cast<const Element*>(args.value)[from * width + at % width];
  if constexpr (kShift)
    element += args.shift[part];
  const int64_t to = outer * args.total + args.first + entry;
  static_cast<Element*>(args.out)[to * width + at % width] = element;
}

template <typename Element, bool kShift = false>
void launch(const PartsArgs& args, cudaStream_t stream) {
  const int64_t width = args.inner / static_cast<int64_t>(sizeof(Element));
  const int64_t elements = args.outer * args.begin[args.count] * width;
  launch_kernel("collate", take_parts_kernel<Element, kShift>,
                dim3(static_cast<unsigned>((elements + kThreads - 1) / kThreads)), kThreads, 0,
                stream, args, width);
}

}  // namespace

void take_parts_cuda(const PartsArgs& args, cudaStream_t stream) {
  const auto places = reinterpret_cast<uintptr_t>(args.value) |
                      reinterpret_cast<uintptr_t>(args.out) | static_cast<uintptr_t>(args.inner);
  if (args.shifted)
    launch<int64_t, true>(args, stream);
  else if (places % 8 == 0)
    launch<uint64_t>(args, stream);
  else if (places % 4 == 0)
    launch<uint32_t>(args, stream);
  else
    launch<uint8_t>(args, stream);
}

}  // namespace pyg_accel
