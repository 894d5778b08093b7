// The CUDA backend of a build without nvcc; other builds leave this file out.

#include <stdexcept>

#include "backend.h"

namespace posenc::cuda {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "posenc_ext: built without its CUDA half; install it again where nvcc is on PATH or in CUDA_HOME");
}

}  // namespace

Call::Call(Op op, int device, void*, const Framework&) : op_(op), device_(device) { refuse(); }
Frequencies Call::frequencies(const FrequencyTable&, const std::function<void*(int64_t)>&) const { refuse(); }
int64_t Call::read(const int32_t*) const { refuse(); }
void Call::finish() const { refuse(); }
void Call::finish_and_wait() const { refuse(); }
bool Call::capturing() const { refuse(); }
void Call::wait() const { refuse(); }
void Call::raise_launch_error() const { refuse(); }
void check_errors() {}

void forward(const ForwardParams&, const Launch&) { refuse(); }
Frequencies convert(const GivenFrequencies&, void*, const Launch&) { refuse(); }
void check_bounds(const ForwardParams&, const Launch&) { refuse(); }
void count_real_tokens(const PaddingParams&, const Launch&) { refuse(); }
void count_in_sequences(const SequenceIdParams&, const Launch&) { refuse(); }
void count_in_sequences(const SequenceStartParams&, const Launch&) { refuse(); }
GradientScratch::GradientScratch(const GradientTokens&, const BackwardParams&, bool) { refuse(); }
void GradientScratch::place(void*) { refuse(); }
void backward(const GradientTokens&, const BackwardParams&, const GradientScratch&, const Launch&) { refuse(); }
void number_segments(const GradientTokens&, const GradientScratch&, const Launch&) { refuse(); }
void backward_of_segments(const GradientTokens&, const BackwardParams&, const GradientScratch&, int64_t*,
                          const Launch&) {
  refuse();
}

}  // namespace posenc::cuda
