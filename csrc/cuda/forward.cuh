// The forward kernels: out = scale * base + encoding, in one pass.
//
// Threads lie along the columns and along seq. Each owns the same few columns of every token it writes and loops over
// rows of the batch: their frequencies are loaded once, and rows that share their positions share one encoding.
//
// forward_vectors loads and stores 16 bytes at a time. forward_columns takes what is not laid out for that.
#pragma once

#include "../epilogue.h"
#include "../sinusoid.h"
#include "../token.h"
#include "element.cuh"
#include "elements.cuh"
#include "forward.h"
#include "launch_config.h"
#include "out_of_range.cuh"

namespace posenc::cuda {

struct ForwardLaunch {
  int64_t units = 0;  // of a row; each belongs to one thread
  ErrorSink errors;
};

// Two blocks of kForwardThreads on a multiprocessor leave each thread up to 128 registers.
constexpr int kForwardBlocks = 2;

template <class T, Source source, Arrangement arrangement, Mode mode>
__global__ void forward_vectors(const ForwardParams params, const ForwardLaunch launch);

// The same tokens and columns, for Mode::shared alone, with several tokens in flight wherever they lie.
template <class T, Source source, Arrangement arrangement, Inner inner>
__global__ void forward_tokens(const ForwardParams params, const ForwardLaunch launch);

// Calls for which ForwardParams::general() holds.
template <class T, Source source, Arrangement arrangement>
__global__ void forward_general(const ForwardParams params, const ForwardLaunch launch);

template <class T, Source source, bool general>
__global__ void forward_columns(const ForwardParams params, const ForwardLaunch launch);

#if !defined(POSENC_KERNELS_FROM_PTX)

// The rows of the batch that a thread writes are batch_row_step() apart.
__device__ __forceinline__ int64_t first_batch_row() { return blockIdx.z * int64_t{blockDim.z} + threadIdx.z; }
__device__ __forceinline__ int64_t batch_row_step() { return int64_t{gridDim.z} * blockDim.z; }

template <class T>
__device__ __forceinline__ const T* row_of_table(const ForwardParams& params, int64_t position) {
  const PositionTable& table = params.encoding.table;
  return static_cast<const T*>(table.data) + position * table.row_stride;
}

// ---- one column at a time: every layout, every position

template <class T, Source source, bool encoded, class Elements>
__device__ __forceinline__ void store_column(const ForwardParams& params, const Elements& elements,
                                             const Token<acc_of<T>>& token, int64_t column, acc_of<T> encoding) {
  acc_of<T> base = 0;
  if constexpr (source != Source::none)
    base = to_acc(static_cast<const T*>(params.base)[token.base + column * params.column_stride]);
  acc_of<T> value[1] = {elements.template sum<source, encoded>(token, base, encoding)};
  elements.drop(token, column, value);
  static_cast<T*>(params.out)[token.out + column] = from_acc<T>(token.constant ? token.scale : value[0]);
}

template <class T, Source source, class Elements>
__device__ __forceinline__ void store_pair(const ForwardParams& params, const Elements& elements,
                                           const Token<acc_of<T>>& token, int64_t k, const SinCos<acc_of<T>>& pair) {
  const Columns& columns = params.encoding.columns;
  if (k < columns.sines) store_column<T, source, true>(params, elements, token, columns.sine_column(k), pair.sin);
  if (k < columns.cosines) store_column<T, source, true>(params, elements, token, columns.cosine_column(k), pair.cos);
}

// A unit is a pair, the zero column after the pairs, or any column where there is no encoding.
template <class T, Source source, bool general>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks)
    forward_columns(const ForwardParams params, const ForwardLaunch launch) {
  const Encoding& encoding = params.encoding;
  const ElementsOf<acc_of<T>, general> elements(params);
  for (int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x; unit < launch.units;
       unit += int64_t{gridDim.y} * blockDim.x) {
    for (int64_t t = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; t < params.tokens.seq;
         t += int64_t{gridDim.x} * blockDim.y) {
      SinCos<acc_of<T>> pair = {};
      bool made = false;
      for (int64_t b = first_batch_row(); b < params.tokens.batch; b += batch_row_step()) {
        const auto token = token_of<source, acc_of<T>, general>(params, b, t);
        if (!encoding.columns.encoded) {
          acc_of<T> value = 0;
          bool tabled = false;
          if constexpr (general) {
            tabled = encoding.table.data != nullptr;
            if (tabled && !token.constant)
              value = to_acc(row_of_table<T>(params, token.position.whole)[unit]) * elements.scale;
          }
          if (tabled) store_column<T, source, true>(params, elements, token, unit, value);
          else store_column<T, source, false>(params, elements, token, unit, 0);
        } else if (unit == encoding.columns.pairs()) {
          store_column<T, source, true>(params, elements, token, encoding.columns.width - 1, 0);
        } else {
          if (!made || !params.positions.shared())
            pair = encoding_of_pair<acc_of<T>, general>(encoding.frequencies, encoding.precision, token.position, unit);
          made = true;
          store_pair<T, source>(params, elements, token, unit, elements.scaled(token.position, pair));
        }
        if ((source == Source::gathered || (general && source == Source::dense)) && unit == 0 && !token.in_range)
          record_token(params, b, t, launch.errors);
      }
    }
  }
}

