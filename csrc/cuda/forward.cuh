// out = token_scale * base + waves, in one pass.
//
// The tokens stand on a plane: a lane is one index of the axis that threads are laid along, and a thread walks some
// steps of the other axis. It owns the same few columns all the way, so their frequencies are loaded once, and where
// all tokens of a lane share their position, so are the sines and cosines.
//
// forward_vectors reads and writes 16 bytes at a time; forward_columns takes what is not laid out for that.
#pragma once

#include "bad_id.cuh"
#include "element.cuh"
#include "launch.h"
#include "waves.cuh"

namespace posenc::cuda {

// In bytes.
struct PlaneStrides {
  int64_t lane = 0, step = 0;
  __device__ __forceinline__ int64_t at(int64_t lane_index, int64_t step_index) const {
    return lane_index * lane + step_index * step;
  }
};

struct ForwardArgs {
  int64_t width = 0;
  int64_t units = 0;  // of columns: what one thread owns
  int64_t lanes = 0, steps = 0;
  int64_t chunk = 0;  // steps that one thread walks
  const char* base = nullptr;
  const char* ids = nullptr;
  const char* positions = nullptr;  // null: the running index along the lanes (or along the steps of a single lane)
  char* out = nullptr;
  PlaneStrides id_strides, position_strides, base_strides, out_strides;
  PlaneStrides place_strides;    // in tokens: where a token stands in their order
  int64_t row_bytes = 0;         // from one row of the table to the next
  uint32_t short_row_bytes = 0;  // the same; forward_vectors takes no longer ones, and no table of 2^31 rows
  int64_t column_bytes = 0;      // from one column of the base term to the next
  int64_t offset = 0;
  double token_scale = 1.0;
  WaveArgs waves;
  int64_t sines = 0, cosines = 0;
  int64_t sine_start = 0, sine_step = 1, cosine_start = 0, cosine_step = 1;  // columns of pair k: start + k * step
  int64_t zero_column = -1;
  IdCheck check;
  bool wide_ids = true, wide_positions = true;
};

// Columns of a unit in forward_vectors.
enum class Columns {
  interleaved,  // one vector of sine, cosine, sine, ...
  halves,       // a vector of sines and the vector of their cosines
  plain,        // one vector without waves
};

// When a thread makes waves.
enum class Mode {
  shared,           // once for all steps of a lane
  token_exact,      // for each token
  token_reference,  // the same, in that precision
};

// Steps whose rows are on their way at the same time; of fp64, as many as registers hold on every architecture.
template <class T>
constexpr int kRowsInFlight = sizeof(T) == 8 ? 2 : 4;
constexpr int kForwardThreads = 256;
// On one multiprocessor at least; asked for because the compiler may otherwise spill to fit more.
constexpr int kForwardBlocks = 2;

template <class T, Columns columns>
constexpr int kPairs = columns == Columns::halves ? kVector<T> : kVector<T> / 2;
template <Columns columns>
constexpr int kVectors = columns == Columns::halves ? 2 : 1;

template <class T, Source source, Columns columns, Mode mode>
__global__ void forward_vectors(const ForwardArgs args);

template <class T, Source source>
__global__ void forward_columns(const ForwardArgs args);

#if !defined(POSENC_KERNELS_FROM_PTX)

template <class Real>
__device__ __forceinline__ Real not_a_number() {
  return static_cast<Real>(__int_as_float(0x7FC00000));
}

__device__ __forceinline__ Integer64 position_of(const ForwardArgs& args, int64_t lane, int64_t step) {
  const int64_t at = args.position_strides.at(lane, step);
  return moved(args.positions == nullptr ? halves_of(at) : load_integer(args.positions + at, args.wide_positions),
               args.offset);
}

// The precision of a call, which a kernel of one precision knows when it is compiled.
template <class T, Mode mode>
__device__ __forceinline__ Precision precision_of(const ForwardArgs& args) {
  if constexpr (mode == Mode::shared || sizeof(T) == 8) return args.waves.precision;
  return mode == Mode::token_exact ? Precision::exact : Precision::reference;
}

// ---- one column at a time: every layout, every position

template <class T, Source source, Mode mode>
struct TokenColumns {
  using Real = typename Element<T>::Real;

  const ForwardArgs& args;
  const char* base;
  T* out;
  Real scale;
  bool good;
  int64_t position;

