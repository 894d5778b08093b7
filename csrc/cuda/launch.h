// Where a launcher of this folder runs: everything it needs of the device, so that it asks no global state.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace posenc::cuda {

// Where kernels leave the first bad id they meet. In device memory; `found` is 0 when there is none.
struct BadId {
  uint32_t locked = 0;
  uint32_t found = 0;
  uint64_t call = 0;  // number of the call, counted on the host
  int64_t place = 0;  // of the id, in the order of the tokens
  int64_t id = 0;
  int64_t rows = 0;  // ids must lie in [0, rows)
};

struct Launch {
  CUstream_st* stream = nullptr;
  int64_t resident_threads = 0;  // that the device can hold at a time; shapes a launch, never a value
  uint64_t call = 0;
  BadId* bad_id = nullptr;
  uint32_t* bad_id_found = nullptr;  // memory of the host that the device can write: not 0 once bad_id holds something
};

}  // namespace posenc::cuda
