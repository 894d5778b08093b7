#include "backward.h"

#include <iterator>
#include <type_traits>

#include "backward.cuh"
#include "shape.h"
#include "sort.h"

namespace posenc::cuda {
namespace {

int64_t real_size(Dtype dtype) { return dtype == Dtype::float64 ? 8 : 4; }

int bits_of(uint64_t largest) {
  int bits = 1;
  while (bits < 64 && largest >> bits != 0) ++bits;
  return bits;
}

// One thread for each of `count` items, up to what fills the device a few times.
dim3 line_of_blocks(int64_t count, const Launch& launch) {
  const int64_t most = std::max<int64_t>(4 * launch.resident_threads / kBackwardThreads, 1);
  return dim3(std::min(divide_up(count, kBackwardThreads), most));
}

RunArgs runs_of(const GradientTokens& tokens, const GradientScratch& scratch) {
  RunArgs runs;
  runs.keys = scratch.sorted_keys;
  runs.tokens = tokens.count;
  runs.rows = static_cast<uint32_t>(tokens.rows);
  runs.head_counts = scratch.head_counts;
  runs.begin = scratch.begin;
  runs.end = scratch.end;
  return runs;
}

void sort_tokens(const GradientTokens& tokens, const GradientScratch& scratch, const Launch& launch) {
  KeyArgs args;
  args.ids = tokens.ids.data;
  args.wide_ids = tokens.ids.wide;
  args.tokens = tokens.count;
  args.padding_idx = tokens.padding_idx;
  args.keys = scratch.keys;
  args.order = scratch.tokens;
  args.check = {tokens.rows, launch.call, launch.bad_id, launch.bad_id_found};
  POSENC_LAUNCH(mark_keys, line_of_blocks(tokens.count, launch), dim3(kBackwardThreads), 0, launch.stream, args);
  sort_pairs(scratch.temporary, scratch.temporary_bytes, scratch.keys, scratch.sorted_keys, scratch.tokens,
             scratch.order, tokens.count, bits_of(tokens.rows), launch.stream);
}

template <class T, bool vectors>
void launch_sums(SumArgs args, const Launch& launch) {
  constexpr int64_t kThreads = kBackwardThreads, kFills = 4;
  args.units = vectors ? args.width / kVector<T> : args.width;
  const int64_t x = threads_along(args.units, kThreads);
  const int64_t y = kThreads / x;
  const int64_t blocks_y = std::min(divide_up(args.units, x), kMostBlocksYZ);
  const auto blocks = [&](int64_t rows) {
    const int64_t most = std::clamp<int64_t>(kFills * launch.resident_threads / (x * y * blocks_y), 1, kMostBlocksX);
    return dim3(std::min(divide_up(rows, y), most), blocks_y);
  };
  const int64_t slots = args.runs.tokens / kSumPiece + 1;
  // Up to a piece in all, no run has a second one.
  if (args.runs.tokens > kSumPiece)
    POSENC_LAUNCH((sum_pieces<T, vectors>), blocks(slots), dim3(x, y), 0, launch.stream, args);
  POSENC_LAUNCH((sum_rows<T, vectors>), blocks(args.out_rows), dim3(x, y), 0, launch.stream, args);
}

template <class T>
void launch_typed(const SumArgs& args, const Launch& launch) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  const bool vectors = args.width % kVector<T> == 0 && args.column_bytes == static_cast<int64_t>(sizeof(T)) &&
                       args.token_bytes % 16 == 0 && aligned(args.grad) && aligned(args.out);
  if (vectors) return launch_sums<T, true>(args, launch);
  return launch_sums<T, false>(args, launch);
}

void sum(const RunArgs& runs, const BackwardParams& params, const GradientScratch& scratch, const Launch& launch) {
  if (params.rows == 0) return;
  const int64_t size = element_size(params.dtype);
  SumArgs args;
  args.runs = runs;
  args.order = scratch.order;
  args.grad = static_cast<const char*>(params.grad);
  args.token_bytes = params.token_stride * size;
  args.column_bytes = params.column_stride * size;
  args.width = params.width;
  args.out_rows = params.rows;
  args.partial = scratch.partial;
  args.out = params.out;
  args.token_scale = params.token_scale;
  args.scale_by_frequency = params.scale_by_frequency;
  switch (params.dtype) {
    case Dtype::float32: return launch_typed<float>(args, launch);
    case Dtype::float64: return launch_typed<double>(args, launch);
    case Dtype::bfloat16: return launch_typed<BFloat16>(args, launch);
    case Dtype::float16: return launch_typed<Float16>(args, launch);
  }
}

void launch_find_runs(const RunArgs& runs, const Launch& launch) {
  if (runs.tokens == 0) return;
  POSENC_LAUNCH(find_runs, line_of_blocks(runs.tokens, launch), dim3(kBackwardThreads), 0, launch.stream, runs);
}

}  // namespace