  __device__ __forceinline__ TokenColumns(const ForwardArgs& call, int64_t lane, int64_t step)
      : args(call),
        base(call.base),
        out(reinterpret_cast<T*>(call.out + call.out_strides.at(lane, step))),
        scale(static_cast<Real>(call.token_scale)),
        good(true),
        position(0) {
    if constexpr (source == Source::dense) base += args.base_strides.at(lane, step);
    if constexpr (source == Source::gathered) {
      // A bad id reads row 0, times NaN.
      const int64_t id = load_integer(args.ids + args.id_strides.at(lane, step), args.wide_ids).value();
      good = in_table(id, args.check.rows);
      base += (good ? id : 0) * args.row_bytes;
      if (!good) scale = not_a_number<Real>();
    }
    if (args.sines > 0) position = position_of(args, lane, step).value();
  }

  __device__ __forceinline__ Real term(int64_t column) const {
    const Real value = Element<T>::get(*reinterpret_cast<const T*>(base + column * args.column_bytes));
    return source == Source::gathered ? value * scale : value;
  }
  __device__ __forceinline__ void put(int64_t column, Real wave) const {
    out[column] = Element<T>::put(source == Source::none ? wave : term(column) + wave);
  }
  __device__ __forceinline__ void put_plain(int64_t column) const {
    out[column] = Element<T>::put(source == Source::none ? Real{0} : term(column));
  }
  __device__ __forceinline__ void put_pair(int64_t pair) const {
    Real sine, cosine;
    wave_of_pair(args.waves.frequencies, precision_of<T, mode>(args), position, pair, sine, cosine);
    put(args.sine_start + pair * args.sine_step, sine);
    if (pair < args.cosines) put(args.cosine_start + pair * args.cosine_step, cosine);
  }
};

// Writes down the bad ids among the tokens (lane, first .. last - 1). Apart from the loops that do the work, so that
// they need not carry it.
__device__ __forceinline__ void report_bad_ids(const ForwardArgs& args, int64_t lane, int64_t first, int64_t last) {
  for (int64_t step = first; step < last; ++step) {
    const int64_t id = load_integer(args.ids + args.id_strides.at(lane, step), args.wide_ids).value();
    if (!in_table(id, args.check.rows)) record_bad_id(args.check, args.place_strides.at(lane, step), id);
  }
}

// A unit is a pair, the zero column after the pairs, or any column of a layout without waves.
template <class T, Source source>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks) forward_columns(const ForwardArgs args) {
  for (int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x; unit < args.units;
       unit += int64_t{gridDim.y} * blockDim.x) {
    for (int64_t step = blockIdx.z * int64_t{blockDim.z} + threadIdx.z; step < args.steps;
         step += int64_t{gridDim.z} * blockDim.z) {
      for (int64_t lane = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; lane < args.lanes;
           lane += int64_t{gridDim.x} * blockDim.y) {
        const TokenColumns<T, source, Mode::shared> token(args, lane, step);
        if (unit < args.sines) {
          token.put_pair(unit);
        } else if (args.sines > 0) {
          token.put(args.zero_column, 0);
        } else {
          token.put_plain(unit);
        }
        if (source == Source::gathered && unit == 0) report_bad_ids(args, lane, step, step + 1);
      }
    }
  }
}

// ---- whole vectors

// What one thread does with the tokens (lane, first .. last - 1).
//
// The loops carry nothing but the work. What is rare, a bad id or a far position, only leaves a note in them, any bit
// of a number, and is seen to in loops of its own afterwards. Until then such a token holds what came of reading
// another row of the table, or of a position cut short.
template <class T, Source source, Columns columns, Mode mode>
struct UnitWalk {
  using Real = typename Element<T>::Real;
  static constexpr int kPairCount = kPairs<T, columns>;
  static constexpr int kVectorCount = kVectors<columns>;
  static constexpr bool kWaves = columns != Columns::plain;
  static constexpr bool kNarrow = sizeof(Real) == sizeof(float);

  // The waves of a unit, arranged as its columns are.
  struct UnitWaves {
    Real values[kVectorCount][kVector<T>];
  };

  // What has been read of one token.
  struct Row {
    uint4 raw[kVectorCount];
  };

  const ForwardArgs& args;
  int64_t first_pair;
  int64_t column;       // in bytes, of the unit's first vector in a row
  int64_t next_column;  // from there to the second vector
  uint64_t table;       // address of its columns in row 0; as a number, or the column is added anew for every row
  Frequency<kPairCount> frequency;

  __device__ __forceinline__ UnitWalk(const ForwardArgs& call, int64_t unit)
      : args(call), first_pair(unit * kPairCount), column(unit * 16), next_column(0) {
    if constexpr (columns == Columns::halves) {
      column += args.sine_start * static_cast<int64_t>(sizeof(T));
      next_column = (args.cosine_start - args.sine_start) * static_cast<int64_t>(sizeof(T));
    }
    table = reinterpret_cast<uint64_t>(args.base) + static_cast<uint64_t>(column);
    if constexpr (kWaves && kNarrow) frequency.load(args.waves, first_pair);
  }

