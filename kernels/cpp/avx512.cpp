// For x86 with AVX-512 F, BW, DQ, VL and VNNI.
#include "exports.h"