template <class Visit>
void GradientScratch::each_part(const Visit& visit) {
  int part = 0;
  visit(keys, sizes_[part++]);
  visit(sorted_keys, sizes_[part++]);
  visit(tokens, sizes_[part++]);
  visit(order, sizes_[part++]);
  visit(begin, sizes_[part++]);
  visit(end, sizes_[part++]);
  visit(head_counts, sizes_[part++]);
  visit(partial, sizes_[part++]);
  visit(temporary, sizes_[part++]);
}

GradientScratch::GradientScratch(const GradientTokens& call, const BackwardParams& params, bool sparse) {
  constexpr int64_t kAlignment = 256;
  const int64_t runs = sparse ? call.count : call.rows;
  temporary_bytes = sort_bytes(call.count, bits_of(call.rows));
  const int64_t wanted[] = {4 * call.count,
                            4 * call.count,
                            4 * call.count,
                            4 * call.count,
                            4 * runs,
                            4 * runs,
                            sparse ? 4 * call.count : 0,
                            (call.count / kSumPiece + 1) * params.width * real_size(params.dtype),
                            static_cast<int64_t>(temporary_bytes)};
  static_assert(std::size(wanted) == std::size(decltype(sizes_){}), "each part has a size");
  for (size_t i = 0; i < std::size(wanted); ++i) bytes += sizes_[i] = divide_up(wanted[i], kAlignment) * kAlignment;
}

void GradientScratch::place(void* memory) {
  char* at = static_cast<char*>(memory);
  each_part([&](auto*& pointer, int64_t size) {
    pointer = size == 0 ? nullptr : reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += size;
  });
}

void backward(const GradientTokens& tokens, const BackwardParams& params, const GradientScratch& scratch,
              const Launch& launch) {
  if (params.rows == 0) return;
  // Empty runs stay empty: begin = end = 0. The arrays follow one another.
  const size_t gap = reinterpret_cast<char*>(scratch.end) - reinterpret_cast<char*>(scratch.begin);
  cudaMemsetAsync(scratch.begin, 0, gap + sizeof(int32_t) * params.rows, launch.stream);
  if (tokens.count > 0) sort_tokens(tokens, scratch, launch);
  const RunArgs runs = runs_of(tokens, scratch);
  launch_find_runs(runs, launch);
  sum(runs, params, scratch, launch);
}

void number_runs(const GradientTokens& tokens, const GradientScratch& scratch, const Launch& launch) {
  if (tokens.count == 0) return;
  sort_tokens(tokens, scratch, launch);
  const RunArgs runs = runs_of(tokens, scratch);
  POSENC_LAUNCH(mark_heads, line_of_blocks(tokens.count, launch), dim3(kBackwardThreads), 0, launch.stream, runs);
  running_sum(scratch.temporary, scratch.temporary_bytes, scratch.head_counts, tokens.count, launch.stream);
}

void backward_of_runs(const GradientTokens& tokens, const BackwardParams& params, const GradientScratch& scratch,
                      int64_t* run_rows, const Launch& launch) {
  RunArgs runs = runs_of(tokens, scratch);
  runs.run_rows = run_rows;
  launch_find_runs(runs, launch);
  sum(runs, params, scratch, launch);
}

}  // namespace posenc::cuda
