// out = scale * base + encoding, in one pass.
//
// A thread makes the encodings of a few positions in tiles, which stay in the first-level cache, adds them to all
// tokens at those positions, and goes on. A row that shares its encoding with no other token skips the tiles where its
// layout allows it (fused_row).

using cpu::kTilePairs, cpu::kTiles;

// ---- encodings

// Whether the short formulas serve a position of magnitude p. exact: two words of each frequency are enough below 2^32.
// reference: no angle is above that of the largest frequency.
POSENC_HD bool is_near(const Encoding& encoding, const Magnitude& p) {
  return encoding.precision == Precision::exact ? p.whole >> 32 == 0
                                                : static_cast<float>(p) * encoding.frequencies.largest < kShortAngle;
}

// Calls sink(i, sines and cosines of pairs first + i and on) for `count` pairs, a whole vector at a time, at a near
// position of magnitude p. The last vector may reach past the last pair: frequencies are padded.
template <class Sink>
POSENC_HD void visit_near_pairs(const Encoding& encoding, const Magnitude& p, int64_t first, int64_t count,
                                const Sink& sink) {
  const Frequencies& f = encoding.frequencies;
  if (encoding.precision == Precision::exact) {
    const UintVector p0 = splat(static_cast<uint32_t>(p.whole));
    const auto word = [&](int n, int64_t i) { return load_bytes<UintVector>(f.turns[n] + first + i); };
    if (p.fraction == 0) {
      for (int64_t i = 0; i < count; i += kLanes<float>)
        sink(i, sincos_of_phase32(phase_of_product(p0, word(0, i), word(1, i))));
    } else {
      const UintVector fraction = splat(static_cast<uint32_t>(p.fraction >> 32));
      for (int64_t i = 0; i < count; i += kLanes<float>) {
        const UintVector high = word(0, i);
        sink(i, sincos_of_phase32(phase_of_product(p0, high, word(1, i)) + phase_of_fraction(fraction, high)));
      }
    }
  } else {
    const float p32 = static_cast<float>(p);
    for (int64_t i = 0; i < count; i += kLanes<float>)
      sink(i, sincos_of_short_angle<UintVector>(load_bytes<FloatVector>(f.angular + first + i) * p32));
  }
}

// The same for frequencies that are given, of any size and sign.
template <class Sink>
POSENC_HD void visit_near_given_pairs(const Encoding& encoding, const Magnitude& p, int64_t first, int64_t count,
                                      const Sink& sink) {
  const Frequencies& f = encoding.frequencies;
  const auto word = [&](const auto* words, int64_t i) { return load_bytes<UintVector>(words + first + i); };
  const float p32 = static_cast<float>(p);
  const UintVector p0 = splat(static_cast<uint32_t>(p.whole)), low = splat(static_cast<uint32_t>(p.fraction)),
                   high = splat(static_cast<uint32_t>(p.fraction >> 32));
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    const FloatVector angular = bit_cast<FloatVector>(word(f.angular, i));
    if (encoding.precision == Precision::exact) {
      const UintVector turns = word(f.turns[0], i);
      SinCos<FloatVector> pair = sincos_of_phase32(phase_of_product(p0, turns, word(f.turns[1], i)) +
                                                   phase_of_fraction(high, low, turns, word(f.whole_turns, i)));
      pair.sin = Lane<UintVector>::flipped(pair.sin + angular, bit_cast<UintVector>(angular));
      pair.cos = pair.cos + angular;
      sink(i, pair);
    } else {
      const UintVector angle = bit_cast<UintVector>(angular * p32);
      SinCos<FloatVector> pair = sincos_of_short_angle<UintVector>(bit_cast<FloatVector>(angle & 0x7FFFFFFFu));
      pair.sin = Lane<UintVector>::flipped(pair.sin, angle);
      sink(i, pair);
    }
  }
}

// The same at any position.
template <class Sink>
POSENC_HD void visit_pairs(const Encoding& encoding, const Position& position, int64_t first, int64_t count,
                           const Sink& sink) {
  const Magnitude p = magnitude(position);
  const UintVector sign = splat(position.whole < 0 ? 0x80000000u : 0u);
  const auto with_sign = [&](int64_t i, SinCos<FloatVector> pair) {
    pair.sin = bit_cast<FloatVector>(bit_cast<UintVector>(pair.sin) ^ sign);
    sink(i, pair);
  };
  if (is_near(encoding, p)) {
    if (encoding.frequencies.given()) return visit_near_given_pairs(encoding, p, first, count, with_sign);
    return visit_near_pairs(encoding, p, first, count, with_sign);
  }
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    SinCos<FloatVector> pairs;
    for (int64_t lane = 0; lane < kLanes<float>; ++lane) {
      const auto pair =
          encoding_of_pair<float, true>(encoding.frequencies, encoding.precision, position, first + i + lane);
      pairs.sin[lane] = pair.sin, pairs.cos[lane] = pair.cos;
    }
    sink(i, pairs);
  }
}

