// Row sums of the weight gradient.
//
// A row's tokens are added in token order in pieces of kSumPiece, and the pieces in order: one fixed order, whatever
// the number of threads. Columns are independent, so a strip of them is kept in registers while the tokens go by.

constexpr int64_t kStripVectors = 8;
constexpr int64_t kPrefetchGradients = 4;

template <class T>
struct RunSum {
  using E = Element<T>;
  using Real = typename E::Real;
  using Vector = typename E::Vector;
  static constexpr int64_t kStep = kLanes<Real>;
  static constexpr int64_t kFewest = sizeof(T) == 2 ? 2 : 1;  // vectors in one store

  const T* grad;
  int64_t token_stride, column_stride;
  const int64_t* order;
  int64_t begin, end;
  Real scale;

  template <int64_t count>
  POSENC_HD static void load(const T* row, Vector (&values)[count]) {
    for (int64_t v = 0; v < count; v += kFewest) {
      if constexpr (kFewest == 2) {
        E::load(row + v * kStep, values[v], values[v + 1]);
      } else {
        values[v] = E::load(row + v * kStep);
      }
    }
  }

  // Sum of `count` vectors of columns from `column` on, over the tokens [first, last).
  template <int64_t count>
  POSENC_HD void piece(int64_t column, int64_t first, int64_t last, Vector (&sum)[count]) const {
    const T* row = grad + order[first] * token_stride + column;
    load<count>(row, sum);
    for (int64_t at = first + 1; at < last; ++at) {
      row = grad + order[at] * token_stride + column;
      if (at + kPrefetchGradients < end) {
        const T* ahead = grad + order[at + kPrefetchGradients] * token_stride + column;
        for (int64_t v = 0; v < count; ++v) __builtin_prefetch(ahead + v * kStep);
      }
      Vector values[count];
      load<count>(row, values);
      for (int64_t v = 0; v < count; ++v) sum[v] += values[v];
    }
  }

  template <int64_t count, bool stream>
  POSENC_HD void strip(int64_t column, T* out) const {
    Vector total[count];
    piece<count>(column, begin, std::min(begin + kSumPiece, end), total);
    for (int64_t at = begin + kSumPiece; at < end; at += kSumPiece) {
      Vector sum[count];
      piece<count>(column, at, std::min(at + kSumPiece, end), sum);
      for (int64_t v = 0; v < count; ++v) total[v] += sum[v];
    }
    if constexpr (sizeof(T) == 2) {
      for (int64_t v = 0; v < count; v += 2)
        E::template store<stream>(out + column + v * kStep, total[v] * scale, total[v + 1] * scale);
    } else {
      for (int64_t v = 0; v < count; ++v) E::template store<stream>(out + column + v * kStep, total[v] * scale);
    }
  }

  void column(int64_t column, T* out) const {
    const auto value = [&](int64_t at) { return E::get(grad[order[at] * token_stride + column * column_stride]); };
    Real total = 0;
    for (int64_t first = begin; first < end; first += kSumPiece) {
      Real sum = value(first);
      for (int64_t at = first + 1; at < std::min(first + kSumPiece, end); ++at) sum += value(at);
      total = first == begin ? sum : total + sum;
    }
    out[column] = E::put(total * scale);
  }

  template <bool stream>
  void columns(int64_t first, int64_t last, T* out) const {
    int64_t at = first;
    if (column_stride == 1) {
      if (stream)
        for (; at < last && !stream_aligned(out + at); ++at) column(at, out);
      for (; at + kStripVectors * kStep <= last; at += kStripVectors * kStep) strip<kStripVectors, stream>(at, out);
      for (; at + kFewest * kStep <= last; at += kFewest * kStep) strip<kFewest, stream>(at, out);
    }
    for (; at < last; ++at) column(at, out);
  }
};

template <class T>
void sum_run_typed(const BackwardParams& params, bool stream, int64_t run, int64_t first_column, int64_t last_column) {
  using Real = typename Element<T>::Real;
  const int64_t begin = params.runs.start[run], end = params.runs.start[run + 1];
  const Real scale = static_cast<Real>(params.token_scale);
  const RunSum<T> sum{static_cast<const T*>(params.grad),
                      params.token_stride,
                      params.column_stride,
                      params.runs.order,
                      begin,
                      end,
                      params.scale_by_frequency ? scale / static_cast<Real>(end - begin) : scale};
  T* out = static_cast<T*>(params.out) + params.runs.row[run] * params.width;
  if (stream) return sum.template columns<true>(first_column, last_column, out);
  return sum.template columns<false>(first_column, last_column, out);
}

void sum_run(const BackwardParams& params, bool stream, int64_t run, int64_t first_column, int64_t last_column) {
  switch (params.dtype) {
    case Dtype::float32: return sum_run_typed<float>(params, stream, run, first_column, last_column);
    case Dtype::float64: return sum_run_typed<double>(params, stream, run, first_column, last_column);
    case Dtype::bfloat16: return sum_run_typed<BFloat16>(params, stream, run, first_column, last_column);
    case Dtype::float16: return sum_run_typed<Float16>(params, stream, run, first_column, last_column);
  }
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