// ---- whole vectors

template <int count>
struct alignas(count < 4 ? 4 * count : 16) Words {
  uint32_t word[count];
};

// Rows of the batch that a thread loads before it uses the first: as many as registers hold on every architecture. In
// halves a row is two vectors.
template <class T, Arrangement arrangement, Mode mode>
constexpr int kBatchRowsInFlight = mode != Mode::shared                                              ? 1
                                   : std::is_same_v<T, double> || arrangement == Arrangement::halves ? 2
                                                                                                     : 4;

// The columns of one thread, and what it does with them.
//
// The fast path makes the encoding of positions that are not far. Whatever else a token needs, a far position or the
// record of its id, is left to `fixup`, so that the loops that do the work do not carry it.
template <class T, Source source, Arrangement arrangement, Mode mode>
struct VectorColumns {
  using acc_t = acc_of<T>;
  static constexpr bool kEncoded = arrangement != Arrangement::none;
  static constexpr int kVectors = arrangement == Arrangement::halves ? 2 : 1;
  static constexpr int kPairs = kVectors * kVector<T> / 2;
  // fp64 makes every encoding by the general formulas: there is no far position.
  static constexpr bool kFast = kEncoded && !std::is_same_v<T, double>;

  struct Values {
    acc_t of[kVectors][kVector<T>];
  };

  const ForwardParams& params;
  Precision precision;
  int64_t unit;
  int64_t column[kVectors];  // the first of each vector
  // Of w / 2pi the two leading words, all that a position below 2^32 needs; or the bits of w.
  Words<kPairs> high, low;

  __device__ __forceinline__ VectorColumns(const ForwardParams& call, int64_t unit_index)
      : params(call), precision(call.encoding.precision), unit(unit_index) {
    if constexpr (mode != Mode::shared && kFast)
      precision = mode == Mode::per_token_exact ? Precision::exact : Precision::reference;
    if constexpr (arrangement == Arrangement::halves) {
      column[0] = params.encoding.columns.sine_column(unit * kPairs);
      column[1] = params.encoding.columns.cosine_column(unit * kPairs);
    } else {
      column[0] = unit * kVector<T>;
    }
    if constexpr (kFast) {
      const auto load = [&](const void* words) { return static_cast<const Words<kPairs>*>(words)[unit]; };
      const Frequencies& frequencies = params.encoding.frequencies;
      high = load(precision == Precision::exact ? static_cast<const void*>(frequencies.turns[0]) : frequencies.angular);
      if (precision == Precision::exact) low = load(frequencies.turns[1]);
    }
  }