// The exact phases of the last position, to which one step is added for the next one: the same bits as a
// multiplication, for less work. If a position does not follow the last, start() multiplies again, so any token may be
// skipped.
class RunningPhases {
 public:
  // Whether the tokens of this call follow one another and repay start().
  static bool worth_it(const ForwardParams& params, int64_t tokens) {
    return params.encoding.precision == Precision::exact && params.encoding.columns.pairs() <= kMostPairs &&
           params.positions.running && params.positions.given.data == nullptr &&
           params.positions.floats.data == nullptr && !params.tokens.sequence_first() && tokens >= kLeastTokens;
  }
  // As visit_near_pairs, for all pairs: whole vectors of them. The position is near and not negative.
  template <class Sink>
  POSENC_HD void visit(const Frequencies& frequencies, uint64_t position, int64_t pairs, const Sink& sink) {
    if (position != next_) start(frequencies, position, pairs);
    next_ = position + 1;
    constexpr int64_t kHalf = kLanes<double>;
    for (int64_t i = 0; i < pairs; i += kLanes<float>) {
      const WideVector a = load_bytes<WideVector>(phases_ + i), b = load_bytes<WideVector>(phases_ + i + kHalf);
      store_bytes<false>(phases_ + i, a + load_bytes<WideVector>(turns_ + i));
      store_bytes<false>(phases_ + i + kHalf, b + load_bytes<WideVector>(turns_ + i + kHalf));
      sink(i, sincos_of_phase32(upper_words(a, b)));
    }
  }

 private:
  void start(const Frequencies& frequencies, uint64_t position, int64_t pairs) {
    for (int64_t k = 0; k < pairs; ++k) {
      turns_[k] = static_cast<uint64_t>(frequencies.turns[0][k]) << 32 | frequencies.turns[1][k];
      phases_[k] = turns_[k] * position;
    }
  }

  static constexpr int64_t kMostPairs = 1024;  // 16 KB, a part of the first-level cache
  static constexpr int64_t kLeastTokens = 8;
  alignas(64) uint64_t phases_[kMostPairs], turns_[kMostPairs];
  uint64_t next_ = ~uint64_t{0};  // the position that phases_ are for; none is as large
};

// Where the encoding of column i of a span is kept in the buffer: in the order in which the elements are loaded. Those
// of a split type come in groups of two vectors, even columns first (vector.inl).
template <class T>
POSENC_HD int64_t kept_at(int64_t i) {
  if constexpr (!Element<T>::kSplit) return i;
  constexpr int64_t kGroup = 2 * kLanes<float>;
  const int64_t at = i % kGroup;
  return i - at + at % 2 * kLanes<float> + at / 2;
}

// Pairs side by side (step 2): pair first + i, as (sin, cos) or (cos, sin), is written to kept_at(2 * i) and
// kept_at(2 * i + 1). Whole vectors are written, so there must be room past the last pair.
template <class T>
void fill_interleaved(const Encoding& encoding, const Position& position, int64_t first, int64_t count, float* to) {
  const bool cosine_first = encoding.columns.cosine_first();
  visit_pairs(encoding, position, first, count, [&](int64_t i, const SinCos<FloatVector>& pair) {
    FloatVector low = cosine_first ? pair.cos : pair.sin, high = cosine_first ? pair.sin : pair.cos;
    if constexpr (!Element<T>::kSplit) interleave(low, high, low, high);
    store_bytes<false>(to + 2 * i, low);
    store_bytes<false>(to + 2 * i + kLanes<float>, high);
  });
}

// Sines and cosines apart (step 1): those of pair first + i are written to kept_at(i) of each buffer.
template <class T>
void fill_halves(const Encoding& encoding, const Position& position, int64_t first, int64_t count, float* sines,
                 float* cosines) {
  visit_pairs(encoding, position, first, count, [&](int64_t i, const SinCos<FloatVector>& pair) {
    store_bytes<false>(sines + i, pair.sin);
    store_bytes<false>(cosines + i, pair.cos);
  });
  if constexpr (Element<T>::kSplit) {
    for (float* half : {sines, cosines}) {
      for (int64_t i = 0; i < count; i += 2 * kLanes<float>) {
        FloatVector even, odd;
        deinterleave(load_bytes<FloatVector>(half + i), load_bytes<FloatVector>(half + i + kLanes<float>), even, odd);
        store_bytes<false>(half + i, even);
        store_bytes<false>(half + i + kLanes<float>, odd);
      }
    }
  }
}

template <class T>
void fill_interleaved(const Encoding& encoding, const Position& position, int64_t first, int64_t count, double* to) {
  const bool cosine_first = encoding.columns.cosine_first();
  for (int64_t i = 0; i < count; ++i) {
    const SinCos<double> pair =
        encoding_of_pair<double, true>(encoding.frequencies, encoding.precision, position, first + i);
    to[2 * i + cosine_first] = pair.sin;
    to[2 * i + !cosine_first] = pair.cos;
  }
}

