// out = token_scale * base + waves, in one pass.
//
// Waves are made for one position and one tile of pairs at a time, into a buffer of a few kilobytes that stays in the
// first-level cache, and are added to every token at that position before the next tile.

constexpr int64_t kTilePairs = 256;

POSENC_HD uint64_t magnitude(int64_t position) {
  return position < 0 ? uint64_t{0} - static_cast<uint64_t>(position) : static_cast<uint64_t>(position);
}

// Whether every wave of a position is above 2^-100, so that no sum with one is subnormal: the other term is either as
// large, and the sum a multiple of the last bit of the smaller, or it does not matter. So it is for reference away from
// position 0: an angle is above 2^-90, and what is left of it after quarter turns, if any, above 2^-47.
POSENC_HD bool sums_are_normal(const Waves& waves, float p32) {
  const Frequencies& f = waves.frequencies;
  return waves.precision == Precision::reference && p32 >= 1.0f && p32 < kShortAngle && f.pairs > 0 &&
         f.angular[f.pairs - 1] >= 0x1p-90f;  // the lowest
}

// Calls sink(i, waves of pairs first + i and on, sums_are_normal) for whole vectors of `count` pairs (frequencies have
// room past the last), at the magnitude of the position: the sines of a negative one are still to be negated.
template <class Sink>
POSENC_HD void visit_waves(const Waves& waves, int64_t position, int64_t first, int64_t count, const Sink& sink) {
  const uint64_t p = magnitude(position);
  const float p32 = static_cast<float>(p);
  const auto word = [&](int n, int64_t i) { return load_bytes<UintVector>(waves.frequencies.turns[n] + first + i); };
  const auto angle = [&](int64_t i) { return load_bytes<FloatVector>(waves.frequencies.angular + first + i) * p32; };
  const auto visit_all = [&](auto normal, const auto& wave) {
    for (int64_t i = 0; i < count; i += kLanes<float>) sink(i, wave(i), normal);
  };
  const auto visit = [&](const auto& wave) { visit_all(std::false_type{}, wave); };
  if (waves.precision == Precision::exact) {
    const UintVector p0 = splat(static_cast<uint32_t>(p)), p1 = splat(static_cast<uint32_t>(p >> 32));
    if (p >> 32 == 0) {
      visit([&](int64_t i) { return sincos_of_phase32(phase_of_product(p0, word(0, i), word(1, i))); });
    } else {
      visit([&](int64_t i) { return sincos_of_phase32(exact_phase32(p0, p1, word(0, i), word(1, i), word(2, i))); });
    }
  } else if (p32 < kShortAngle) {  // no frequency is above 1, so no angle above the position
    const auto wave = [&](int64_t i) { return sincos_of_short_angle<UintVector>(angle(i)); };
    sums_are_normal(waves, p32) ? visit_all(std::true_type{}, wave) : visit(wave);
  } else {
    visit([&](int64_t i) {
      const FloatVector angles = angle(i);
      SinCos<FloatVector> waves_here;
      for (int64_t lane = 0; lane < kLanes<float>; ++lane) {
        const SinCos<float> wave = sincos_of_angle(angles[lane]);
        waves_here.sin[lane] = wave.sin, waves_here.cos[lane] = wave.cos;
      }
      return waves_here;
    });
  }
}

// The exact waves of one position after the other. Their phases are kept, and what a step adds is added to them: the
// same bits as by multiplication, for a third of the work.
class RunningWaves {
 public:
  // For `count` positions from `first` on and these many pairs (a number of whole vectors); false if that is not for
  // here.
  bool start(const Waves& waves, int64_t first, int64_t count, int64_t pairs) {
    constexpr int64_t kLeastSteps = 8;  // for the multiplications at the start
    if (waves.precision != Precision::exact || pairs > kMostPairs || count < kLeastSteps) return false;
    if (first < 0 || first > (int64_t{1} << 32) - count) return false;
    for (int64_t k = 0; k < pairs; ++k) {
      turns_[k] = static_cast<uint64_t>(waves.frequencies.turns[0][k]) << 32 | waves.frequencies.turns[1][k];
      phases_[k] = turns_[k] * static_cast<uint64_t>(first);
    }
    return true;
  }

