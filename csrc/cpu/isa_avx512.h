// Kernels for AVX-512 (F, BW, DQ, VL).
#include "isa_includes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

// GCC warns about its own headers, and about vectors as arguments of functions in this file.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wpsabi"
// In effect to the end of the file, where templates are instantiated.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define PYG_ACCEL_HAS_ISA 1
#endif

#define PYG_ACCEL_VEC_BYTES 64
#define PYG_ACCEL_ISA avx512

#ifdef PYG_ACCEL_HAS_ISA
#include "isa_kernels.h"
#else
// Other compilers and processor families use the portable kernels (see config.cpp).
#endif