template <class T>
void fill_halves(const Encoding& encoding, const Position& position, int64_t first, int64_t count, double* sines,
                 double* cosines) {
  for (int64_t i = 0; i < count; ++i) {
    const SinCos<double> pair =
        encoding_of_pair<double, true>(encoding.frequencies, encoding.precision, position, first + i);
    sines[i] = pair.sin;
    cosines[i] = pair.cos;
  }
}

// One position's encoding for up to kTilePairs pairs (of a table: twice as many columns), and the spans of columns that
// it covers.
template <class T>
struct Tile {
  using acc_t = typename Element<T>::acc_t;
  struct Span {
    int64_t column, count;
    const acc_t* encoding;  // null: none
  };
  alignas(64) acc_t buffer[2 * kTilePairs];
  acc_t zero = 0;
  Span spans[3];
  int64_t span_count = 0;

  void push(int64_t column, int64_t end, const acc_t* encoding) {
    if (end > column) spans[span_count++] = {column, end - column, encoding};
  }

  void fill(const Encoding& encoding, const Position& position, int64_t first) {
    if (encoding.table.data != nullptr) return fill_from_table(encoding, position.whole, 2 * first);
    const Columns& columns = encoding.columns;
    const int64_t last = std::min(first + kTilePairs, columns.pairs());
    const int64_t last_sine = std::min(last, columns.sines), last_cosine = std::min(last, columns.cosines);
    span_count = 0;
    if (!columns.encoded) {
      push(0, columns.width, nullptr);
    } else if (columns.step == 2) {
      fill_interleaved<T>(encoding, position, first, last - first, buffer);
      if (last_cosine < last) {  // a lone sine
        const int64_t at = 2 * (last_cosine - first);
        buffer[kept_at<T>(at)] = buffer[kept_at<T>(at + columns.cosine_first())];
      }
      push(2 * first, last + last_cosine, buffer);
    } else {
      fill_halves<T>(encoding, position, first, last - first, buffer, buffer + kTilePairs);
      push(columns.sine_start + first, columns.sine_start + last_sine, buffer);
      push(columns.cosine_start + first, columns.cosine_start + last_cosine, buffer + kTilePairs);
    }
    if (last == columns.pairs() && columns.has_zero_column()) push(columns.width - 1, columns.width, &zero);
    multiply(position.exists() ? encoding.scale : NAN);
  }

 private:
  void fill_from_table(const Encoding& encoding, int64_t position, int64_t column) {
    using E = Element<T>;
    const int64_t count = std::min(2 * kTilePairs, encoding.columns.width - column);
    const T* row = static_cast<const T*>(encoding.table.data) + position * encoding.table.row_stride + column;
    span_count = 0;
    if constexpr (std::is_same_v<T, acc_t>)
      if (encoding.scale == 1) return push(column, column + count, row);
    push(column, column + count, buffer);
    constexpr int64_t kStep = kVectorBytes / static_cast<int64_t>(sizeof(T));
    int64_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      typename E::Vector values[kVectorsPerStore<T>];
      E::load(row + i, values);
      for (int64_t v = 0; v < kVectorsPerStore<T>; ++v) store_bytes<false>(buffer + i + v * kLanes<acc_t>, values[v]);
    }
    for (; i < count; ++i) buffer[kept_at<T>(i)] = E::to_acc(row[i]);
    multiply(encoding.scale);
  }

  void multiply(double scale) {
    const acc_t factor = static_cast<acc_t>(scale);
    if (factor != 1)
      for (acc_t& value : buffer) value *= factor;
  }
};

// ---- dropout

// The random bits of a row's columns first .. first + count - 1, for a token and a seed.
class DrawnBits {
 public:
  static constexpr int64_t kMostColumns = 2 * kTilePairs;

  POSENC_HD void draw(uint64_t seed, int64_t token, int64_t first, int64_t count) {
    first_ = first % kColumnsPerDraw;
    const int64_t draws = (first_ + count + kColumnsPerDraw - 1) / kColumnsPerDraw;
    int64_t n = 0;
    for (; n + kLanes<float> < draws; n += 2 * kLanes<float>) draw_vectors<2>(seed, token, first / kColumnsPerDraw, n);
    if (n < draws) draw_vectors<1>(seed, token, first / kColumnsPerDraw, n);
  }

  const uint16_t* begin() const { return bits_ + first_; }

