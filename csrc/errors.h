// Argument checks: every message names the op, the argument, the requirement and the value it got. And what raises
// torch's own error where memory is short.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "host_device.h"

namespace posenc {

template <class... Parts>
std::string message(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "posenc_ext::" << op << ": ";
  (text << ... << parts);
  return text.str();
}

// Allocates a tensor from Python and frees it, so that torch raises its own error where memory is short: its C
// interface says no more than that something failed. Null where no Python module has set it.
using Allocate = void (*)(const std::vector<int64_t>& sizes, const std::string& dtype, const std::string& device);
extern Allocate allocate_from_python;
POSENC_API void set_allocate_from_python(Allocate allocate);

}  // namespace posenc

// std::invalid_argument reaches Python as ValueError, std::out_of_range as IndexError.
#define POSENC_CHECK(condition, op, ...)                             \
  do {                                                               \
    if (!(condition)) [[unlikely]]                                   \
      throw std::invalid_argument(posenc::message(op, __VA_ARGS__)); \
  } while (0)
