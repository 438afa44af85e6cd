#define PYG_ACCEL_DTYPE bf16
#include "isa_avx2.h"