 private:
  // Draws n and on, of those that begin with number `begin`.
  template <int vectors>
  POSENC_HD void draw_vectors(uint64_t seed, int64_t token, int64_t begin, int64_t n) {
    UintVector lane;
    for (int64_t i = 0; i < kLanes<float>; ++i) lane[i] = static_cast<uint32_t>(i);
    UintVector drawn[vectors][4];
    for (int64_t v = 0; v < vectors; ++v) {
      drawn[v][0] = lane + static_cast<uint32_t>(begin + n + v * kLanes<float>);
      drawn[v][1] = UintVector{};
      drawn[v][2] = splat(static_cast<uint32_t>(token));
      drawn[v][3] = splat(static_cast<uint32_t>(token >> 32));
    }
    philox(drawn, seed);
    uint16_t* to = bits_ + kColumnsPerDraw * n;
    for (const UintVector(&word)[4] : drawn) {
      // The words of one draw side by side are its halves in the order of the columns.
      FloatVector even[2] = {}, odd[2] = {}, all[2] = {};
      interleave(bit_cast<FloatVector>(word[0]), bit_cast<FloatVector>(word[2]), even[0], even[1]);
      interleave(bit_cast<FloatVector>(word[1]), bit_cast<FloatVector>(word[3]), odd[0], odd[1]);
      for (int64_t half = 0; half < 2; ++half) {
        interleave(even[half], odd[half], all[0], all[1]);
        for (const FloatVector& part : all) {
          store_bytes<false>(to, part);
          to += 2 * kLanes<float>;
        }
      }
    }
  }

  // The last vector of draws may reach past the last column.
  alignas(64) uint16_t bits_[kMostColumns + kColumnsPerDraw + kColumnsPerDraw * kLanes<float>];
  int64_t first_ = 0;
};

// The same of one column.
POSENC_HD uint16_t drawn_bits(uint64_t seed, int64_t token, int64_t column) {
  uint32_t draw[1][4] = {{static_cast<uint32_t>(column / kColumnsPerDraw), 0, static_cast<uint32_t>(token),
                          static_cast<uint32_t>(token >> 32)}};
  philox(draw, seed);
  const int64_t half = column % kColumnsPerDraw;
  return static_cast<uint16_t>(draw[0][half / 2] >> 16 * (half % 2));
}

// What dropout makes of elements, by their bits.
struct NotDropped {};
struct Dropper {
  const uint16_t* bits;
  uint32_t threshold;
  double factor;

  template <class acc_t>
  POSENC_HD acc_t one(int64_t i, acc_t value) const {
    return bits[i] < threshold ? acc_t{0} : value * static_cast<acc_t>(factor);
  }

  // The vectors of one store. Those of a split type hold even and odd columns.
  template <class T>
  POSENC_HD void vectors(int64_t i, FloatVector (&values)[kVectorsPerStore<T>]) const {
    for (int64_t v = 0; v < kVectorsPerStore<T>; ++v) {
      UintVector drawn;
      if constexpr (Element<T>::kSplit) {
        drawn = load_bytes<UintVector>(bits + i);
        drawn = v == 0 ? drawn & 0xFFFFu : drawn >> 16;
      } else {
        drawn = __builtin_convertvector(load_bytes<HalfUintVector>(bits + i + v * kLanes<float>), UintVector);
      }
      // Signed, which AVX2 has an instruction for.
      values[v] = bit_cast<IntVector>(drawn) < static_cast<int32_t>(threshold) ? FloatVector{}
                                                                               : values[v] * static_cast<float>(factor);
    }
  }
};

// ---- rows

// A later token's row lies anywhere in the table, or apart from this one (a block of columns, another row of the
// batch), where the processor does not foresee it. So it is prefetched while this one is worked on, a piece with every
// store. Asking for a whole row at once would fill the queue that streaming stores need too.
constexpr int64_t kPrefetchTokens = 3;

POSENC_HD void prefetch_to_l2(const void* line) { __builtin_prefetch(line, 0, 2); }

