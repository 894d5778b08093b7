#include "backward.cuh"

#include <type_traits>

#include "launch_config.h"
#include "sort.h"

namespace posenc::cuda {
namespace {

int bits_of(uint64_t largest) {
  int bits = 1;
  while (bits < 64 && largest >> bits != 0) ++bits;
  return bits;
}

template <class... Parameters>
int64_t blocks_of_tokens(void (*kernel)(Parameters...), const GradientTokens& tokens, const Launch& launch) {
  return balanced(divide_up(tokens.count, kBackwardThreads), 1, launch.resident_blocks(kernel, kBackwardThreads)).x;
}

void sort_tokens(const GradientTokens& tokens, const GradientScratch& scratch, const Launch& launch) {
  POSENC_LAUNCH(mark_keys, blocks_of_tokens(mark_keys, tokens, launch), kBackwardThreads, launch.stream, tokens,
                scratch, launch.errors);
  sort_pairs(scratch.sort, scratch.temporary, scratch.temporary_bytes, scratch.keys, scratch.sorted_keys,
             scratch.tokens, scratch.order, launch.stream);
}

template <class T>
void launch_sums(const BackwardParams& params, const GradientTokens& tokens, const GradientScratch& scratch,
                 const Launch& launch) {
  const bool drops = params.dropout.seed != nullptr;
  const bool vectors = params.width % kVector<T> == 0 && params.column_stride == 1 &&
                       params.token_stride % kVector<T> == 0 && aligned(params.grad) && aligned(params.out) &&
                       (!drops || params.dropout.first_column % kColumnsPerDraw == 0);
  const int64_t units = vectors ? params.width / kVector<T> : params.width;
  const int64_t x = threads_along(units, kColumnThreads), y = kBackwardThreads / x;
  const int64_t blocks_y = std::min(divide_up(units, x), kMostBlocksYZ);
  const dim3 block(x, y);
  const auto grid = [&](auto kernel, int64_t count) {
    const int64_t resident = launch.resident_blocks(kernel, kBackwardThreads) / blocks_y;
    return dim3(balanced(divide_up(count, y), 1, resident).x, blocks_y);
  };
  const auto chunks = drops     ? vectors ? drop_and_sum_chunks<T, true> : drop_and_sum_chunks<T, false>
                      : vectors ? sum_chunks<T, true>
                                : sum_chunks<T, false>;
  const auto segments = drops     ? vectors ? drop_and_sum_segments<T, true> : drop_and_sum_segments<T, false>
                        : vectors ? sum_segments<T, true>
                                  : sum_segments<T, false>;
  // Up to kSumChunk tokens in all, no segment has a second chunk.
  if (tokens.count > kSumChunk)
    POSENC_LAUNCH(chunks, grid(chunks, tokens.count / kSumChunk + 1), block, launch.stream, params, tokens, scratch);
  POSENC_LAUNCH(segments, grid(segments, divide_up(tokens.count, kHeadsInFlight)), block, launch.stream, params, tokens,
                scratch);
}

void find_and_sum(const BackwardParams& params, const GradientTokens& tokens, const GradientScratch& scratch,
                  int64_t* segment_rows, const Launch& launch) {
  if (tokens.count == 0 || params.rows == 0) return;
  POSENC_LAUNCH(find_segments, blocks_of_tokens(find_segments, tokens, launch), kBackwardThreads, launch.stream, tokens,
                scratch, segment_rows);
  with_element(params.dtype, [&](auto element) { launch_sums<decltype(element)>(params, tokens, scratch, launch); });
}

}  // namespace

GradientScratch::GradientScratch(const GradientTokens& call, const BackwardParams& params, bool sparse)
    : sort{call.count, bits_of(call.rows)},
      segment_count_(sparse ? call.count : call.rows),
      partial_bytes_((call.count / kSumChunk + 1) * params.width * (params.dtype == Dtype::float64 ? 8 : 4)),
      sparse_(sparse) {
  temporary_bytes = sort_bytes(sort);
  place(nullptr);
}

void GradientScratch::place(void* memory) {
  constexpr int64_t kAlignment = 256;
  bytes = 0;
  const auto take = [&](auto*& part, int64_t size) {
    const auto address = reinterpret_cast<uintptr_t>(memory) + bytes;
    part = size == 0 ? nullptr : reinterpret_cast<std::remove_reference_t<decltype(part)>>(address);
    bytes += divide_up(size, kAlignment) * kAlignment;
  };
  for (uint32_t** part : {&keys, &sorted_keys}) take(*part, 4 * sort.count);
  for (int32_t** part : {&tokens, &order}) take(*part, 4 * sort.count);
  for (int32_t** part : {&begin, &end}) take(*part, 4 * segment_count_);
  take(segment_counts, sparse_ ? 4 * sort.count : 0);
  take(partials, partial_bytes_);
  take(temporary, static_cast<int64_t>(temporary_bytes));
}

void backward(const GradientTokens& tokens, const BackwardParams& params, const GradientScratch& scratch,
              const Launch& launch) {
  if (params.rows == 0) return;
  const size_t bytes = params.rows * params.width * element_size(params.dtype);
  check(cudaMemsetAsync(params.out, 0, bytes, static_cast<cudaStream_t>(launch.stream)), "clearing the gradient");
  if (tokens.count == 0) return;
  sort_tokens(tokens, scratch, launch);
  find_and_sum(params, tokens, scratch, nullptr, launch);
}

void number_segments(const GradientTokens& tokens, const GradientScratch& scratch, const Launch& launch) {
  if (tokens.count == 0) return;
  sort_tokens(tokens, scratch, launch);
  POSENC_LAUNCH(mark_heads, blocks_of_tokens(mark_heads, tokens, launch), kBackwardThreads, launch.stream, tokens,
                scratch);
  running_sum(scratch.sort, scratch.temporary, scratch.temporary_bytes, scratch.segment_counts, launch.stream);
}

void backward_of_segments(const GradientTokens& tokens, const BackwardParams& params, const GradientScratch& scratch,
                          int64_t* segment_rows, const Launch& launch) {
  find_and_sum(params, tokens, scratch, segment_rows, launch);
}

}  // namespace posenc::cuda
