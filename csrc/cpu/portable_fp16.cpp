#define PYG_ACCEL_DTYPE fp16
#include "isa_portable.h"