// One span of a row. `later` is the same span of the row to prefetch, where columns are contiguous.
//
// Not inlined: inside the loops over tokens g++ runs out of registers here, and rows that come from memory take 1.2
// times as long with AVX-512.
template <class T, Source source, bool stream, bool encoded, class Drop>
__attribute__((noinline)) void write_span(const T* base, int64_t column_stride, const T* later,
                                          const typename Element<T>::acc_t* encoding, T* out, int64_t count,
                                          Token<typename Element<T>::acc_t> token, Drop drop) {
  using E = Element<T>;
  using Vector = typename E::Vector;
  using acc_t = typename E::acc_t;
  constexpr bool drops = std::is_same_v<Drop, Dropper>;
  constexpr int64_t kStep = kVectorBytes / static_cast<int64_t>(sizeof(T));  // elements of one whole-vector store
  const auto one = [&](int64_t i) {
    acc_t value = 0, added = 0;
    if constexpr (source != Source::none) value = E::to_acc(base[i * column_stride]);
    if constexpr (encoded) added = encoding[kept_at<T>(i)];
    value = epilogue<source, encoded>(value, added, token);
    if constexpr (drops) value = drop.one(i, value);
    out[i] = E::from_acc(value);
  };
  int64_t i = 0;
  if constexpr (stream && E::kSplit) {
    // Encodings are kept in groups from the start of the span, so its vectors cannot be moved to an aligned address.
    if (!stream_aligned(out))
      return write_span<T, source, false, encoded>(base, column_stride, later, encoding, out, count, token, drop);
  } else if constexpr (stream) {
    for (; i < count && !stream_aligned(out + i); ++i) one(i);
  }
  // fp64 with dropout is written one by one: nobody trains in it.
  const bool vectors = (source == Source::none || column_stride == 1) && !(drops && sizeof(T) == 8);
  const int64_t whole = vectors ? count : 0;
  for (; i + kStep <= whole; i += kStep) {
    if constexpr (source != Source::none) prefetch_to_l2(later + i);
    Vector values[kVectorsPerStore<T>] = {};
    if constexpr (source != Source::none) E::load(base + i, values);
    for (int64_t v = 0; v < kVectorsPerStore<T>; ++v) {
      Vector added = {};
      if constexpr (encoded) added = load_bytes<Vector>(encoding + i + v * kLanes<typename E::acc_t>);
      values[v] = epilogue<source, encoded>(values[v], added, token);
    }
    if constexpr (drops && sizeof(T) != 8) drop.template vectors<T>(i, values);
    E::template store<stream>(out + i, values);
  }
  for (; i < count; ++i) one(i);
}

// A row, or a part of one, of a constant token.
template <class T, bool stream>
POSENC_HD void write_constant(T* out, int64_t count, typename Element<T>::acc_t value) {
  using E = Element<T>;
  typename E::Vector values[kVectorsPerStore<T>];
  for (auto& vector : values) vector = value - typename E::Vector{};  // x - 0 is x, also where x is -0
  constexpr int64_t kStep = kVectorBytes / static_cast<int64_t>(sizeof(T));
  int64_t i = 0;
  if (stream)
    for (; i < count && !stream_aligned(out + i); ++i) out[i] = E::from_acc(value);
  for (; i + kStep <= count; i += kStep) E::template store<stream>(out + i, values);
  for (; i < count; ++i) out[i] = E::from_acc(value);
}

// A whole row without the buffer: encodings go from the registers into the sum. `visit` calls what it is given as
// visit_pairs does. Sines and cosines are apart (`halves`) or side by side, sines first.
template <class T, Source source, bool stream, bool halves, class Visit>
POSENC_HD void fused_row(const Visit& visit, const Columns& columns, const T* base, const T* later, T* out,
                         Token<float> token) {
  using E = Element<T>;
  constexpr int64_t kVectors = kVectorsPerStore<T>;
  // Inlined always: in bf16 g++ would call it for every vector, which takes 1.3 times as long.
  const auto write = [&](int64_t at, const FloatVector* encoding) __attribute__((always_inline)) {
    FloatVector values[kVectors] = {};
    if constexpr (source != Source::none) prefetch_to_l2(later + at);
    if constexpr (source != Source::none) E::load(base + at, values);
    for (int64_t n = 0; n < kVectors; ++n) values[n] = epilogue<source, true>(values[n], encoding[n], token);
    E::template store<stream>(out + at, values);
  };
  SinCos<FloatVector> last = {};
  visit([&](int64_t i, const SinCos<FloatVector>& pair) __attribute__((always_inline)) {
    if constexpr (halves) {
      FloatVector sines[2] = {pair.sin}, cosines[2] = {pair.cos};
      if constexpr (kVectors == 2) {
        const bool first = i / kLanes<float> % 2 == 0;
        const SinCos<FloatVector> before = last;
        last = pair;
        if (first) return;
        i -= kLanes<float>;
        if constexpr (E::kSplit) {
          deinterleave(before.sin, pair.sin, sines[0], sines[1]);
          deinterleave(before.cos, pair.cos, cosines[0], cosines[1]);
        } else {
          sines[0] = before.sin, sines[1] = pair.sin, cosines[0] = before.cos, cosines[1] = pair.cos;
        }
      }
      write(columns.sine_start + i, sines);
      write(columns.cosine_start + i, cosines);
    } else {
      FloatVector encoding[2] = {pair.sin, pair.cos};
      if constexpr (!E::kSplit) interleave(pair.sin, pair.cos, encoding[0], encoding[1]);
      for (int64_t v = 0; v < 2; v += kVectors) write(2 * i + v * kLanes<float>, encoding + v);
    }
  });
}

// ---- tokens

// The tokens in the order in which they are worked on: in blocks of positions, each block in memory order. If one block
// holds all of seq, that is memory order.
struct TokenLoop {
  int64_t batch, seq, block;
  bool sequence_first;
  // The part of the tokens that is gone through: rows first_row .. last_row, of those from first_t on and up to last_t.
  int64_t first_row = 0, last_row, first_t = 0, last_t;
  int64_t first = 0, last = 0;  // the block's positions
  int64_t b = 0, t = 0;