  // As visit_waves, for all pairs of the next position.
  template <class Sink>
  POSENC_HD void visit(int64_t pairs, const Sink& sink) {
    constexpr int64_t kWide = kLanes<double>;
    for (int64_t i = 0; i < pairs; i += kLanes<float>) {
      const WideVector a = load_bytes<WideVector>(phases_ + i), b = load_bytes<WideVector>(phases_ + i + kWide);
      store_bytes<false>(phases_ + i, a + load_bytes<WideVector>(turns_ + i));
      store_bytes<false>(phases_ + i + kWide, b + load_bytes<WideVector>(turns_ + i + kWide));
      sink(i, sincos_of_phase32(upper_words(a, b)), std::false_type{});
    }
  }

 private:
  static constexpr int64_t kMostPairs = 1024;  // 16 KB, a part of the first-level cache
  alignas(64) uint64_t phases_[kMostPairs], turns_[kMostPairs];
};

// Where the wave of the i-th column of a stretch is kept: in the order in which the columns' elements are loaded.
template <class T>
POSENC_HD int64_t wave_place(int64_t i) {
  if constexpr (!Element<T>::kSplit) return i;
  constexpr int64_t kGroup = 2 * kLanes<float>;
  const int64_t at = i % kGroup;
  return i - at + at % 2 * kLanes<float> + at / 2;
}

// Sines to sines[i], cosines to cosines[i], or, interleaved, to sines[2 * i] and the place after it; all places as by
// wave_place, and whole vectors: there must be room past the last.
template <class T>
void fill_waves(const Waves& waves, int64_t position, int64_t first, int64_t count, float* sines, float* cosines) {
  constexpr int64_t kLength = kLanes<float>;
  const bool interleaved = waves.layout.kind == LayoutKind::interleaved;
  const UintVector sign = splat(position < 0 ? 0x80000000u : 0u);
  visit_waves(waves, position, first, count, [&](int64_t i, SinCos<FloatVector> pair, auto) {
    pair.sin = bit_cast<FloatVector>(bit_cast<UintVector>(pair.sin) ^ sign);
    if (!interleaved) {
      store_bytes<false>(sines + i, pair.sin);
      store_bytes<false>(cosines + i, pair.cos);
    } else if (Element<T>::kSplit) {
      store_bytes<false>(sines + 2 * i, pair.sin);
      store_bytes<false>(sines + 2 * i + kLength, pair.cos);
    } else {
      FloatVector low, high;
      interleave(pair.sin, pair.cos, low, high);
      store_bytes<false>(sines + 2 * i, low);
      store_bytes<false>(sines + 2 * i + kLength, high);
    }
  });
  if (interleaved || !Element<T>::kSplit) return;
  for (float* half : {sines, cosines}) {
    for (int64_t i = 0; i < count; i += 2 * kLength) {
      FloatVector even, odd;
      deinterleave(load_bytes<FloatVector>(half + i), load_bytes<FloatVector>(half + i + kLength), even, odd);
      store_bytes<false>(half + i, even);
      store_bytes<false>(half + i + kLength, odd);
    }
  }
}

template <class T>
void fill_waves(const Waves& waves, int64_t position, int64_t first, int64_t count, double* sines, double* cosines) {
  const bool interleave = waves.layout.kind == LayoutKind::interleaved;
  const int64_t step = interleave ? 2 : 1;
  const uint64_t p = magnitude(position);
  const float p32 = static_cast<float>(p);
  const Frequencies& f = waves.frequencies;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t k = first + i;
    const uint64_t phase = waves.precision == Precision::exact
                               ? exact_phase64(p, {{f.turns[0][k], f.turns[1][k], f.turns[2][k], f.turns[3][k]}})
                               : wide_angle_phase64(p32 * f.angular[k]);
    const SinCos<double> wave = sincos_of_phase64(phase);
    sines[i * step] = position < 0 ? -wave.sin : wave.sin;
    (interleave ? sines + 1 : cosines)[i * step] = wave.cos;
  }
}

// The columns that one tile of waves covers: up to a stretch of sines (or of interleaved pairs), one of cosines, and
// the zero column of an odd width. Without waves, one stretch that has none.
template <class T>
struct WaveTile {
  using Real = typename Element<T>::Real;
  struct Stretch {
    int64_t column, count;
    const Real* waves;
    bool normal;  // as sums_are_normal says
  };
  alignas(64) Real buffer[2 * kTilePairs];
  Real zero = 0;
  Stretch stretches[3];
  int64_t stretch_count = 0;

