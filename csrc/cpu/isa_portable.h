// Kernels for any processor: 16-byte vectors, which the compiler lowers as it can.
#include "isa_includes.h"

#define PYG_ACCEL_VEC_BYTES 16
#define PYG_ACCEL_ISA portable
#include "isa_kernels.h"