  // ---- waves

  __device__ __forceinline__ void arrange(const Real (&sines)[kPairCount], const Real (&cosines)[kPairCount],
                                          UnitWaves& waves) const {
#pragma unroll
    for (int i = 0; i < kPairCount; ++i) {
      if constexpr (columns == Columns::halves) {
        waves.values[0][i] = sines[i];
        waves.values[1][i] = cosines[i];
      } else {
        waves.values[0][2 * i] = sines[i];
        waves.values[0][2 * i + 1] = cosines[i];
      }
    }
  }

  // Positions that are not far; of fp64, any.
  __device__ __forceinline__ void make(Precision precision, Integer64 position, UnitWaves& waves) const {
    Real sines[kPairCount], cosines[kPairCount];
    if constexpr (!kNarrow) {
#pragma unroll
      for (int i = 0; i < kPairCount; ++i)
        wave_of_pair(args.waves.frequencies, precision, position.value(), first_pair + i, sines[i], cosines[i]);
    } else if (precision == Precision::exact) {
      near_waves<Precision::exact>(static_cast<int32_t>(position.low), frequency, sines, cosines);
    } else {
      near_waves<Precision::reference>(static_cast<int32_t>(position.low), frequency, sines, cosines);
    }
    arrange(sines, cosines, waves);
  }

  // 0 if `make` can make the waves of a position, else a note of it.
  __device__ __forceinline__ uint32_t far_note(Precision precision, Integer64 position) const {
    if constexpr (!kWaves || !kNarrow) return 0;
    return precision == Precision::exact ? beyond_near<Precision::exact>(position)
                                         : beyond_near<Precision::reference>(position);
  }

  // ---- rows

  // `base` is the unit's place in row 0 of the table, or in the token's own row. Notes what is wrong with the lower
  // half of the id.
  __device__ __forceinline__ void load(Row& row, uint64_t base, Integer64 id, uint32_t& notes) const {
    if constexpr (source == Source::gathered) {
      const uint32_t last = static_cast<uint32_t>(args.check.rows) - 1u, known = id.low < last ? id.low : last;
      notes |= known ^ id.low;
      base += wide_product(known, args.short_row_bytes);
    }
    if constexpr (source != Source::none) {
#pragma unroll
      for (int v = 0; v < kVectorCount; ++v)
        row.raw[v] = load_vector<source == Source::gathered>(reinterpret_cast<const char*>(base) + v * next_column);
    }
  }

