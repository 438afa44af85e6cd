#include "config.h"

#include <unistd.h>

#include <cstdio>

#include "kernels.h"
#include "tensors.h"

namespace pyg_accel {
namespace {

// The kernel's own account first: in virtual machines the C library may add up every cache of the
// host, which no program here can use. C's files, not C++'s: those read numbers by a locale, which
// fails where this library and torch have different copies of the C++ library.
int64_t last_level_cache() {
  for (int index = 4; index >= 2; --index) {
    const std::string path =
        "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size";
    std::FILE* file = std::fopen(path.c_str(), "r");
    if (file == nullptr)
      continue;
    long long kibibytes = 0;
    const int found = std::fscanf(file, "%lld", &kibibytes);
    std::fclose(file);
    if (found == 1 && kibibytes > 0)
      return int64_t{kibibytes} << 10;
  }
  for (const int level : {_SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE}) {
    const int64_t bytes = sysconf(level);
    if (bytes > 0)
      return bytes;
  }
  return int64_t{8} << 20;  // unknown (some containers, some ARM)
}

Config& config() {
  static Config instance{"", 0, 0, last_level_cache()};
  return instance;
}

bool runs(const std::string& isa) {
  if (isa == "portable")
    return true;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (isa == "avx2")
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  if (isa == "avx512")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return false;
}

const KernelTable& table(const std::string& isa) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (isa == "avx512")
    return kAvx512Kernels;
  if (isa == "avx2")
    return kAvx2Kernels;
#endif
  return kPortableKernels;
}

void configure(const std::string& isa, int64_t block_width, int64_t block_cols) {
  STD_TORCH_CHECK(isa.empty() || runs(isa), "this processor or build has no '", isa, "' kernels");
  config().isa = isa;
  config().block_width = block_width;
  config().block_cols = block_cols;
}

std::string info() {
  std::string supported;
  for (const char* isa : {"portable", "avx2", "avx512"})
    if (runs(isa))
      supported += (supported.empty() ? "" : ",") + std::string(isa);
  return "isa=" + std::string(kernels().name) + ";supported=" + supported +
         ";cache_bytes=" + std::to_string(config().cache_bytes);
}

}  // namespace

const Config& current_config() {
  return config();
}

const KernelTable& kernels() {
  static const KernelTable& fastest = table(runs("avx512") ? "avx512" : runs("avx2") ? "avx2" : "");
  return config().isa.empty() ? fastest : table(config().isa);
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CompositeExplicitAutograd, m) {
  m.impl("configure", TORCH_BOX(&configure));
  m.impl("info", TORCH_BOX(&info));
}

}  // namespace pyg_accel
