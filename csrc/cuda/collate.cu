// Graphs become one batch: parts of tensors are copied behind each other, a thread an element.
#include "cuda/collate.h"

#include "cuda/warp.cuh"

namespace pyg_accel {
namespace {

constexpr int kThreads = 256;

dim3 blocks_of(int64_t count) {
  return dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads));
}

__device__ inline int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

// The last part that begins at an entry or before it.
template <typename Begin>
__device__ inline int part_of(const Begin* begin, int count, int64_t entry) {
  int part = 0;
  for (int end = count; part + 1 < end;) {
    const int middle = (part + end) / 2;
    if (begin[middle] <= entry)
      part = middle;
    else
      end = middle;
  }
  return part;
}

template <typename Element, bool kShift>
__global__ void take_parts_kernel(const PartsArgs args, int64_t width) {
  const int64_t at = thread_number(), entries = args.begin[args.count];
  if (at >= args.outer * entries * width)
    return;
  const int64_t entry = at / width % entries, outer = at / width / entries;
  const int part = part_of(args.begin, args.count, entry);
  const int64_t from = outer * args.size + args.from[part] + (entry - args.begin[part]);
  Element element = static_cast<const Element*>(args.value)[from * width + at % width];
  if constexpr (kShift)
    element += args.shift[part * args.each + (args.each > 1 ? outer : 0)];
  const int64_t to = outer * args.total + args.first + entry;
  static_cast<Element*>(args.out)[to * width + at % width] = element;
}

template <typename Element, bool kShift = false>
void launch(const PartsArgs& args, cudaStream_t stream) {
  const int64_t width = args.inner / static_cast<int64_t>(sizeof(Element));
  launch_kernel("collate", take_parts_kernel<Element, kShift>,
                blocks_of(args.outer * args.begin[args.count] * width), kThreads, 0, stream, args,
                width);
}

__global__ void ptr2index_kernel(const GroupsArgs args) {
  const int64_t at = thread_number(), entry = args.begin[0] + at;
  if (at <= args.count)
    args.ptr[args.first + at] = args.begin[at];
  if (entry < args.begin[args.count])
    args.group[entry] = args.first + part_of(args.begin, args.count, entry);
}

}  // namespace

void take_parts_cuda(const PartsArgs& args, cudaStream_t stream) {
  const auto places = reinterpret_cast<uintptr_t>(args.value) |
                      reinterpret_cast<uintptr_t>(args.out) | static_cast<uintptr_t>(args.inner);
  if (args.each > 0)
    launch<int64_t, true>(args, stream);
  else if (places % 8 == 0)
    launch<uint64_t>(args, stream);
  else if (places % 4 == 0)
    launch<uint32_t>(args, stream);
  else
    launch<uint8_t>(args, stream);
}

void ptr2index_cuda(const GroupsArgs& args, cudaStream_t stream) {
  const int64_t entries = args.begin[args.count] - args.begin[0];
  launch_kernel("collate", ptr2index_kernel,
                blocks_of(entries > args.count ? entries : args.count + 1), kThreads, 0, stream,
                args);
}

}  // namespace pyg_accel