  void push(int64_t column, int64_t end, const Real* waves, bool normal) {
    if (end > column) stretches[stretch_count++] = {column, end - column, waves, normal};
  }

  void fill(const Waves& waves, int64_t position, int64_t first) {
    const Layout& layout = waves.layout;
    if (layout.kind == LayoutKind::none) {
      stretches[0] = {0, layout.width, nullptr, false};
      stretch_count = 1;
      return;
    }
    const int64_t last = std::min(first + kTilePairs, layout.pairs());
    stretch_count = 0;
    const bool normal = sums_are_normal(waves, static_cast<float>(magnitude(position)));
    fill_waves<T>(waves, position, first, last - first, buffer, buffer + kTilePairs);
    if (layout.kind == LayoutKind::interleaved) {
      push(2 * first, std::min(2 * last, layout.sines + layout.cosines), buffer, normal);
    } else {
      push(layout.sine_start() + first, layout.sine_start() + last, buffer, normal);
      push(layout.cosine_start() + first, layout.cosine_start() + std::min(last, layout.cosines), buffer + kTilePairs,
           normal);
    }
    if (last == layout.pairs() && layout.zero_column() >= 0)
      push(layout.zero_column(), layout.zero_column() + 1, &zero, false);
  }
};

template <class T, Source source>
POSENC_HD T combined(const T* base, const typename Element<T>::Real* wave, typename Element<T>::Real scale) {
  using Real = typename Element<T>::Real;
  if constexpr (source == Source::none) return Element<T>::put(wave ? *wave : Real{0});
  const Real term = source == Source::gathered ? Element<T>::get(*base) * scale : Element<T>::get(*base);
  return Element<T>::put(wave ? term + *wave : term);
}

// Rows of a table lie anywhere, so the row of a later token is asked for, line by line, while this one is worked on: a
// burst for a whole row would fill the queue that the streaming stores need too.
constexpr int64_t kPrefetchTokens = 3;

POSENC_HD void prefetch_to_l2(const void* line) { __builtin_prefetch(line, 0, 2); }

// What is left to do with a vector of the base term.
template <class T, Source source, bool with_waves>
POSENC_HD void finish(typename Element<T>::Vector& value, const typename Element<T>::Real* waves,
                      typename Element<T>::Real scale) {
  using Vector = typename Element<T>::Vector;
  if constexpr (source == Source::gathered) value = value * scale;
  if constexpr (with_waves) {
    const Vector wave = load_bytes<Vector>(waves);
    value = source == Source::none ? wave : value + wave;
  }
}

// `next` is the base term of that later token.
template <class T, Source source, bool stream, bool with_waves, bool normal>
POSENC_HD void combine_vectors(const T* base, const T* next, const typename Element<T>::Real* waves, T* out,
                               int64_t count, typename Element<T>::Real scale) {
  using E = Element<T>;
  using Real = typename E::Real;
  using Vector = typename E::Vector;
  constexpr int64_t kStep = kVectorBytes / static_cast<int64_t>(sizeof(T));  // one store of a whole vector
  const auto one = [&](int64_t i) {
    out[i] = combined<T, source>(base + i, waves ? waves + wave_place<T>(i) : nullptr, scale);
  };
  int64_t i = 0;
  if constexpr (stream && E::kSplit) {
    // Groups of waves begin with the stretch, so their vectors are stored where they fall.
    if (!stream_aligned(out))
      return combine_vectors<T, source, false, with_waves, normal>(base, next, waves, out, count, scale);
  } else if constexpr (stream) {
    for (; i < count && !stream_aligned(out + i); ++i) one(i);
  }
  for (; i + kStep <= count; i += kStep) {
    if constexpr (source == Source::gathered) prefetch_to_l2(next + i);
    if constexpr (sizeof(T) == 2) {
      Vector first = {}, second = {};
      if constexpr (source != Source::none) E::load(base + i, first, second);
      finish<T, source, with_waves>(first, waves + i, scale);
      finish<T, source, with_waves>(second, waves + i + kLanes<Real>, scale);
      E::template store<stream, normal>(out + i, first, second);
    } else {
      Vector value = {};
      if constexpr (source != Source::none) value = E::load(base + i);
      finish<T, source, with_waves>(value, waves + i, scale);
      E::template store<stream>(out + i, value);
    }
  }
  for (; i < count; ++i) one(i);
}

