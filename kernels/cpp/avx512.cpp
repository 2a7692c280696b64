// For x86 with AVX-512 F, BW, DQ and VL.
#include "exports.h"