  TokenLoop(const Tokens& tokens, int64_t block_size)
      : batch(tokens.batch),
        seq(tokens.seq),
        block(block_size),
        sequence_first(tokens.sequence_first()),
        last_row(batch - 1),
        last_t(seq) {}

  // All tokens, from number `at` in this order on.
  static TokenLoop from(const Tokens& tokens, int64_t block_size, int64_t at) {
    TokenLoop loop(tokens, block_size);
    const int64_t batch = loop.batch, block = loop.block;
    loop.first = at / (block * batch) * block;
    loop.last = std::min(loop.first + block, loop.seq);
    at %= block * batch;
    const int64_t width = loop.last - loop.first;
    loop.b = loop.sequence_first ? at % batch : at / width;
    loop.t = loop.first + (loop.sequence_first ? at / batch : at % width);
    return loop;
  }
  // The tokens that lie from `begin` to `end` in memory: at least one of every position, batch first.
  static TokenLoop part(const Tokens& tokens, int64_t block_size, int64_t begin, int64_t end) {
    TokenLoop loop(tokens, block_size);
    loop.first_row = begin / loop.seq, loop.first_t = begin % loop.seq;
    loop.last_row = (end - 1) / loop.seq, loop.last_t = (end - 1) % loop.seq + 1;
    loop.begin_block();
    return loop;
  }

  // Tokens from this one to the end of its block.
  int64_t left() const {
    if (sequence_first) return (last - t) * batch - b;
    const int64_t cut = b == last_row ? 0 : std::clamp<int64_t>(last - last_t, 0, last - first);
    return end_of_row() - t + (last_row - b) * (last - first) - cut;
  }
  void next() {  // once a token, so without a division
    if (sequence_first) {
      if (++b < batch) return;
      b = 0;
      if (++t < last) return;
    } else {
      if (++t < end_of_row()) return;
      t = first;
      if (++b < last_row || (b == last_row && t < last_t)) return;
    }
    begin_block();
  }

 private:
  int64_t end_of_row() const { return b == last_row ? std::min(last, last_t) : last; }
  void begin_block() {
    first = last;
    last = std::min(first + block, seq);
    b = first_row + (last <= first_t);
    t = b == first_row ? std::max(first, first_t) : first;
  }
};

// The same for tokens that are grouped.
struct GroupedLoop {
  const cpu::GroupedToken* token;
  int64_t b = token->b, t = token->t;
  void next() {
    ++token;
    b = token->b, t = token->t;
  }
};

// Tokens are looked up kMost at a time, before the work on them, so that the rows to prefetch are known.
template <class T, Source source>
struct Lookup {
  static constexpr int64_t kMost = 64;
  using acc_t = typename Element<T>::acc_t;
  Token<acc_t> tokens[kMost + kPrefetchTokens];
  int64_t t[kMost];

  // Looks up the next `count` tokens, moves the loop past them, and looks up those to prefetch after them. `left`:
  // tokens until the end of this thread's work.
  template <class Loop>
  void collect(const ForwardParams& call, Loop& loop, int64_t count, int64_t left) {
    const ForwardParams params = call;  // local, so that it stays in registers while tokens are stored
    for (int64_t i = 0; i < count; ++i, loop.next()) {
      tokens[i] = token_of<source, acc_t, true>(params, loop.b, loop.t);
      t[i] = loop.t;
    }
    Loop ahead = loop;
    for (int64_t i = count; i < count + kPrefetchTokens; ++i) {
      tokens[i] = tokens[i - 1];
      if (i >= left) continue;
      tokens[i] = token_of<source, acc_t, true>(params, ahead.b, ahead.t);
      ahead.next();
    }
  }
};

template <class T, Source source, bool stream>
class ForwardLoop {
 public:
  using acc_t = typename Element<T>::acc_t;

  explicit ForwardLoop(const ForwardParams& params) : params_(params) {}

  // Makes an encoding for each of these tokens, in memory order.
  void write_own(int64_t begin, int64_t end) {
    const Columns& columns = params_.encoding.columns;
    halves_ = columns.step == 1;
    fused_ = sizeof(acc_t) == sizeof(float) && columns.encoded && 2 * columns.cosines == columns.width &&
             (halves_ || !columns.cosine_first()) &&
             columns.sines % (halves_ ? kVectorsPerStore<T> * kLanes<float> : kLanes<float>) == 0 &&
             params_.column_stride == 1 && params_.encoding.scale == 1 && params_.dropout.seed == nullptr &&
             !params_.encoding.frequencies.given();
    running_ = fused_ && RunningPhases::worth_it(params_, end - begin);
    TokenLoop loop = TokenLoop::from(params_.tokens, params_.tokens.seq, begin);
    for (int64_t at = begin; at < end; at += Lookup<T, source>::kMost) {
      const int64_t count = std::min(Lookup<T, source>::kMost, end - at);
      lookup_.collect(params_, loop, count, end - at);
      for (int64_t i = 0; i < count; ++i) {
        const Token<acc_t>& token = lookup_.tokens[i];
        const Position& position = token.position;
        if (token.constant || !token.encoded) {
          write_without_encoding(i);
        } else if (!fused_ || !token.embedded || position.whole < 0 ||
                   !is_near(params_.encoding, magnitude(position))) {
          for (int64_t tile = 0; tile < tiles_per_row(); tile += kTiles) {
            const int64_t some = std::min(kTiles, tiles_per_row() - tile);
            fill_tiles(position, tile, some, 0);
            write_tiles(i, 0, some);
          }
        } else if (stream && !stream_aligned(out_of(i))) {
          write_fused<false>(i);
        } else {
          write_fused<stream>(i);
        }
      }
    }
  }

