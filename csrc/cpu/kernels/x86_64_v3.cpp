#define POSENC_ISA x86_64_v3
#include "prelude.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=x86-64-v3"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3,prefer-vector-width=256")
#endif

#define POSENC_KERNELS kernels_x86_64_v3
#define POSENC_HAVE_FMA 1  // the target pragma does not define __FMA__
#define POSENC_VECTOR_BYTES 32
#include "kernels.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
