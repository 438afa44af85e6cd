#include "config.h"

#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace pyg_accel {
namespace {

// Reads sysfs first: in virtual machines the C library may report the sum of all caches of the
// host. With fopen(), as C++ streams read numbers with a locale, which fails if this library and
// torch have different copies of the C++ library.
int64_t last_level_cache() {
  for (int index = 4; index >= 2; --index) {
    const std::string path =
        "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size";
    std::FILE* file = std::fopen(path.c_str(), "r");
    if (file == nullptr)
      continue;
    long long kibibytes = 0;
    const int fields = std::fscanf(file, "%lld", &kibibytes);
    std::fclose(file);
    if (fields == 1 && kibibytes > 0)
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
  static Config instance{0, 0, last_level_cache()};
  return instance;
}

struct Isa {
  const char* name;
  bool runs;  // on this processor
  const Kernels* kernels[kDTypes];
};

#define PYG_ACCEL_ISA(isa, runs)                                                       \
  Isa {                                                                                \
    #isa, runs, {                                                                      \
      &isa::kernels_of(float{}), &isa::kernels_of(double{}), &isa::kernels_of(bf16{}), \
          &isa::kernels_of(fp16{})                                                     \
    }                                                                                  \
  }

// The fastest last.
const std::vector<Isa>& instruction_sets() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();  // not every linker's start-up code has done it
#endif
  static const std::vector<Isa> all{
#ifndef PYG_ACCEL_WITHOUT_PORTABLE
      PYG_ACCEL_ISA(portable, true),
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#ifndef PYG_ACCEL_WITHOUT_AVX2
      PYG_ACCEL_ISA(avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                              __builtin_cpu_supports("f16c")),
#endif
#ifndef PYG_ACCEL_WITHOUT_AVX512
      PYG_ACCEL_ISA(avx512,
                    __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")),
#endif
#endif
  };
  return all;
}

// By name, or the fastest that this processor supports; null if it does not support that name.
const Isa* find_isa(const std::string& name) {
  const Isa* best = nullptr;
  for (const Isa& isa : instruction_sets())
    if (isa.runs && (name.empty() || name == isa.name))
      best = &isa;
  return best;
}

const Isa*& chosen() {
  static const Isa* isa = find_isa("");
  STD_TORCH_CHECK(isa, "this library was built for another processor (PYG_ACCEL_NATIVE=1)");
  return isa;
}

void configure(const std::string& isa, int64_t block_width, int64_t block_cols) {
  const Isa* named = find_isa(isa);
  STD_TORCH_CHECK(named, "this processor or build has no '", isa, "' kernels");
  chosen() = named;
  config().block_width = block_width;
  config().block_cols = block_cols;
}

std::string info() {
  std::string supported;
  for (const Isa& isa : instruction_sets())
    if (isa.runs)
      supported += (supported.empty() ? "" : ",") + std::string(isa.name);
  return "isa=" + std::string(chosen()->name) + ";supported=" + supported +
         ";cache_bytes=" + std::to_string(config().cache_bytes);
}

// The functions of formulas by number, in the words of pyg_accel/formula/functions.py.
std::string functions() {
  std::string numbers;
#define PYG_ACCEL_NUMBER(op, text) \
  numbers += #op "=" + std::to_string(static_cast<int>(Op::op)) + ";";
  PYG_ACCEL_BINARY(PYG_ACCEL_NUMBER)
  PYG_ACCEL_UNARY(PYG_ACCEL_NUMBER)
#undef PYG_ACCEL_NUMBER
  return numbers;
}

}  // namespace

const Config& current_config() {
  return config();
}

const Kernels& kernels(DType dtype) {
  return *chosen()->kernels[static_cast<int>(dtype)];
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CompositeExplicitAutograd, m) {
  m.impl("configure", TORCH_BOX(&configure));
  m.impl("info", TORCH_BOX(&info));
  m.impl("functions", TORCH_BOX(&functions));
}

}  // namespace pyg_accel
