// Where kernels leave the first out-of-range index they meet. The host raises it later.
#pragma once

#include <cstdint>

namespace posenc::cuda {

// In device memory.
struct OutOfRange {
  uint32_t locked = 0;
  uint32_t found = 0;
  uint64_t call = 0;  // number of the call, counted on the host
  int64_t place = 0;  // of the index, in the order of the tokens
  int64_t index = 0;  // must lie in [0, rows)
  int64_t rows = 0;
};

struct ErrorSink {
  OutOfRange* record = nullptr;
  uint32_t* found = nullptr;  // memory of the host that the device can write: not 0 once `record` holds something
  uint64_t call = 0;
};

}  // namespace posenc::cuda
