// The forward pass on a GPU.
#pragma once

#include "../params.h"
#include "launch.h"

namespace posenc::cuda {

// Pointers of `params` are device pointers; frequencies too. Only queues work on the stream.
void forward(const ForwardParams& params, const Launch& launch);

}  // namespace posenc::cuda
