// Argument checks: every message names the op, the argument, the requirement and the value it got.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace posenc {

template <class... Parts>
std::string message(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "posenc_ext::" << op << ": ";
  (text << ... << parts);
  return text.str();
}

}  // namespace posenc

// std::invalid_argument reaches Python as ValueError, std::out_of_range as IndexError.
#define POSENC_CHECK(condition, op, ...)                             \
  do {                                                               \
    if (!(condition)) [[unlikely]]                                   \
      throw std::invalid_argument(posenc::message(op, __VA_ARGS__)); \
  } while (0)
