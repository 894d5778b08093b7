// The CUDA backend of a build without nvcc.
#if !defined(POSENC_WITH_CUDA)

#include <stdexcept>

#include "backend.h"

namespace posenc::cuda {
namespace {

[[noreturn]] void throw_absent() {
  throw std::runtime_error(
      "posenc_ext: built without its CUDA half; install it again where nvcc is on PATH or in CUDA_HOME");
}

}  // namespace

Call::Call(Op op, int device, void*) : op_(op), device_(device) { throw_absent(); }
Frequencies Call::frequencies(const std::shared_ptr<const FrequencyTable>&) const { throw_absent(); }
int64_t Call::read(const int32_t*) const { throw_absent(); }
void Call::finish() const { throw_absent(); }
void Call::finish_and_wait() const { throw_absent(); }
bool Call::capturing() const { throw_absent(); }
void Call::raise_launch_error() const { throw_absent(); }
void Call::raise_bad_id() const { throw_absent(); }
void check_errors() {}

void forward(const ForwardParams&, const Launch&) { throw_absent(); }
GradientScratch::GradientScratch(const GradientTokens&, const BackwardParams&, bool) { throw_absent(); }
void GradientScratch::place(void*) { throw_absent(); }
void backward(const GradientTokens&, const BackwardParams&, const GradientScratch&, const Launch&) { throw_absent(); }
void number_runs(const GradientTokens&, const GradientScratch&, const Launch&) { throw_absent(); }
void backward_of_runs(const GradientTokens&, const BackwardParams&, const GradientScratch&, int64_t*, const Launch&) {
  throw_absent();
}
void check_ids(const Integers&, int64_t, int64_t, const Launch&) { throw_absent(); }

}  // namespace posenc::cuda

#endif  // POSENC_WITH_CUDA
