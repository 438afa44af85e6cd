// Whether the C library keeps freed memory for the next tensor or returns it to the system.
#include <cstdlib>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "tensors.h"

namespace pyg_accel {
namespace {

// By default every tensor above 32 MiB is a mapping of its own: the system hands out zeroed pages
// at its first touch and takes them back when it is freed, at a cost above that of computing what
// is in it. Returns whether the C library listens.
bool keep_memory(bool keep) {
#if defined(__GLIBC__)
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") || std::getenv("GLIBC_TUNABLES"))
    return false;  // somebody has decided already
  constexpr int kMebibyte = 1 << 20;
  // Off: where glibc's own, moving thresholds end up in a process that has freed large tensors.
  mallopt(M_MMAP_THRESHOLD, keep ? 1024 * kMebibyte : 32 * kMebibyte);
  mallopt(M_TRIM_THRESHOLD, keep ? 2047 * kMebibyte : 64 * kMebibyte);
  mallopt(M_TOP_PAD, keep ? 64 * kMebibyte : 0);
  if (!keep)
    malloc_trim(0);
  return true;
#else
  return false;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CompositeExplicitAutograd, m) {
  m.impl("keep_memory", TORCH_BOX(&keep_memory));
}

}  // namespace pyg_accel
