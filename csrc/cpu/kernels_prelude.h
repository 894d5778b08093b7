// What kernels.inl needs from elsewhere; included before a target is switched on (see there).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"
