// For any processor the compiler targets by default.
#include "exports.h"
