// The CPU kernels, compiled once for each instruction set by a file that sets
//   POSENC_ISA           the namespace of this copy
//   POSENC_KERNELS       the name of the table it fills
//   POSENC_VECTOR_BYTES  the width of its vectors
// and that includes prelude.h before it switches the target on: functions of the standard library must stay baseline
// code, since the linker keeps one copy of each.

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

namespace cpu_table {
constexpr cpu::Kernels table = {forward, sum_segment, fill_zero, end_stream};
}
}  // namespace POSENC_ISA

namespace cpu {
const Kernels POSENC_KERNELS = POSENC_ISA::cpu_table::table;
}
}  // namespace posenc
