// Scratch memory for a sequence of kernels.
#pragma once

#include <cstddef>
#include <functional>

namespace pyg_accel {

// Gives memory aligned to 256 bytes that lasts until the work queued on the stream is done.
using Allocate = std::function<void*(size_t bytes)>;

}  // namespace pyg_accel
