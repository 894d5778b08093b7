#include "forward.h"

#include <stdexcept>

#include "forward_launch.cuh"

namespace posenc::cuda {
namespace {

// ---- the plane of tokens

// Only one of the grid's outer and inner axes is longer than 1, whichever way the batch lies; it is the batch.
struct Plane {
  Grid grid;
  bool lanes_are_seq;

  int64_t batch() const { return grid.outer * grid.inner; }
  int64_t lanes() const { return lanes_are_seq ? grid.seq : batch(); }
  int64_t steps() const { return lanes_are_seq ? batch() : grid.seq; }

  // From elements to bytes. The stride of an axis with one entry means nothing and is dropped.
  PlaneStrides strides(const GridStrides& of, int64_t size) const {
    const int64_t along_batch = batch() > 1 ? (grid.outer > 1 ? of.outer : of.inner) * size : 0;
    const int64_t along_seq = grid.seq > 1 ? of.seq * size : 0;
    return lanes_are_seq ? PlaneStrides{along_seq, along_batch} : PlaneStrides{along_batch, along_seq};
  }
};

// ---- what the vector kernels ask of a call

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
bool aligned(const PlaneStrides& strides) { return strides.lane % 16 == 0 && strides.step % 16 == 0; }

bool base_fits(const ForwardParams& params, const ForwardArgs& args) {
  if (params.source == Source::none) return true;
  if (params.column_stride != 1 || !aligned(params.base)) return false;
  if (params.source == Source::dense) return aligned(args.base_strides);
  const int64_t limit = int64_t{1} << 31;
  return params.rows < limit && args.row_bytes % 16 == 0 && args.row_bytes >= 0 && args.row_bytes < 2 * limit;
}

Choice choose(const ForwardParams& params, const ForwardArgs& args) {
  Choice choice;
  const Waves& waves = params.waves;
  const Layout& layout = waves.layout;
  const int64_t vector = 16 / element_size(params.dtype);
  int64_t unit = vector;  // columns
  if (layout.kind == LayoutKind::interleaved) choice.columns = Columns::interleaved;
  if (layout.kind == LayoutKind::sin_cos || layout.kind == LayoutKind::cos_sin) {
    choice.columns = Columns::halves;
    unit = 2 * vector;
  }
  if (choice.columns != Columns::plain && !waves.shared())
    choice.mode = waves.precision == Precision::exact || params.dtype == Dtype::float64 ? Mode::token_exact
                                                                                        : Mode::token_reference;
  // Of layouts without waves, only the gathered row is worth a kernel.
  const bool has_kernel = choice.columns != Columns::plain || params.source == Source::gathered;
  choice.vectors = has_kernel && layout.width % unit == 0 && aligned(params.out) && aligned(args.out_strides) &&
                   base_fits(params, args);
  return choice;
}

// ---- arguments

void set_columns(ForwardArgs& args, const Layout& layout) {
  args.width = layout.width;
  args.sines = layout.sines;
  args.cosines = layout.cosines;
  const bool interleaved = layout.kind == LayoutKind::interleaved;
  args.sine_start = interleaved ? 0 : layout.sine_start();
  args.cosine_start = interleaved ? 1 : layout.cosine_start();
  args.sine_step = args.cosine_step = interleaved ? 2 : 1;
  args.zero_column = layout.zero_column();
}

ForwardArgs arguments(const ForwardParams& params, const Plane& plane, const Launch& launch) {
  const Waves& waves = params.waves;
  const Grid& grid = params.grid;
  const int64_t size = element_size(params.dtype);
  ForwardArgs args;
  args.lanes = plane.lanes();
  args.steps = plane.steps();
  args.base = static_cast<const char*>(params.base);
  args.out = static_cast<char*>(params.out);
  args.base_strides = plane.strides(params.base_strides, size);
  args.out_strides = plane.strides(params.out_strides, size);
  const GridStrides places = {grid.seq * grid.inner, grid.inner, 1};
  args.place_strides = plane.strides(places, 1);
  args.ids = static_cast<const char*>(params.ids.data);
  args.wide_ids = params.ids.wide;
  args.id_strides = plane.strides(places, params.ids.wide ? 8 : 4);
  args.positions = static_cast<const char*>(waves.positions.data);
  args.wide_positions = waves.positions.wide;
  args.position_strides = args.positions == nullptr
                              ? plane.strides({0, 1, 0}, 1)
                              : plane.strides(waves.position_strides, waves.positions.wide ? 8 : 4);
  args.row_bytes = params.row_stride * size;
  args.short_row_bytes = static_cast<uint32_t>(args.row_bytes);
  args.column_bytes = params.column_stride * size;
  args.offset = waves.offset;
  args.token_scale = params.token_scale;
  args.waves = {waves.precision, waves.frequencies};
  set_columns(args, waves.layout);
  args.check = {params.rows, launch.call, launch.bad_id, launch.bad_id_found};
  return args;
}

}  // namespace

void forward(const ForwardParams& params, const Launch& launch) {
  const Grid& grid = params.grid;
  if (grid.tokens() == 0 || params.waves.layout.width == 0) return;
  if (grid.outer > 1 && grid.inner > 1)
    throw std::invalid_argument("posenc_ext: the CUDA kernels take one batch axis, before or after the positions");
  const bool has_waves = params.waves.layout.kind != LayoutKind::none;
  // Waves that are shared need the positions along the lanes; else the longer axis has room for more threads.
  const bool lanes_are_seq = has_waves && params.waves.shared() ? true : grid.seq >= grid.outer * grid.inner;
  const Plane plane{grid, lanes_are_seq};
  ForwardArgs args = arguments(params, plane, launch);
  const Choice choice = choose(params, args);
  switch (params.dtype) {
    case Dtype::float32: return launch_forward_float32(params.source, args, choice, launch);
    case Dtype::float64: return launch_forward_float64(params.source, args, choice, launch);
    case Dtype::bfloat16: return launch_forward_bfloat16(params.source, args, choice, launch);
    case Dtype::float16: return launch_forward_float16(params.source, args, choice, launch);
  }
}

}  // namespace posenc::cuda