template <class T, Source source, bool stream>
void combine(const T* base, const T* next, int64_t column_stride, const WaveTile<T>& tile, T* out,
             typename Element<T>::Real scale) {
  for (int64_t s = 0; s < tile.stretch_count; ++s) {
    const auto& stretch = tile.stretches[s];
    T* to = out + stretch.column;
    if (source == Source::none || column_stride == 1) {
      const T* from = source == Source::none ? nullptr : base + stretch.column;
      const T* later = source == Source::gathered ? next + stretch.column : nullptr;
      if (!stretch.waves) {
        combine_vectors<T, source, stream, false, false>(from, later, nullptr, to, stretch.count, scale);
      } else if (Element<T>::kSplit && stretch.normal) {
        combine_vectors<T, source, stream, true, true>(from, later, stretch.waves, to, stretch.count, scale);
      } else {
        combine_vectors<T, source, stream, true, false>(from, later, stretch.waves, to, stretch.count, scale);
      }
    } else {
      for (int64_t i = 0; i < stretch.count; ++i)
        to[i] = combined<T, source>(base + (stretch.column + i) * column_stride,
                                    stretch.waves ? stretch.waves + wave_place<T>(i) : nullptr, scale);
    }
  }
}

// A whole row whose waves nobody else needs, without the buffer: they go from the registers into the sum. `visit` calls
// what it is given as visit_waves does.
template <class T, Source source, bool stream, class Visit>
POSENC_HD void fused_row(const Visit& visit, const T* base, const T* next, T* out, float scale) {
  using E = Element<T>;
  const auto add = [&](FloatVector& value, FloatVector wave) {
    if constexpr (source == Source::gathered) value = value * scale;
    value = source == Source::none ? wave : value + wave;
  };
  visit([&](int64_t i, const SinCos<FloatVector>& pair, auto normal) {
    const int64_t at = 2 * i, after = at + kLanes<float>;
    FloatVector low = pair.sin, high = pair.cos;
    if constexpr (!E::kSplit) interleave(pair.sin, pair.cos, low, high);
    FloatVector first = {}, second = {};
    if constexpr (source == Source::gathered) prefetch_to_l2(next + at);
    if constexpr (sizeof(T) == 2) {
      if constexpr (source != Source::none) E::load(base + at, first, second);
      add(first, low);
      add(second, high);
      E::template store<stream, normal.value>(out + at, first, second);
    } else {
      if constexpr (source == Source::gathered) prefetch_to_l2(next + after);
      if constexpr (source != Source::none) first = E::load(base + at), second = E::load(base + after);
      add(first, low);
      add(second, high);
      E::template store<stream>(out + at, first);
      E::template store<stream>(out + after, second);
    }
  });
}

// What fused_row asks of a call: whole vectors, sines and cosines side by side.
template <class T>
bool can_fuse_rows(const ForwardParams& params) {
  const Layout& layout = params.waves.layout;
  return sizeof(typename Element<T>::Real) == sizeof(float) && layout.kind == LayoutKind::interleaved &&
         layout.width % (2 * kLanes<float>) == 0 && params.column_stride == 1;
}

// Where a token's base term and output lie.
template <class T, Source source>
struct TokenRows {
  const ForwardParams& params;

  const T* base(int64_t outer, int64_t seq, int64_t inner) const {
    if (source == Source::none) return nullptr;
    const T* start = static_cast<const T*>(params.base);
    if (source == Source::dense) return start + params.base_strides.at(outer, seq, inner);
    const Grid& grid = params.grid;
    return start + params.ids[(outer * grid.seq + seq) * grid.inner + inner] * params.row_stride;
  }
  T* out(int64_t outer, int64_t seq, int64_t inner) const {
    return static_cast<T*>(params.out) + params.out_strides.at(outer, seq, inner);
  }
  int64_t position(int64_t outer, int64_t seq, int64_t inner) const {
    const Waves& waves = params.waves;
    const int64_t place =
        waves.positions.data == nullptr ? seq : waves.positions[waves.position_strides.at(outer, seq, inner)];
    return static_cast<int64_t>(static_cast<uint64_t>(waves.offset) +
                                static_cast<uint64_t>(place));  // wraps, never undefined
  }
};

