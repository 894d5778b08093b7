// The CPU kernels, compiled once for each instruction set by a file that sets
//   POSENC_ISA           the namespace of this copy
//   POSENC_KERNELS       the name of the table it fills
//   POSENC_VECTOR_BYTES  the width of its vectors
// and has included, before switching the target on, every header whose functions must stay baseline code.

#include "../sinusoid.h"

namespace posenc {
inline namespace POSENC_ISA {
namespace {

#include "vector.inl"

#include "forward.inl"

#include "backward.inl"

}  // namespace

namespace cpu_table {
constexpr cpu::Kernels table = {forward, sum_run, fill_zero, end_stream};
}
}  // namespace POSENC_ISA

namespace cpu {
const Kernels POSENC_KERNELS = POSENC_ISA::cpu_table::table;
}
}  // namespace posenc