  // Makes an encoding for each block of these tokens in which a position occurs.
  void write_grouped(const cpu::GroupedToken* tokens, int64_t begin, int64_t end) {
    const int64_t in_pass = std::min(tiles_per_row(), kTiles), block_size = cpu::positions_per_block(params_.encoding);
    for (int64_t at = begin; at < end;) {
      int64_t block_end = at;
      while (block_end < end && tokens[block_end].position / block_size == tokens[at].position / block_size)
        ++block_end;
      for (int64_t tile = 0; tile < tiles_per_row(); tile += in_pass) {
        const int64_t some = std::min(in_pass, tiles_per_row() - tile);
        uint32_t made = 0;  // a bit for each position
        GroupedLoop loop{tokens + at};
        for (int64_t token = at; token < block_end; token += Lookup<T, source>::kMost) {
          const int64_t count = std::min(Lookup<T, source>::kMost, block_end - token);
          lookup_.collect(params_, loop, count, end - token);
          for (int64_t i = 0; i < count; ++i) {
            if (lookup_.tokens[i].constant || !lookup_.tokens[i].encoded) {
              if (tile == 0) write_without_encoding(i);
              continue;
            }
            const int64_t n = tokens[token + i].position % block_size;
            if ((made >> n & 1) == 0) fill_tiles(lookup_.tokens[i].position, tile, some, n * some);
            made |= uint32_t{1} << n;
            write_tiles(i, n * some, some);
          }
        }
      }
      at = block_end;
    }
  }

  // Makes an encoding for each position and adds it to all rows of the batch, or to those of this part of memory.
  void write_shared(int64_t begin, int64_t end, bool of_memory) {
    const int64_t in_pass = std::min(tiles_per_row(), kTiles), block_size = cpu::positions_per_block(params_.encoding);
    TokenLoop loop = of_memory ? TokenLoop::part(params_.tokens, block_size, begin, end)
                               : TokenLoop::from(params_.tokens, block_size, begin);
    for (int64_t at = begin; at < end;) {
      const TokenLoop block = loop;
      const int64_t block_end = std::min(end, at + block.left());
      for (int64_t tile = 0; tile < tiles_per_row(); tile += in_pass) {
        const int64_t some = std::min(in_pass, tiles_per_row() - tile);
        for (int64_t t = block.first; t < block.last; ++t)
          fill_tiles(position_of<true>(params_, 0, t), tile, some, (t - block.first) * some);
        loop = block;
        for (int64_t token = at; token < block_end; token += Lookup<T, source>::kMost) {
          const int64_t count = std::min(Lookup<T, source>::kMost, block_end - token);
          lookup_.collect(params_, loop, count, end - token);
          for (int64_t i = 0; i < count; ++i) write_tiles(i, (lookup_.t[i] - block.first) * some, some);
        }
      }
      at = block_end;
    }
  }

 private:
  int64_t tiles_per_row() const { return cpu::tiles_per_row(params_.encoding); }
  const T* base_of(int64_t i) const {
    return source == Source::none ? nullptr : static_cast<const T*>(params_.base) + lookup_.tokens[i].base;
  }
  T* out_of(int64_t i) const { return static_cast<T*>(params_.out) + lookup_.tokens[i].out; }

  // Tiles tile .. tile + count - 1 of a position, kept from `to` on.
  void fill_tiles(const Position& position, int64_t tile, int64_t count, int64_t to) {
    for (int64_t n = 0; n < count; ++n) tiles_[to + n].fill(params_.encoding, position, (tile + n) * kTilePairs);
  }

  void write_without_encoding(int64_t i) {
    const int64_t width = params_.encoding.columns.width;
    if (lookup_.tokens[i].constant) write_constant<T, stream>(out_of(i), width, lookup_.tokens[i].scale);
    else write_columns(i, {0, width, nullptr});
  }

