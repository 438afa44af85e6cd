// The operator of the CUDA library that puts graphs into a batch; see library.cpp. Sizes of the
// graphs are on the CPU, and nothing waits for the device.
#include "cuda/collate.h"

#include <algorithm>

#include "cuda/tensors.h"
#include "take_parts.h"

namespace pyg_accel {
namespace {

void copy(const Parts& parts) {
  STD_TORCH_CHECK(is_on_device(parts.value) && parts.begin[parts.count] <= INT32_MAX,
                  "expected parts of less than 2^31 entries of a value on the device");
  [[maybe_unused]] const auto guard = guard_of(parts.value);
  PartsArgs args{};
  args.value = parts.value.const_data_ptr();
  args.out = parts.out.mutable_data_ptr();
  args.outer = parts.outer;
  args.size = parts.size;
  args.total = parts.begin[parts.count];
  args.inner = parts.inner;
  args.shifted = parts.shift != nullptr;
  for (int64_t first = 0; first < parts.count; first += kParts) {
    args.first = parts.begin[first];
    args.count = static_cast<int32_t>(std::min<int64_t>(parts.count - first, kParts));
    std::copy_n(parts.from.data() + first, args.count, args.from);
    for (int i = 0; i <= args.count; ++i)
      args.begin[i] = static_cast<int32_t>(parts.begin[first + i] - args.first);
    if (args.shifted)
      std::copy_n(parts.shift + first, args.count, args.shift);
    if (args.begin[args.count] > 0)
      take_parts_cuda(args, stream_of(parts.value));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def(kTakeParts);
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("take_parts", TORCH_BOX(&take_parts<copy>));
}

}  // namespace pyg_accel
