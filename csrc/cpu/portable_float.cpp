#define PYG_ACCEL_DTYPE float
#include "isa_portable.h"