  // Frequencies of a spec are at most 1, so no angle is above the position.
  template <bool general = false>
  __device__ __forceinline__ bool is_far(const Position& position) const {
    if (!kFast) return false;
    const Magnitude p = magnitude(position);
    if (precision == Precision::exact) return p.whole >= uint64_t{1} << 32;
    if (!general) return p.whole >= static_cast<uint64_t>(kShortAngle);
    float largest = 1;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(high.word[i])));
    return !(static_cast<float>(p) * largest < kShortAngle);
  }

  template <bool general>
  __device__ __forceinline__ SinCos<acc_t> near_pair(const Position& position, int i) const {
    const Frequencies& frequencies = params.encoding.frequencies;
    const int64_t k = unit * kPairs + i;
    if constexpr (!kFast) {
      return encoding_of_pair<acc_t, general>(frequencies, precision, position, k);
    } else {
      const Magnitude p = magnitude(position);
      const uint32_t whole = static_cast<uint32_t>(p.whole);
      uint32_t sign = static_cast<uint32_t>(position.whole >> 32);
      SinCos<float> pair;
      if (precision == Precision::exact) {
        uint32_t phase = phase_of_product(whole, high.word[i], low.word[i]);
        if (general && p.fraction != 0) phase += fraction_phase32(frequencies, p.fraction, k);
        pair = sincos_of_phase32(phase);
        if (general && frequencies.given()) {
          const float angular = frequencies.angular[k];
          pair = {pair.sin + angular, pair.cos + angular};
          sign ^= __float_as_uint(angular);
        }
      } else {
        float angle = (general ? static_cast<float>(p) : static_cast<float>(whole)) * __uint_as_float(high.word[i]);
        if (general) sign ^= __float_as_uint(angle), angle = fabsf(angle);
        pair = sincos_of_short_angle<uint32_t>(angle);
      }
      pair.sin = Lane<uint32_t>::flipped(pair.sin, sign);
      return pair;
    }
  }

  // The encoding of a position that is not far, arranged as the columns are.
  template <bool general = false>
  __device__ __forceinline__ Values encode(const Position& position) const {
    const bool cosine_first = params.encoding.columns.cosine_first();
    Values values;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const SinCos<acc_t> pair = near_pair<general>(position, i);
      if constexpr (arrangement == Arrangement::halves) {
        values.of[0][i] = pair.sin;
        values.of[1][i] = pair.cos;
      } else {
        values.of[0][2 * i] = cosine_first ? pair.cos : pair.sin;
        values.of[0][2 * i + 1] = cosine_first ? pair.sin : pair.cos;
      }
    }
    return values;
  }

  __device__ __forceinline__ void load(const Token<acc_t>& token, Vector<T> (&base)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < (source == Source::none ? 0 : kVectors); ++v)
      base[v] = load_vector<source == Source::gathered>(static_cast<const T*>(params.base) + token.base + column[v]);
  }

  // The same from a table, which has a row for the position.
  __device__ __forceinline__ Values from_table(int64_t position) const {
    Values values;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Vector<T> row = load_vector<true>(row_of_table<T>(params, position) + column[v]);
#pragma unroll
      for (int c = 0; c < kVector<T>; ++c) values.of[v][c] = to_acc(row.element[c]);
    }
    return values;
  }

  template <bool encoded = kEncoded, class Elements>
  __device__ __forceinline__ void store(const Elements& elements, const Token<acc_t>& token,
                                        const Vector<T> (&base)[kVectors], const Values& encoding) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      acc_t values[kVector<T>];
