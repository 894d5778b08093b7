// Row sums of the weight gradient, in the order that params.h fixes (kSumChunk).
//
// Columns are independent, so a strip of them is kept in registers while the tokens go by.

constexpr int64_t kStripVectors = 8;
constexpr int64_t kPrefetchGradients = 4;

// The sum of one segment; where it drops, of what dropout left of each gradient.
template <class T, bool drops>
struct SegmentSum {
  using E = Element<T>;
  using acc_t = typename E::acc_t;
  using Vector = typename E::Vector;
  static constexpr int64_t kFewest = kVectorsPerStore<T>;
  static constexpr int64_t kStep = kFewest * kLanes<acc_t>;  // columns of one store

  const T* grad;
  int64_t token_stride, column_stride;
  const int64_t* order;
  int64_t begin, end;
  acc_t scale;
  Dropout dropout;
  uint64_t seed;

  // A store's worth of columns of the gradient of token order[at].
  POSENC_HD void load(int64_t at, int64_t column, Vector (&values)[kFewest]) const {
    E::load(grad + order[at] * token_stride + column, values);
  }

  // Sums of `stores` stores' worth of columns from `column` on, over the tokens [first, last).
  template <int64_t stores>
  POSENC_HD void chunk(int64_t column, int64_t first, int64_t last, Vector (&sums)[stores][kFewest]) const {
    DrawnBits drawn;
    draw<stores>(drawn, first, column);
    for (int64_t s = 0; s < stores; ++s) {
      load(first, column + s * kStep, sums[s]);
      drop(drawn, s * kStep, sums[s]);
    }
    for (int64_t at = first + 1; at < last; ++at) {
      if (at + kPrefetchGradients < end) {
        const T* ahead = grad + order[at + kPrefetchGradients] * token_stride + column;
        for (int64_t s = 0; s < stores * kFewest; ++s) __builtin_prefetch(ahead + s * kLanes<acc_t>);
      }
      draw<stores>(drawn, at, column);
      for (int64_t s = 0; s < stores; ++s) {
        Vector values[kFewest];
        load(at, column + s * kStep, values);
        drop(drawn, s * kStep, values);
        for (int64_t v = 0; v < kFewest; ++v) sums[s][v] += values[v];
      }
    }
  }

  // The random bits of these columns of token order[at].
  template <int64_t stores>
  POSENC_HD void draw(DrawnBits& drawn, int64_t at, int64_t column) const {
    if constexpr (drops) drawn.draw(seed, order[at], dropout.first_column + column, stores * kStep);
  }
  POSENC_HD void drop(const DrawnBits& drawn, int64_t i, Vector (&values)[kFewest]) const {
    if constexpr (drops) Dropper{drawn.begin(), dropout.threshold, dropout.factor}.template vectors<T>(i, values);
  }

  template <int64_t stores, bool stream>
  POSENC_HD void strip(int64_t column, T* out) const {
    Vector total[stores][kFewest];
    chunk<stores>(column, begin, std::min(begin + kSumChunk, end), total);
    for (int64_t at = begin + kSumChunk; at < end; at += kSumChunk) {
      Vector sums[stores][kFewest];
      chunk<stores>(column, at, std::min(at + kSumChunk, end), sums);
      for (int64_t s = 0; s < stores; ++s)
        for (int64_t v = 0; v < kFewest; ++v) total[s][v] += sums[s][v];
    }
    for (int64_t s = 0; s < stores; ++s) {
      for (Vector& sum : total[s]) sum *= scale;
      E::template store<stream>(out + column + s * kStep, total[s]);
    }
  }

  void one_column(int64_t column, T* out) const {
    const auto value = [&](int64_t at) {
      const acc_t gradient = E::to_acc(grad[order[at] * token_stride + column * column_stride]);
      if constexpr (!drops) return gradient;
      const uint16_t bits = drawn_bits(seed, order[at], dropout.first_column + column);
      return Dropper{&bits, dropout.threshold, dropout.factor}.one(0, gradient);
    };
    acc_t total = 0;
    for (int64_t first = begin; first < end; first += kSumChunk) {
      acc_t sum = value(first);
      for (int64_t at = first + 1; at < std::min(first + kSumChunk, end); ++at) sum += value(at);
      total = first == begin ? sum : total + sum;
    }
    out[column] = E::from_acc(total * scale);
  }

  template <bool stream>
  void columns(int64_t first, int64_t last, T* out) const {
    constexpr int64_t kStores = kStripVectors / kFewest;
    int64_t at = first;
    if constexpr (!drops || sizeof(T) != 8) {  // as in write_span
      if (column_stride == 1) {
        if (stream)
          for (; at < last && !stream_aligned(out + at); ++at) one_column(at, out);
        for (; at + kStores * kStep <= last; at += kStores * kStep) strip<kStores, stream>(at, out);
        for (; at + kStep <= last; at += kStep) strip<1, stream>(at, out);
      }
    }
    for (; at < last; ++at) one_column(at, out);
  }
};

void sum_segment(const BackwardParams& params, bool stream, int64_t segment, int64_t first_column,
                 int64_t last_column) {
  with_element(params.dtype, [&](auto element) {
    using T = decltype(element);
    using acc_t = typename Element<T>::acc_t;
    const int64_t begin = params.segments.start[segment], end = params.segments.start[segment + 1];
    acc_t scale = static_cast<acc_t>(params.token_scale);
    if (params.scale_by_frequency) scale = scale / static_cast<acc_t>(end - begin);
    T* out = static_cast<T*>(params.out) + params.segments.row[segment] * params.width;
    const auto run = [&](auto drops) {
      const SegmentSum<T, drops.value> sum{static_cast<const T*>(params.grad),
                                           params.token_stride,
                                           params.column_stride,
                                           params.segments.order,
                                           begin,
                                           end,
                                           scale,
                                           params.dropout,
                                           drops.value ? static_cast<uint64_t>(*params.dropout.seed) : 0};
      stream ? sum.template columns<true>(first_column, last_column, out)
             : sum.template columns<false>(first_column, last_column, out);
    };
    params.dropout.seed != nullptr ? run(std::true_type{}) : run(std::false_type{});
  });
}

void fill_zero(void* begin, int64_t bytes, bool stream) {
  char* at = static_cast<char*>(begin);
  char* const end = at + bytes;
  if (stream) {
    char* const aligned = at + (-reinterpret_cast<uintptr_t>(at) & (kVectorBytes - 1));
    if (aligned + kVectorBytes <= end) {
      std::memset(at, 0, aligned - at);
      for (at = aligned; at + kVectorBytes <= end; at += kVectorBytes) store_bytes<true>(at, FloatVector{});
    }
  }
  std::memset(at, 0, end - at);
}
