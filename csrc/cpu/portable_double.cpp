#define PYG_ACCEL_DTYPE double
#include "isa_portable.h"
