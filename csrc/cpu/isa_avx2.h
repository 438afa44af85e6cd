// Kernels for AVX2 with FMA and F16C.
#include "isa_includes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

// GCC warns about its own headers, and about vectors as arguments of functions in this file.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wpsabi"
// In effect to the end of the file, where templates are instantiated.
#pragma GCC target("avx2,fma,f16c")
#define PYG_ACCEL_HAS_ISA 1
#endif

#define PYG_ACCEL_VEC_BYTES 32
#define PYG_ACCEL_ISA avx2

#ifdef PYG_ACCEL_HAS_ISA
#include "isa_kernels.h"
#else
// Other compilers and processor families use the portable kernels (see config.cpp).
#endif
