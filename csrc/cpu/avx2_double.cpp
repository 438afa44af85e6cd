#define PYG_ACCEL_DTYPE double
#include "isa_avx2.h"
