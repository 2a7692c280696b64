// For x86 with AVX2, FMA and F16C.
#include "exports.h"
