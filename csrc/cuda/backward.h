// The weight gradient on a GPU, in scratch memory that the caller allocates.
#pragma once

#include <cstddef>

#include "../params.h"
#include "launch.h"

namespace posenc::cuda {

// Tokens that one call can sort; more is refused by the caller.
constexpr int64_t kMostGradientTokens = (int64_t{1} << 31) - 1;
// Rows likewise: a key and one that is no row.
constexpr int64_t kMostGradientRows = (int64_t{1} << 32) - 2;

// How the scratch memory is divided. Runs are told apart by their row (dense) or numbered (sparse).
struct GradientScratch {
  uint32_t *keys = nullptr, *sorted_keys = nullptr;
  int32_t *tokens = nullptr, *order = nullptr;
  int32_t *begin = nullptr, *end = nullptr;  // side by side, to be cleared at once
  int32_t* head_counts = nullptr;            // sparse
  void* partial = nullptr;
  void* temporary = nullptr;  // of the sort and the scan
  size_t temporary_bytes = 0;
  int64_t bytes = 0;  // in all

  // Sizes first, then, once the caller has that much memory, where each part lies in it.
  GradientScratch(const GradientTokens& tokens, const BackwardParams& params, bool sparse);
  void place(void* memory);

 private:
  template <class Visit>
  void each_part(const Visit& visit);

  int64_t sizes_[9] = {};
};

// Dense: row r of params.out gets the sum of run r; all of params.rows rows are written. params.runs is not used.
void backward(const GradientTokens& tokens, const BackwardParams& params, const GradientScratch& scratch,
              const Launch& launch);

// Sparse, in two steps, because the number of runs decides the size of the output and must be read in between: it is
// head_counts[tokens.count - 1] once this has run.
void number_runs(const GradientTokens& tokens, const GradientScratch& scratch, const Launch& launch);
// params.rows runs; their rows go to run_rows, ascending.
void backward_of_runs(const GradientTokens& tokens, const BackwardParams& params, const GradientScratch& scratch,
                      int64_t* run_rows, const Launch& launch);

}  // namespace posenc::cuda
