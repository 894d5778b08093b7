// A search for bad ids, for callers that must know before they go on.
#pragma once

#include "../params.h"
#include "launch.h"

namespace posenc::cuda {

// Contiguous ids, to lie in [0, rows); what is found goes where launch says.
void check_ids(const Integers& ids, int64_t count, int64_t rows, const Launch& launch);

}  // namespace posenc::cuda
