// From a described call to a launch: its shape and the kernel for it. The kernels of each element type are compiled in
// a file of their own, forward_*.cu, so that they can be compiled at the same time.
#pragma once

#include "forward.cuh"
#include "shape.h"

namespace posenc::cuda {

// Which kernel a call gets.
struct Choice {
  bool vectors = false;
  Columns columns = Columns::plain;
  Mode mode = Mode::shared;
};

void launch_forward_float32(Source source, const ForwardArgs& args, const Choice& choice, const Launch& launch);
void launch_forward_float64(Source source, const ForwardArgs& args, const Choice& choice, const Launch& launch);
void launch_forward_bfloat16(Source source, const ForwardArgs& args, const Choice& choice, const Launch& launch);
void launch_forward_float16(Source source, const ForwardArgs& args, const Choice& choice, const Launch& launch);

// ---- the shape of the launch

struct Shape {
  dim3 grid, block;
};

// Enough threads to fill the device first; then longer walks for each, so that what a thread prepares serves more
// tokens. A decode step (few tokens, one position) so gets one token or two a thread, a training batch whole columns.
inline Shape shape(ForwardArgs& args, const Choice& choice, int64_t resident_threads) {
  constexpr int64_t kThreads = kForwardThreads, kFills = 4;  // of the device, before threads turn to a second lane
  const int64_t x = threads_along(args.units, kThreads);
  const int64_t work = args.units * args.lanes * args.steps;
  args.chunk = 1;
  if (choice.vectors) {
    args.chunk = std::clamp<int64_t>(divide_up(work, std::max<int64_t>(resident_threads, 1)), 1, args.steps);
    if (args.chunk > 1) args.chunk = divide_up(args.chunk, 4) * 4;  // whole rounds of rows in flight
    args.chunk = std::min<int64_t>(args.chunk, 1 << 30);
  }
  const int64_t chunks = divide_up(args.steps, args.chunk);
  const int64_t y = std::min(kThreads / x, power_from(args.lanes));
  const int64_t z = std::min({kThreads / (x * y), power_from(chunks), kMostThreadsZ});
  const int64_t blocks_y = std::min(divide_up(args.units, x), kMostBlocksYZ);
  const int64_t blocks_z = std::min(divide_up(chunks, z), kMostBlocksYZ);
  const int64_t blocks_x = divide_up(args.lanes, y);
  const int64_t most_x =
      std::clamp<int64_t>(kFills * resident_threads / (x * y * z * blocks_y * blocks_z), 1, kMostBlocksX);
  const int64_t rounds = divide_up(blocks_x, most_x);
  return {dim3(divide_up(blocks_x, rounds), blocks_y, blocks_z), dim3(x, y, z)};
}

// ---- choice of kernel

template <class T, Source source, Columns columns>
void launch_vectors(const ForwardArgs& args, Mode mode, const Shape& shape, cudaStream_t stream) {
  switch (mode) {
    case Mode::shared:
      POSENC_LAUNCH((forward_vectors<T, source, columns, Mode::shared>), shape.grid, shape.block, 0, stream, args);
      return;
    case Mode::token_exact:
      if constexpr (columns != Columns::plain)
        POSENC_LAUNCH((forward_vectors<T, source, columns, Mode::token_exact>), shape.grid, shape.block, 0, stream,
                      args);
      return;
    case Mode::token_reference:
      if constexpr (columns != Columns::plain && sizeof(T) != 8)
        POSENC_LAUNCH((forward_vectors<T, source, columns, Mode::token_reference>), shape.grid, shape.block, 0, stream,
                      args);
      return;
  }
}

template <class T, Source source>
void launch(ForwardArgs args, const Choice& choice, const Launch& launch) {
  if (!choice.vectors) {
    args.units = args.sines > 0 ? args.sines + (args.zero_column >= 0 ? 1 : 0) : args.width;
    const Shape columns = shape(args, choice, launch.resident_threads);
    POSENC_LAUNCH((forward_columns<T, source>), columns.grid, columns.block, 0, launch.stream, args);
    return;
  }
  args.units = args.width / kVector<T> / (choice.columns == Columns::halves ? 2 : 1);
  const Shape vectors = shape(args, choice, launch.resident_threads);
  switch (choice.columns) {
    case Columns::interleaved:
      return launch_vectors<T, source, Columns::interleaved>(args, choice.mode, vectors, launch.stream);
    case Columns::halves: return launch_vectors<T, source, Columns::halves>(args, choice.mode, vectors, launch.stream);
    case Columns::plain:
      if constexpr (source == Source::gathered)
        launch_vectors<T, source, Columns::plain>(args, choice.mode, vectors, launch.stream);
      return;
  }
}

template <class T>
void launch_forward(Source source, const ForwardArgs& args, const Choice& choice, const Launch& where) {
  switch (source) {
    case Source::gathered: return launch<T, Source::gathered>(args, choice, where);
    case Source::dense: return launch<T, Source::dense>(args, choice, where);
    case Source::none: return launch<T, Source::none>(args, choice, where);
  }
}

}  // namespace posenc::cuda