#pragma unroll
      for (int c = 0; c < kVector<T>; ++c)
        values[c] = elements.template sum<source, encoded>(token, to_acc(base[v].element[c]), encoding.of[v][c]);
      elements.drop(token, column[v], values);
      store_vector(static_cast<T*>(params.out) + token.out + column[v], values);
    }
  }

  __device__ __forceinline__ void store_constant(const Token<acc_t>& token) const {
    acc_t values[kVector<T>];
#pragma unroll
    for (int c = 0; c < kVector<T>; ++c) values[c] = token.scale;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) store_vector(static_cast<T*>(params.out) + token.out + column[v], values);
  }

  // The rows first, first + step, ... of the batch. Returns whether one of them needs the fixup.
  template <int count>
  __device__ __forceinline__ bool write(int64_t first, int64_t step, int64_t t, const Values& shared) const {
    Token<acc_t> tokens[count];
    Vector<T> base[count][kVectors] = {};
    bool slow = false;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      tokens[i] = token_of<source, acc_t>(params, first + i * step, t);
      slow |= !tokens[i].in_range;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) load(tokens[i], base[i]);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (source == Source::gathered && tokens[i].constant) {
        store_constant(tokens[i]);
        continue;
      }
      if (mode != Mode::shared && is_far(tokens[i].position)) {
        slow = true;
        continue;
      }
      store(PlainElements<acc_t>(params), tokens[i], base[i],
            mode == Mode::shared ? shared : encode(tokens[i].position));
    }
    return slow;
  }

  // Out-of-range ids have their NaN already and are recorded here. Far positions are written here, by the general
  // formulas and one column at a time, because for a whole vector those would be most of the kernel.
  template <class Elements>
  __device__ __forceinline__ void fixup(const Elements& elements, int64_t t, const ErrorSink& errors) const {
    for (int64_t b = first_batch_row(); b < params.tokens.batch; b += batch_row_step()) {
      const auto token = token_of<source, acc_t, Elements::kGeneral>(params, b, t);
      if (!token.in_range && unit == 0) record_token(params, b, t, errors);
      if (!is_far<Elements::kGeneral>(token.position)) continue;
#pragma unroll 1
      for (int64_t k = unit * kPairs; k < (unit + 1) * kPairs; ++k) {
        const auto pair =
            encoding_of_pair<acc_t, Elements::kGeneral>(params.encoding.frequencies, precision, token.position, k);
        store_pair<T, source>(params, elements, token, k, elements.scaled(token.position, pair));
      }
    }
  }
};

template <class T, Source source, Arrangement arrangement, Mode mode>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks)
    forward_vectors(const ForwardParams params, const ForwardLaunch launch) {
  using Thread = VectorColumns<T, source, arrangement, mode>;
  constexpr int kBatchRows = kBatchRowsInFlight<T, arrangement, mode>;
  const int64_t batch = params.tokens.batch, step = batch_row_step();
  for (int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x; unit < launch.units;
       unit += int64_t{gridDim.y} * blockDim.x) {
    const Thread columns(params, unit);
    for (int64_t t = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; t < params.tokens.seq;
         t += int64_t{gridDim.x} * blockDim.y) {
      typename Thread::Values shared;
      bool slow = false;
      if constexpr (mode == Mode::shared && Thread::kEncoded) {
        const Position position = position_of(params, 0, t);
        slow = columns.is_far(position);
        shared = columns.encode(position);
      }
      if (!slow) {
        int64_t b = first_batch_row();
        for (; b + (kBatchRows - 1) * step < batch; b += kBatchRows * step)
          slow |= columns.template write<kBatchRows>(b, step, t, shared);
        for (; kBatchRows > 1 && b < batch; b += step) slow |= columns.template write<1>(b, step, t, shared);
      }
      if (slow) columns.fixup(PlainElements<acc_of<T>>(params), t, launch.errors);
    }
  }
}

// ---- several tokens in flight

// Tokens whose ids and rows a thread asks for before it uses the first. In halves a row is two vectors.
template <Arrangement arrangement>
constexpr int kTokensInFlight = arrangement == Arrangement::halves ? 2 : 4;

