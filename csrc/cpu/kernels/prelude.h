// What kernels.inl needs from elsewhere, as baseline code (see there). POSENC_ISA must be set before.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"