// Tokens in the order (block of seq, outer, seq in the block, inner). With one block for all of seq that is memory
// order.
struct Walk {
  Grid grid;
  int64_t block;
  int64_t first = 0, last = 0;  // the block: positions [first, last); only the last one may be smaller
  int64_t outer = 0, seq = 0, inner = 0;

  Walk(const Grid& tokens, int64_t block_size, int64_t at) : grid(tokens), block(block_size) {
    const int64_t full = block * grid.outer * grid.inner;
    first = at / full * block;
    last = std::min(first + block, grid.seq);
    at %= full;
    const int64_t in_row = (last - first) * grid.inner;
    outer = at / in_row;
    seq = first + at % in_row / grid.inner;
    inner = at % grid.inner;
  }
  // Tokens from this one to the end of its block.
  int64_t left() const { return ((grid.outer - outer) * (last - first) - (seq - first)) * grid.inner - inner; }
  void next() {  // once a token: no division here
    if (++inner < grid.inner) return;
    inner = 0;
    if (++seq < last) return;
    if (++outer == grid.outer) {
      outer = 0;
      first = last;
      last = std::min(first + block, grid.seq);
    }
    seq = first;
  }
};

// Tokens on their way: first where each of them lies, then the work, so that neither is in the way of the other.
template <class T, Source source>
struct Batch {
  static constexpr int64_t kMost = 64;
  struct Row {
    const T* base;
    T* out;
    int64_t seq;
  };
  Row rows[kMost + kPrefetchTokens];

  // The next `count` tokens of the walk, which moves on past them, and the base terms of some that come after; there
  // are `left` tokens in all.
  void collect(const TokenRows<T, source>& tokens, Walk& walk, int64_t count, int64_t left) {
    for (int64_t i = 0; i < count; ++i, walk.next()) {
      rows[i].base = tokens.base(walk.outer, walk.seq, walk.inner);
      rows[i].out = tokens.out(walk.outer, walk.seq, walk.inner);
      rows[i].seq = walk.seq;
    }
    Walk ahead = walk;
    for (int64_t i = count; i < count + kPrefetchTokens; ++i) {
      rows[i].base = rows[i - 1].base;
      if (i >= left) continue;
      rows[i].base = tokens.base(ahead.outer, ahead.seq, ahead.inner);
      ahead.next();
    }
  }
  const T* later(int64_t i) const { return rows[i + kPrefetchTokens].base; }
};

// Tiles that a thread keeps at a time: 16 KB of fp32 waves. As many positions as they hold whole rows for form a block,
// so that each batch row is written for several positions on end before the next one is turned to.
constexpr int64_t kTiles = 8;

template <class T, Source source, bool stream>
class ForwardWork {
 public:
  using Real = typename Element<T>::Real;

  explicit ForwardWork(const ForwardParams& params) : params_(params), tokens_{params} {}

  // Tokens whose waves are all different.
  void each(int64_t begin, int64_t end) {
    Walk walk(params_.grid, params_.grid.seq, begin), places = walk;
    fusable_ = can_fuse_rows<T>(params_);
    // With one token at each position they follow one another.
    const Waves& waves = params_.waves;
    running_ = fusable_ && waves.positions.data == nullptr && params_.grid.seq == params_.grid.tokens() &&
               running_waves_.start(waves, tokens_.position(0, begin, 0), end - begin, waves.layout.width / 2);
    for (int64_t at = begin; at < end;) {
      const int64_t count = std::min(Batch<T, source>::kMost, end - at);
      batch_.collect(tokens_, walk, count, end - at);
      for (int64_t i = 0; i < count; ++i, places.next())
        one(batch_.rows[i], batch_.later(i), tokens_.position(places.outer, places.seq, places.inner));
      at += count;
    }
  }

  // Tokens that share the waves of their position.
  void blocks(int64_t begin, int64_t end) {
    const int64_t in_pass = std::min(chunks(), kTiles);
    Walk walk(params_.grid, kTiles / in_pass, begin);
    for (int64_t at = begin; at < end;) {
      const Walk group = walk;
      const int64_t group_end = std::min(end, at + group.left());
      for (int64_t chunk = 0; chunk < chunks(); chunk += in_pass) {
        const int64_t count = std::min(in_pass, chunks() - chunk);
        for (int64_t seq = group.first; seq < group.last; ++seq)
          fill(tokens_.position(group.outer, seq, group.inner), chunk, count, (seq - group.first) * count);
        walk = group;
        for (int64_t token = at; token < group_end; token += Batch<T, source>::kMost) {
          const int64_t size = std::min(Batch<T, source>::kMost, group_end - token);
          batch_.collect(tokens_, walk, size, end - token);
          for (int64_t i = 0; i < size; ++i)
            combine_tiles(batch_.rows[i], batch_.later(i), (batch_.rows[i].seq - group.first) * count, count);
        }
      }
      at = group_end;
    }
  }