  void write_tiles(int64_t i, int64_t first, int64_t count) {
    const Token<acc_t>& token = lookup_.tokens[i];
    for (const Tile<T>* tile = tiles_ + first; tile < tiles_ + first + count; ++tile) {
      for (int64_t s = 0; s < tile->span_count; ++s) {
        typename Tile<T>::Span span = tile->spans[s];
        if (!token.encoded) span.encoding = nullptr;
        if (token.constant) write_constant<T, stream>(out_of(i) + span.column, span.count, token.scale);
        else write_columns(i, span);
      }
    }
  }

  void write_columns(int64_t i, const typename Tile<T>::Span& span) {
    if (params_.dropout.seed != nullptr) write_dropped(i, span);
    else write(i, span, NotDropped{});
  }

  // A part at a time, whose random bits stay in the cache.
  __attribute__((noinline)) void write_dropped(int64_t i, const typename Tile<T>::Span& span) {
    const Dropout& dropout = params_.dropout;
    for (int64_t at = 0; at < span.count; at += DrawnBits::kMostColumns) {
      const int64_t count = std::min(DrawnBits::kMostColumns, span.count - at);
      drawn_.draw(static_cast<uint64_t>(*dropout.seed), lookup_.tokens[i].number,
                  dropout.first_column + span.column + at, count);
      write(i, {span.column + at, count, span.encoding ? span.encoding + at : nullptr},
            Dropper{drawn_.begin(), dropout.threshold, dropout.factor});
    }
  }

  template <class Drop>
  POSENC_HD void write(int64_t i, const typename Tile<T>::Span& span, Drop drop) const {
    const Token<acc_t>& token = lookup_.tokens[i];
    const int64_t stride = source == Source::none ? 0 : params_.column_stride;
    const int64_t column = source == Source::none ? 0 : span.column;
    const auto call = [&](auto of, auto encoded) {
      write_span<T, of.value, stream, encoded.value>(base_of(i) + column * stride, stride,
                                                     base_of(i + kPrefetchTokens) + column, span.encoding,
                                                     out_of(i) + span.column, span.count, token, drop);
    };
    using Base = std::integral_constant<Source, source>;
    if (source == Source::gathered && !token.embedded)
      return call(std::integral_constant<Source, Source::none>{}, std::true_type{});
    span.encoding ? call(Base{}, std::true_type{}) : call(Base{}, std::false_type{});
  }

  template <bool stream_row>
  void write_fused(int64_t i) {
    if constexpr (sizeof(acc_t) == sizeof(float)) {
      const Magnitude position = magnitude(lookup_.tokens[i].position);
      const Columns& columns = params_.encoding.columns;
      const int64_t pairs = columns.pairs();
      const auto write = [&](const auto& visit) {
        const auto row = [&](auto halves) {
          fused_row<T, source, stream_row, halves.value>(visit, columns, base_of(i), base_of(i + kPrefetchTokens),
                                                         out_of(i), lookup_.tokens[i]);
        };
        halves_ ? row(std::true_type{}) : row(std::false_type{});
      };
      if (running_) {
        write([&](const auto& sink) { phases_.visit(params_.encoding.frequencies, position.whole, pairs, sink); });
      } else {
        write([&](const auto& sink) { visit_near_pairs(params_.encoding, position, 0, pairs, sink); });
      }
    }
  }

  const ForwardParams& params_;
  Lookup<T, source> lookup_;
  Tile<T> tiles_[kTiles];
  DrawnBits drawn_;
  bool fused_ = false, halves_ = false, running_ = false;
  RunningPhases phases_;
};

void forward(int64_t begin, int64_t end, void* context) {
  const cpu::ForwardCall& call = *static_cast<const cpu::ForwardCall*>(context);
  const ForwardParams& params = call.params;
  const auto run = [&](auto element, auto source, auto stream) {
    ForwardLoop<decltype(element), source.value, stream.value> loop(params);
    // What does not bypass the cache is split in memory order over the threads, as the op that reads it will be: then
    // its lines are in the cache of the thread that reads them.
    const bool of_memory = !stream.value && !params.tokens.sequence_first();
    const bool shared = params.positions.shared() && params.tokens.batch > 1;
    if (call.grouped != nullptr) {
      loop.write_grouped(call.grouped, begin, end);
    } else if (shared && !(of_memory && end - begin <= params.tokens.seq)) {
      loop.write_shared(begin, end, of_memory);
    } else {
      loop.write_own(begin, end);
    }
    if (stream.value) end_stream();
  };
  const auto with_source = [&](auto element, auto source) {
    call.stream ? run(element, source, std::true_type{}) : run(element, source, std::false_type{});
  };
  with_element(params.dtype, [&](auto element) {
    switch (params.source) {
      case Source::gathered: return with_source(element, std::integral_constant<Source, Source::gathered>{});
      case Source::dense: return with_source(element, std::integral_constant<Source, Source::dense>{});
      case Source::none: return with_source(element, std::integral_constant<Source, Source::none>{});
    }
  });
}
