// Kernels for AVX2 with FMA and F16C.
#include "isa_includes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

// The compiler warns of its own headers, and of vectors passed inside this file alone.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wpsabi"
// Stays in force to the end of the file, where templates are instantiated.
#pragma GCC target("avx2,fma,f16c")
#define PYG_ACCEL_HAS_ISA 1
#endif

#define PYG_ACCEL_VEC_BYTES 32
#define PYG_ACCEL_ISA avx2

#ifdef PYG_ACCEL_HAS_ISA
#include "isa_kernels.h"
#else
// Another compiler or processor family: the portable kernels stand in (see config.cpp).
#endif