 private:
  int64_t chunks() const { return std::max<int64_t>(1, (params_.waves.layout.pairs() + kTilePairs - 1) / kTilePairs); }

  // Tiles first .. first + count - 1: the chunks of a position's waves from `chunk` on.
  void fill(int64_t position, int64_t chunk, int64_t count, int64_t first) {
    for (int64_t c = 0; c < count; ++c) tiles_[first + c].fill(params_.waves, position, (chunk + c) * kTilePairs);
  }

  void combine_tiles(const typename Batch<T, source>::Row& row, const T* later, int64_t first, int64_t count) const {
    const Real scale = static_cast<Real>(params_.token_scale);
    for (int64_t c = 0; c < count; ++c)
      combine<T, source, stream>(row.base, later, params_.column_stride, tiles_[first + c], row.out, scale);
  }

  void one(const typename Batch<T, source>::Row& row, const T* later, int64_t position) {
    if constexpr (sizeof(Real) == sizeof(float)) {
      const float scale = static_cast<float>(params_.token_scale);
      const int64_t pairs = params_.waves.layout.width / 2;
      if (running_) {
        const auto visit = [&](const auto& sink) { running_waves_.visit(pairs, sink); };
        if (!stream || stream_aligned(row.out))
          return fused_row<T, source, stream>(visit, row.base, later, row.out, scale);
        return fused_row<T, source, false>(visit, row.base, later, row.out, scale);
      }
      if (fusable_ && position >= 0 && (!stream || stream_aligned(row.out))) {
        const auto visit = [&](const auto& sink) { visit_waves(params_.waves, position, 0, pairs, sink); };
        return fused_row<T, source, stream>(visit, row.base, later, row.out, scale);
      }
    }
    for (int64_t chunk = 0; chunk < chunks(); chunk += kTiles) {
      const int64_t count = std::min(kTiles, chunks() - chunk);
      fill(position, chunk, count, 0);
      combine_tiles(row, later, 0, count);
    }
  }

  const ForwardParams& params_;
  const TokenRows<T, source> tokens_;
  Batch<T, source> batch_;
  WaveTile<T> tiles_[kTiles];
  bool fusable_ = false, running_ = false;
  RunningWaves running_waves_;
};

template <class T, Source source, bool stream>
void forward_tokens(const ForwardParams& params, int64_t begin, int64_t end) {
  ForwardWork<T, source, stream> work(params);
  // Each position's waves serve several tokens, or one alone.
  if (params.waves.shared() && params.grid.outer * params.grid.inner > 1) {
    work.blocks(begin, end);
  } else {
    work.each(begin, end);
  }
  if (stream) end_stream();
}

template <class T, Source source>
void forward_source(const ForwardParams& params, bool stream, int64_t begin, int64_t end) {
  if (stream) return forward_tokens<T, source, true>(params, begin, end);
  return forward_tokens<T, source, false>(params, begin, end);
}

template <class T>
void forward_typed(const ForwardParams& params, bool stream, int64_t begin, int64_t end) {
  switch (params.source) {
    case Source::gathered: return forward_source<T, Source::gathered>(params, stream, begin, end);
    case Source::dense: return forward_source<T, Source::dense>(params, stream, begin, end);
    case Source::none: return forward_source<T, Source::none>(params, stream, begin, end);
  }
}

void forward(const ForwardParams& params, bool stream, int64_t begin, int64_t end) {
  switch (params.dtype) {
    case Dtype::float32: return forward_typed<float>(params, stream, begin, end);
    case Dtype::float64: return forward_typed<double>(params, stream, begin, end);
    case Dtype::bfloat16: return forward_typed<BFloat16>(params, stream, begin, end);
    case Dtype::float16: return forward_typed<Float16>(params, stream, begin, end);
  }
}
