#define PYG_ACCEL_DTYPE double
#include "isa_avx512.h"