// Where a thread is on its way over its tokens: along the inner axis to its end, then on along the outer one. The
// launcher keeps both axes short enough for 32 bits.
template <Inner axis>
struct Walk {
  static constexpr bool kAlongSeq = axis == Inner::seq;

  const ForwardParams& params;
  int inner, outer;

  __device__ __forceinline__ explicit Walk(const ForwardParams& call)
      : params(call), inner(first(kAlongSeq)), outer(first(!kAlongSeq)) {
    if (outer >= length(!kAlongSeq)) inner = length(kAlongSeq);
  }

  __device__ __forceinline__ static int first(bool seq) {
    return static_cast<int>(seq ? blockIdx.x * blockDim.y + threadIdx.y : blockIdx.z * blockDim.z + threadIdx.z);
  }
  __device__ __forceinline__ static int step(bool seq) {
    return static_cast<int>(seq ? gridDim.x * blockDim.y : gridDim.z * blockDim.z);
  }
  __device__ __forceinline__ int length(bool seq) const {
    return static_cast<int>(seq ? params.tokens.seq : params.tokens.batch);
  }

  // Of the token that is `ahead` steps of the inner axis further on.
  __device__ __forceinline__ bool has(int ahead) const { return inner + ahead * step(kAlongSeq) < length(kAlongSeq); }
  __device__ __forceinline__ int64_t t(int ahead) const { return kAlongSeq ? inner + ahead * step(kAlongSeq) : outer; }
  __device__ __forceinline__ int64_t at(const TokenStrides& strides) const {
    return strides.at(kAlongSeq ? outer : inner, kAlongSeq ? inner : outer);
  }
  __device__ __forceinline__ int64_t step_of(const TokenStrides& strides) const {
    return step(kAlongSeq) * (kAlongSeq ? strides.seq : strides.batch);
  }

  // Past the last token it has none.
  __device__ __forceinline__ void advance(int count) {
    inner += count * step(kAlongSeq);
    if (inner < length(kAlongSeq)) return;
    outer += step(!kAlongSeq);
    if (outer < length(!kAlongSeq)) inner = first(kAlongSeq);
  }
};

// An id as it lies in memory. Its sign is left for later, so that nothing waits for an int32.
__device__ __forceinline__ int64_t load_id(const Integers& ids, int64_t number) {
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[number]
                      : static_cast<int64_t>(static_cast<const uint32_t*>(ids.data)[number]);
}

// Stands for a token.constant among scales.
constexpr uint32_t kConstantScale = 0x7FC0C057u;

