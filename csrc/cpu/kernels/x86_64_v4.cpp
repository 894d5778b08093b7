#define POSENC_ISA x86_64_v4
#include "prelude.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=x86-64-v4"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms in the compiler's own AVX-512 headers
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#endif

#define POSENC_KERNELS kernels_x86_64_v4
#define POSENC_HAVE_FMA 1  // the target pragma does not define __FMA__
#define POSENC_VECTOR_BYTES 64
#include "kernels.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
