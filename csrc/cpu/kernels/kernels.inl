// The CPU kernels, compiled once for each instruction set by a file that sets
//   POSENC_ISA           the namespace of this copy
//   POSENC_KERNELS       the name of the table it fills
//   POSENC_TARGET        the target it is compiled for; not set: the compiler's own
//   POSENC_VECTOR_BYTES  the width of its vectors

// Before the target: functions of the standard library must stay baseline code, since the linker keeps one copy of
// each.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

#if defined(POSENC_TARGET)
#define POSENC_HAVE_FMA 1  // every target has it, but the pragma does not define __FMA__
#define POSENC_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define POSENC_EXPANDED_PRAGMA(...) POSENC_PRAGMA(__VA_ARGS__)
#if defined(__clang__)
POSENC_EXPANDED_PRAGMA(clang attribute push(__attribute__((target(POSENC_TARGET))), apply_to = function))
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms in the compiler's own AVX-512 headers
POSENC_PRAGMA(GCC push_options)
POSENC_EXPANDED_PRAGMA(GCC target(POSENC_TARGET, "prefer-vector-width=512"))
#endif
#endif

#include "../../dropout.h"
#include "../../epilogue.h"
#include "../../sinusoid.h"
#include "../../token.h"

namespace posenc {
inline namespace POSENC_ISA {
namespace {

#include "vector.inl"

#include "forward.inl"

#include "backward.inl"

}  // namespace
}  // namespace POSENC_ISA

namespace cpu {
const Kernels POSENC_KERNELS = {POSENC_ISA::forward, POSENC_ISA::sum_segment, POSENC_ISA::fill_zero,
                                POSENC_ISA::end_stream};
}
}  // namespace posenc

#if defined(POSENC_TARGET)
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