// The rows of `count` tokens are asked for before the first encoding is made, and the ids of the next ones before the
// first store. Of tokens that are not there, the first id and row 0 are read, and nothing is written.
template <class T, Source source, Arrangement arrangement, Inner inner>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks)
    forward_tokens(const ForwardParams params, const ForwardLaunch launch) {
  using Thread = VectorColumns<T, source, arrangement, Mode::shared>;
  constexpr int count = kTokensInFlight<arrangement>;
  for (int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x; unit < launch.units;
       unit += int64_t{gridDim.y} * blockDim.x) {
    Walk<inner> next(params);
    if (!next.has(0)) return;
    int64_t ids[count] = {};
    const auto ask_for_ids = [&] {
      if (source != Source::gathered) return;
      int64_t number = next.at(params.tokens.order);
#pragma unroll
      for (int i = 0; i < count; ++i, number += next.step_of(params.tokens.order))
        ids[i] = load_id(params.ids, next.has(i) ? number : 0);
    };
    ask_for_ids();
    const Thread columns(params, unit);
    typename Thread::Values encoding;
    int64_t made_for = -1;
    bool far = false, slow = false;
    do {
      const Walk<inner> walk = next;
      float scales[count];
      Vector<T> base[count][Thread::kVectors] = {};
      int64_t place = walk.at(params.base_strides);
#pragma unroll
      for (int i = 0; i < count; ++i, place += walk.step_of(params.base_strides)) {
        const int64_t id = params.ids.is_int64 ? ids[i] : static_cast<int32_t>(ids[i]);
        auto token = token_of<source, float>(params, 0, 0, id);
        if (source == Source::dense) token.base = walk.has(i) ? place : 0;
        slow |= !token.in_range;
        scales[i] = source == Source::gathered && token.constant ? __uint_as_float(kConstantScale) : token.scale;
        columns.load(token, base[i]);
      }
      next.advance(count);
      ask_for_ids();
      Token<float> token;
      token.out = walk.at(params.out_strides);
#pragma unroll
      for (int i = 0; i < count; ++i, token.out += walk.step_of(params.out_strides)) {
        if (!walk.has(i)) break;
        if (Thread::kEncoded && (i == 0 || inner == Inner::seq) && walk.t(i) != made_for) {
          made_for = walk.t(i);
          const Position position = position_of(params, 0, made_for);
          encoding = columns.encode(position);
          far = columns.is_far(position);
          slow |= far;
        }
        token.scale = scales[i];
        if (source == Source::gathered && __float_as_uint(scales[i]) == kConstantScale) {
          token.scale = -0.0f;
          columns.store_constant(token);
        } else if (!far) {
          columns.store(PlainElements<float>(params), token, base[i], encoding);
        }
      }
    } while (next.has(0));
    if (!slow) continue;
#pragma unroll 1
    for (int64_t t = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; t < params.tokens.seq;
         t += int64_t{gridDim.x} * blockDim.y)
      columns.fixup(PlainElements<float>(params), t, launch.errors);
  }
}

// ---- dropout, padding, a scale of the encoding, fractions of positions, frequencies that are given, tables

// In fp64, 128 registers are too few for it.
template <class T, Source source, Arrangement arrangement>
__global__ void __launch_bounds__(kForwardThreads, sizeof(T) == 8 ? 1 : kForwardBlocks)
    forward_general(const ForwardParams params, const ForwardLaunch launch) {
  using Thread = VectorColumns<T, source, arrangement, Mode::shared>;
  using acc_t = acc_of<T>;
  const GeneralElements<acc_t> elements(params);
  const bool tabled = params.encoding.table.data != nullptr;
  for (int64_t unit = blockIdx.y * int64_t{blockDim.x} + threadIdx.x; unit < launch.units;
       unit += int64_t{gridDim.y} * blockDim.x) {
    const Thread columns(params, unit);
    for (int64_t t = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; t < params.tokens.seq;
         t += int64_t{gridDim.x} * blockDim.y) {
      typename Thread::Values encoding;
      bool made = false, slow = false;
      for (int64_t b = first_batch_row(); b < params.tokens.batch; b += batch_row_step()) {
        const auto token = token_of<source, acc_t, true>(params, b, t);
        Vector<T> base[Thread::kVectors] = {};
        columns.load(token, base);
        const bool far = columns.template is_far<true>(token.position);
        slow |= !token.in_range || far;
        if (far) continue;
        if (token.constant) {
          columns.store_constant(token);
          continue;
        }
        if ((Thread::kEncoded || tabled) && (!made || !params.positions.shared())) {
          if constexpr (Thread::kEncoded) encoding = columns.template encode<true>(token.position);
          else encoding = columns.from_table(token.position.whole);
          for (auto& vector : encoding.of)
            for (acc_t& value : vector) value = value * elements.factor(token.position);
          made = true;
        }
        if (Thread::kEncoded || tabled) columns.template store<true>(elements, token, base, encoding);
        else columns.template store<false>(elements, token, base, encoding);
      }
      if (slow) columns.fixup(elements, t, launch.errors);
    }
  }
}

#endif  // POSENC_KERNELS_FROM_PTX

}  // namespace posenc::cuda
