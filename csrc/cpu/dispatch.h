// The CPU backend: what torch/ and python.cpp may call.
#pragma once

#include <string>
#include <vector>

#include "../given_frequencies.h"
#include "../params.h"
#include "../positions.h"

namespace posenc::cpu {

// Place of the first id outside [0, rows), or -1.
POSENC_API int64_t find_out_of_range(const Integers& ids, int64_t count, int64_t rows);

// The first token, in the order of memory, whose position has no row in the table of positions; number -1: none.
struct TokenPosition {
  int64_t number = -1, position = 0;
};
TokenPosition find_position_without_row(const ForwardParams& params);

POSENC_API void forward(const ForwardParams& params, ParallelFor parallel_for);
void backward(const BackwardParams& params, ParallelFor parallel_for);

// Frequencies that a caller gives, as kernels read them, in FrequencyMemory::bytes(given.pairs) of `memory`.
Frequencies convert(const GivenFrequencies& given, void* memory);

// Positions that are counted, see positions.h.
void count_real_tokens(const PaddingParams& params, ParallelFor parallel_for);
void count_in_sequences(const SequenceIdParams& params, ParallelFor parallel_for);
void count_in_sequences(const SequenceStartParams& params, ParallelFor parallel_for);

// Instruction sets built into this library that this machine can run, best first, and the one in use.
POSENC_API std::vector<std::string> available_isas();
POSENC_API const char* active_isa();
// Uses `name` from now on; false if this machine or this build has no such set.
POSENC_API bool force_isa(const std::string& name);

}  // namespace posenc::cpu

// active_isa() for those who look the name up in the loaded library.
extern "C" POSENC_API const char* posenc_ext_active_isa();