  __device__ __forceinline__ void store(const Row& row, const UnitWaves& waves, char* out, bool wanted = true) const {
    const Real scale = static_cast<Real>(args.token_scale);
#pragma unroll
    for (int v = 0; v < kVectorCount; ++v) {
      Real values[kVector<T>];
      if constexpr (source != Source::none) unpack<T>(row.raw[v], values);
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        if constexpr (source == Source::gathered) values[i] = values[i] * scale;
        if constexpr (kWaves) values[i] = source == Source::none ? waves.values[v][i] : values[i] + waves.values[v][i];
      }
      if (wanted) store_vector<T>(out + v * next_column, values);
    }
  }

  // Where the data of a token lies; moves on by whole steps without a multiplication.
  struct Cursor {
    const char* id;
    const char* position;
    uint64_t base;
    char* out;

    __device__ __forceinline__ Cursor(const UnitWalk& walk, int64_t lane, int64_t step)
        : id(source == Source::gathered ? walk.args.ids + walk.args.id_strides.at(lane, step) : nullptr),
          position(mode != Mode::shared ? walk.args.positions + walk.args.position_strides.at(lane, step) : nullptr),
          base(source == Source::dense ? walk.table + walk.args.base_strides.at(lane, step) : walk.table),
          out(walk.args.out + walk.column + walk.args.out_strides.at(lane, step)) {}
    __device__ __forceinline__ void next(const ForwardArgs& args) {
      if constexpr (source == Source::gathered) id += args.id_strides.step;
      if constexpr (mode != Mode::shared) position += args.position_strides.step;
      if constexpr (source == Source::dense) base += args.base_strides.step;
      out += args.out_strides.step;
    }
  };

  // A negative int32 is left without its sign: it is above every row number all the same.
  __device__ __forceinline__ Integer64 id_at(const Cursor& cursor, bool wide) const {
    if constexpr (source != Source::gathered) return {};
    if (wide) return halves_of(__ldg(reinterpret_cast<const long long*>(cursor.id)));
    return {__ldg(reinterpret_cast<const uint32_t*>(cursor.id)), 0u};
  }

  // ---- walks

  // Tokens with the same waves, `count` at a time: all their rows are asked for before the first is used.
  template <int count>
  __device__ __forceinline__ void rows(Cursor& cursor, bool wide_ids, const UnitWaves& waves, uint32_t& notes) const {
    Integer64 ids[count];
    Row row[count];
    char* out[count];
    uint64_t base[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      ids[i] = id_at(cursor, wide_ids);
      out[i] = cursor.out;
      base[i] = cursor.base;
      cursor.next(args);
    }
#pragma unroll
    for (int i = 0; i < count; ++i) load(row[i], base[i], ids[i], notes);
    uint32_t high = 0;  // apart, since an instruction joins three
#pragma unroll
    for (int i = 0; i < count; ++i) high |= ids[i].high;
    notes |= high;
#pragma unroll
    for (int i = 0; i < count; ++i) store(row[i], waves, out[i]);
  }

  __device__ __forceinline__ void all_rows(Cursor& cursor, int left, bool wide_ids, const UnitWaves& waves,
                                           uint32_t& notes) const {
    for (; left >= kRowsInFlight<T>; left -= kRowsInFlight<T>) rows<kRowsInFlight<T>>(cursor, wide_ids, waves, notes);
#pragma unroll 1  // a few at most
    for (; left > 0; --left) rows<1>(cursor, wide_ids, waves, notes);
  }

  __device__ __forceinline__ void walk_shared(int64_t lane, int64_t first, int64_t last, uint32_t& notes) const {
    UnitWaves waves;
    if constexpr (kWaves) {
      const Integer64 position = position_of(args, lane, first);
      const Precision precision = args.waves.precision;
      notes = far_note(precision, position);
      if (notes != 0) return;
      make(precision, position, waves);
    }
    Cursor cursor(*this, lane, first);
    const int count = static_cast<int>(last - first);
    // A loop for each, so that none asks again for every token.
    if (source == Source::gathered && args.wide_ids) {
      all_rows(cursor, count, true, waves, notes);
    } else {
      all_rows(cursor, count, false, waves, notes);
    }
  }

  __device__ __forceinline__ void walk_tokens(int64_t lane, int64_t first, int64_t last, uint32_t& notes) const {
    const Precision precision = precision_of<T, mode>(args);
    Cursor cursor(*this, lane, first);
#pragma unroll 1
    for (int left = static_cast<int>(last - first); left > 0; --left) {
      const Integer64 position = moved(load_integer(cursor.position, args.wide_positions), args.offset);
      const uint32_t far = far_note(precision, position);
      Row row;
      const Integer64 id = id_at(cursor, args.wide_ids);
      load(row, cursor.base, id, notes);
      UnitWaves waves;
      make(precision, position, waves);
      // What may be its own base term must not be lost.
      store(row, waves, cursor.out, source == Source::gathered || far == 0);
      notes |= far | id.high;
      cursor.next(args);
    }
  }

  // What the walk has left a note of, one column at a time: rare, and the long formulas for a whole vector would be
  // most of the kernel.
  __device__ __forceinline__ void walk_again(int64_t lane, int64_t first, int64_t last) const {
    for (int64_t step = first; step < last; ++step) {
      const TokenColumns<T, source, mode> token(args, lane, step);
      if (token.good && far_note(precision_of<T, mode>(args), halves_of(token.position)) == 0) continue;
#pragma unroll 1
      for (int i = 0; i < (kWaves ? kPairCount : kVector<T>); ++i) {
        if constexpr (kWaves) {
          token.put_pair(first_pair + i);
        } else {
          token.put_plain(first_pair * 2 + i);
        }
      }
    }
  }

  __device__ __forceinline__ void walk(int64_t lane, int64_t first, int64_t last) const {
    uint32_t notes = 0;
    if constexpr (mode == Mode::shared) {
      walk_shared(lane, first, last, notes);
    } else {
      walk_tokens(lane, first, last, notes);
    }
    if (notes == 0) return;
    walk_again(lane, first, last);
    if (source == Source::gathered && first_pair == 0) report_bad_ids(args, lane, first, last);
  }
};

template <class T, Source source, Columns columns, Mode mode>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks) forward_vectors(const ForwardArgs args) {
  for (int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x; unit < args.units;
       unit += int64_t{gridDim.y} * blockDim.x) {
    const UnitWalk<T, source, columns, mode> work(args, unit);
    for (int64_t first = (blockIdx.z * int64_t{blockDim.z} + threadIdx.z) * args.chunk; first < args.steps;
         first += int64_t{gridDim.z} * blockDim.z * args.chunk) {
      const int64_t last = first + args.chunk < args.steps ? first + args.chunk : args.steps;
      for (int64_t lane = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; lane < args.lanes;
           lane += int64_t{gridDim.x} * blockDim.y)
        work.walk(lane, first, last);
    }
  }
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
