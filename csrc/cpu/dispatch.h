// The CPU backend: what torch/ and python.cpp may call.
#pragma once

#include <string>
#include <vector>

#include "../params.h"

namespace posenc::cpu {

// Place of the first id outside [0, rows), or -1.
int64_t find_out_of_range(const Integers& ids, int64_t count, int64_t rows);

void forward(const ForwardParams& params, ParallelFor parallel_for);
void backward(const BackwardParams& params, ParallelFor parallel_for);

// Instruction sets built into this library that this machine can run, best first, and the one in use.
std::vector<std::string> available_isas();
std::string active_isa();
// Uses `name` from now on; false if this machine or this build has no such set.
bool force_isa(const std::string& name);

}  // namespace posenc::cpu
