// A search for bad ids, for callers that must know before they go on.
#pragma once

#include "../params.h"
#include "launch.h"

namespace posenc::cuda {

// Takes what a record holds; `found` and `taken` in memory of the host that the device can write.
void take_bad_id(BadId* record, uint32_t* found, BadId* taken, CUstream_st* stream);

// Contiguous ids, to lie in [0, rows); what is found goes where launch says.
void check_ids(const Integers& ids, int64_t count, int64_t rows, const Launch& launch);

}  // namespace posenc::cuda
