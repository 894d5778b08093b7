#include "frequencies.cuh"

#include "backend.h"
#include "launch_config.h"

namespace posenc::cuda {

Frequencies convert(const GivenFrequencies& given, void* memory, const Launch& launch) {
  const FrequencyMemory to(memory, given.pairs);
  const int64_t resident = launch.resident_blocks(convert_frequencies, kFrequencyThreads);
  const int64_t blocks = balanced(divide_up(to.stride, kFrequencyThreads), 1, resident).x;
  POSENC_LAUNCH(convert_frequencies, blocks, kFrequencyThreads, launch.stream, given, memory);
  return to.view();
}

}  // namespace posenc::cuda
