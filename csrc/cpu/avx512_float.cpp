#define PYG_ACCEL_DTYPE float
#include "isa_avx512.h"
