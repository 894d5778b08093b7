// The forward pass: which kernel a call gets, and how it is cut up.
#pragma once

#include <optional>

#include "../params.h"
#include "backend.h"

namespace posenc::cuda {

// What one thread of forward_vectors owns of a row.
enum class Arrangement {
  interleaved,  // one vector: sine, cosine, sine, ... or cosine, sine, ...
  halves,       // a vector of sines and the vector of their cosines
  none,         // one vector, without an encoding or with that of a table
};

// When a thread makes the encoding.
enum class Mode {
  shared,               // once for all rows of the batch
  per_token_exact,      // fp64: in either precision
  per_token_reference,  // not of fp64
};

// forward_tokens: the axis along which a thread has several tokens in flight.
enum class Inner { batch, seq };

// From so many rows of the batch on, tokens in flight lie along it and share an encoding.
constexpr int64_t kRowsTogether = 4;

struct KernelVariant {
  bool vectors = false;
  Arrangement arrangement = Arrangement::none;
  Mode mode = Mode::shared;
  std::optional<Inner> in_flight;  // forward_tokens instead of forward_vectors
  bool general = false;            // ForwardParams::general(): forward_general instead of both
};

// Compiled once for each element type, at the same time: see forward_kernels.cu.
template <class T>
void launch_forward(const ForwardParams& params, const KernelVariant& variant, const Launch& launch);

}  // namespace posenc::cuda
