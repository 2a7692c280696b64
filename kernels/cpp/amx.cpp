// For x86 with AMX (tiles, bytes, bfloat16) and what avx512.cpp needs.
#include "exports.h"
