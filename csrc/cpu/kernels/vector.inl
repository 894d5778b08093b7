// Fixed-width vectors of the instruction set in force, and how each element type enters and leaves them.
//
// An element type T computes in acc_t: it is widened on load and rounded once on store. A vector holds kVectorBytes of
// acc_t. A 16-bit type is loaded and stored two vectors at a time, so that every access is a full vector. Those of
// bfloat16 are split: even elements in the first vector, odd ones in the second. A bfloat16 is the upper half of a
// float, so then no element changes its place in the register.

constexpr int64_t kVectorBytes = POSENC_VECTOR_BYTES;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class acc_t>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(acc_t));
template <class T>
constexpr int64_t kVectorsPerStore = sizeof(T) == 2 ? 2 : 1;

typedef float FloatVector __attribute__((vector_size(POSENC_VECTOR_BYTES)));
typedef double DoubleVector __attribute__((vector_size(POSENC_VECTOR_BYTES)));
typedef uint32_t UintVector __attribute__((vector_size(POSENC_VECTOR_BYTES)));
typedef uint64_t WideVector __attribute__((vector_size(POSENC_VECTOR_BYTES)));
typedef uint16_t HalfUintVector __attribute__((vector_size(POSENC_VECTOR_BYTES / 2)));

typedef int32_t IntVector __attribute__((vector_size(POSENC_VECTOR_BYTES)));

template <class V>
POSENC_HD V load_bytes(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

// `to` is aligned to sizeof(V) when stream is set: the value goes to memory without being read into the cache first.
template <bool stream, class V>
POSENC_HD void store_bytes(void* to, V value) {
#if defined(__x86_64__)
  if constexpr (stream) {
    static_assert(sizeof(V) == kVectorBytes, "streaming stores are whole vectors");
#if POSENC_VECTOR_BYTES == 64
    return _mm512_stream_si512(static_cast<__m512i*>(to), bit_cast<__m512i>(value));
#elif POSENC_VECTOR_BYTES == 32
    return _mm256_stream_si256(static_cast<__m256i*>(to), bit_cast<__m256i>(value));
#else
    return _mm_stream_si128(static_cast<__m128i*>(to), bit_cast<__m128i>(value));
#endif
  }
#endif
  std::memcpy(to, &value, sizeof(V));
}

// ---- what sinusoid.h asks of a vector of phases
// ----------------------------------------------------------------------

POSENC_HD UintVector splat(uint32_t value) { return UintVector{} + value; }

}  // namespace

template <>
struct Lane<UintVector> {
  using Float = FloatVector;
  POSENC_HD static FloatVector fused(FloatVector a, FloatVector b, FloatVector c) {
#if POSENC_VECTOR_BYTES == 64
    return bit_cast<FloatVector>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif POSENC_VECTOR_BYTES == 32
    return bit_cast<FloatVector>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#else
    FloatVector result;
    for (int64_t i = 0; i < kLanes<float>; ++i) result[i] = posenc::fused(a[i], b[i], c[i]);
    return result;
#endif
  }

  POSENC_HD static UintVector high_product(UintVector a, UintVector b) {
#if POSENC_VECTOR_BYTES == 64
    const __m512i x = bit_cast<__m512i>(a), y = bit_cast<__m512i>(b);
    const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(x, y), 32);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(y, 32));
    return bit_cast<UintVector>(_mm512_mask_blend_epi32(__mmask16{0xAAAA}, even, odd));
#elif POSENC_VECTOR_BYTES == 32
    const __m256i x = bit_cast<__m256i>(a), y = bit_cast<__m256i>(b);
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(x, y), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
    return bit_cast<UintVector>(_mm256_blend_epi32(even, odd, 0xAA));
#else
    UintVector result;
    for (int64_t i = 0; i < kLanes<float>; ++i) result[i] = posenc::high_product(a[i], b[i]);
    return result;
#endif
  }
  POSENC_HD static FloatVector flipped(FloatVector x, UintVector bits) {
#if POSENC_VECTOR_BYTES == 64
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    constexpr int kXorAnd = 0xF0 ^ (0xCC & 0xAA);  // x ^ (bits & sign)
    return bit_cast<FloatVector>(
        _mm512_ternarylogic_epi32(bit_cast<__m512i>(x), bit_cast<__m512i>(bits), sign, kXorAnd));
#else
    return bit_cast<FloatVector>(bit_cast<UintVector>(x) ^ (bits & 0x80000000u));
#endif
  }
  POSENC_HD static SinCos<FloatVector> turned(FloatVector sin, FloatVector cos, UintVector bits) {
#if POSENC_VECTOR_BYTES == 64
    const __mmask16 odd = _mm512_test_epi32_mask(bit_cast<__m512i>(bits), _mm512_set1_epi32(0x40000000));
    const __m512i s = bit_cast<__m512i>(sin), c = bit_cast<__m512i>(cos), sign = _mm512_set1_epi32(INT32_MIN);
    return {bit_cast<FloatVector>(_mm512_mask_mov_epi32(s, odd, c)),
            bit_cast<FloatVector>(_mm512_mask_xor_epi32(c, odd, s, sign))};
#else
    const auto odd = (bits & 0x40000000u) != 0u;
    return {odd ? cos : sin, odd ? -sin : cos};
#endif
  }
  POSENC_HD static FloatVector splat(float value) { return FloatVector{} + value; }
  POSENC_HD static FloatVector signed_to_float(UintVector value) {
    return __builtin_convertvector(bit_cast<IntVector>(value), FloatVector);
  }
};

namespace {

// (a0, b0, a1, b1, ...) as two vectors.
POSENC_HD void interleave(FloatVector a, FloatVector b, FloatVector& first, FloatVector& second) {
#if POSENC_VECTOR_BYTES == 64
  const __m512 x = bit_cast<__m512>(a), y = bit_cast<__m512>(b);
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  first = bit_cast<FloatVector>(_mm512_permutex2var_ps(x, low, y));
  second = bit_cast<FloatVector>(_mm512_permutex2var_ps(x, high, y));
#elif POSENC_VECTOR_BYTES == 32
  const __m256 low = _mm256_unpacklo_ps(bit_cast<__m256>(a), bit_cast<__m256>(b));
  const __m256 high = _mm256_unpackhi_ps(bit_cast<__m256>(a), bit_cast<__m256>(b));
  first = bit_cast<FloatVector>(_mm256_permute2f128_ps(low, high, 0x20));
  second = bit_cast<FloatVector>(_mm256_permute2f128_ps(low, high, 0x31));
#else
  for (int64_t i = 0; i < kLanes<float> / 2; ++i) {
    first[2 * i] = a[i], first[2 * i + 1] = b[i];
    second[2 * i] = a[i + kLanes<float> / 2], second[2 * i + 1] = b[i + kLanes<float> / 2];
  }
#endif
}

// (a0, a1, ...), (b0, ...) as (a0, a2, ..., b0, b2, ...) and the elements between them.
POSENC_HD void deinterleave(FloatVector a, FloatVector b, FloatVector& even, FloatVector& odd) {
#if POSENC_VECTOR_BYTES == 64
  const __m512 x = bit_cast<__m512>(a), y = bit_cast<__m512>(b);
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  even = bit_cast<FloatVector>(_mm512_permutex2var_ps(x, evens, y));
  odd = bit_cast<FloatVector>(_mm512_permutex2var_ps(x, odds, y));
#elif POSENC_VECTOR_BYTES == 32
  // Within halves of 128 bits, and then the quarters in order.
  const __m256 x = bit_cast<__m256>(a), y = bit_cast<__m256>(b);
  const auto in_order = [](__m256 v) { return _mm256_permute4x64_pd(bit_cast<__m256d>(v), _MM_SHUFFLE(3, 1, 2, 0)); };
  even = bit_cast<FloatVector>(in_order(_mm256_shuffle_ps(x, y, _MM_SHUFFLE(2, 0, 2, 0))));
  odd = bit_cast<FloatVector>(in_order(_mm256_shuffle_ps(x, y, _MM_SHUFFLE(3, 1, 3, 1))));
#else
  for (int64_t i = 0; i < kLanes<float> / 2; ++i) {
    even[i] = a[2 * i], odd[i] = a[2 * i + 1];
    even[i + kLanes<float> / 2] = b[2 * i], odd[i + kLanes<float> / 2] = b[2 * i + 1];
  }
#endif
}

// The upper words of two vectors of 64-bit numbers.
POSENC_HD UintVector upper_words(WideVector a, WideVector b) {
#if POSENC_VECTOR_BYTES == 64
  const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return bit_cast<UintVector>(_mm512_permutex2var_epi32(bit_cast<__m512i>(a), odds, bit_cast<__m512i>(b)));
#elif POSENC_VECTOR_BYTES == 32
  const __m256i by_halves =
      _mm256_castps_si256(_mm256_shuffle_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), _MM_SHUFFLE(3, 1, 3, 1)));
  return bit_cast<UintVector>(_mm256_permute4x64_epi64(by_halves, _MM_SHUFFLE(3, 1, 2, 0)));
#else
  UintVector result = {};
  for (int64_t i = 0; i < kLanes<double>; ++i) {
    result[i] = static_cast<uint32_t>(a[i] >> 32);
    result[i + kLanes<double>] = static_cast<uint32_t>(b[i] >> 32);
  }
  return result;
#endif
}

// ---- element types
// ---------------------------------------------------------------------------------------------------

POSENC_HD UintVector join(HalfUintVector first, HalfUintVector second) {
#if POSENC_VECTOR_BYTES == 64
  return bit_cast<UintVector>(
      _mm512_inserti64x4(_mm512_castsi256_si512(bit_cast<__m256i>(first)), bit_cast<__m256i>(second), 1));
#elif POSENC_VECTOR_BYTES == 32
  return bit_cast<UintVector>(_mm256_set_m128i(bit_cast<__m128i>(second), bit_cast<__m128i>(first)));
#else
  const HalfUintVector both[2] = {first, second};
  return load_bytes<UintVector>(both);
#endif
}

// IEEE half precision by integer arithmetic, equal to the hardware's conversions.
POSENC_HD float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // infinity, or a NaN made quiet
    return bit_cast<float>(sign | 0x7F800000u | (magnitude << 13) | (magnitude > 0x7C00u ? 0x400000u : 0u));
  }
  // A subnormal half is a count of 2^-24; its bits are not taken for those of a (subnormal) float, which may be
  // flushed.
  const uint32_t bits = magnitude < 0x400u ? bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f)
                                           : (magnitude << 13) + (112u << 23);
  return bit_cast<float>(sign | bits);
}

POSENC_HD uint16_t half_of_float(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 2^16 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 rounds at 2^-24, the step of subnormal halves
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);  // to nearest even; may carry to infinity
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Rounding to nearest even; a NaN keeps its upper half and is quiet, as the AVX-512 instruction does it.
POSENC_HD uint16_t bfloat_of_float(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

template <class T>
struct Element;

// fp32 and fp64: acc_t is the type itself.
template <class T, class V>
struct WideElement {
  using acc_t = T;
  using Vector = V;
  static constexpr bool kSplit = false;
  POSENC_HD static acc_t to_acc(T value) { return value; }
  POSENC_HD static T from_acc(acc_t value) { return value; }
  POSENC_HD static void load(const T* from, Vector (&values)[1]) { values[0] = load_bytes<Vector>(from); }
  template <bool stream>
  POSENC_HD static void store(T* to, const Vector (&values)[1]) {
    store_bytes<stream>(to, values[0]);
  }
};

template <>
struct Element<float> : WideElement<float, FloatVector> {};

template <>
struct Element<double> : WideElement<double, DoubleVector> {};

template <>
struct Element<BFloat16> {
  using acc_t = float;
  using Vector = FloatVector;
  static constexpr bool kSplit = true;
  POSENC_HD static acc_t to_acc(BFloat16 value) { return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
  POSENC_HD static BFloat16 from_acc(acc_t value) { return {bfloat_of_float(value)}; }
  POSENC_HD static void load(const BFloat16* from, Vector (&values)[2]) {
    const UintVector both = load_bytes<UintVector>(from);
    values[0] = bit_cast<Vector>(both << 16);
    values[1] = bit_cast<Vector>(both & 0xFFFF0000u);
  }
  // The result is in the upper half of each lane; the lower half is not cleared.
  POSENC_HD static UintVector round(Vector value) {
    const UintVector bits = bit_cast<UintVector>(value);
    const UintVector is_nan = bit_cast<UintVector>((bits & 0x7FFFFFFFu) > 0x7F800000u);
    return (round_number(value) & ~is_nan) | (is_nan & (bits | 0x400000u));
  }
  POSENC_HD static UintVector round_number(Vector value) {
    const UintVector bits = bit_cast<UintVector>(value);
    return bits + 0x7FFFu + ((bits >> 16) & 1u);
  }
  template <bool stream>
  POSENC_HD static void store(BFloat16* to, const Vector (&values)[2]) {
#if defined(POSENC_HAVE_AVX512_BF16)
    // One instruction rounds all, but it takes subnormal numbers for zero. So a result of zero goes the long way.
    const __m512i halves =
        bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(values[1]), bit_cast<__m512>(values[0])));
    if (__builtin_expect(_mm512_testn_epi16_mask(halves, _mm512_set1_epi16(0x7FFF)) == 0, 1)) {
      alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
      const __m512i order = _mm512_load_si512(kOrder);
      return store_bytes<stream>(to, bit_cast<UintVector>(_mm512_permutexvar_epi16(order, halves)));
    }
#endif
#if POSENC_VECTOR_BYTES == 32
    // NaNs are rare and take more work.
    const __m256 even = bit_cast<__m256>(values[0]), odd = bit_cast<__m256>(values[1]);
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(even, odd, _CMP_UNORD_Q)) == 0, 1)) {
      const __m256i low = bit_cast<__m256i>(round_number(values[0]) >> 16);
      const __m256i both = _mm256_blend_epi16(low, bit_cast<__m256i>(round_number(values[1])), 0xAA);
      return store_bytes<stream>(to, bit_cast<UintVector>(both));
    }
#endif
    store_bytes<stream>(to, (round(values[0]) >> 16) | (round(values[1]) & 0xFFFF0000u));
  }
};

template <>
struct Element<Float16> {
  using acc_t = float;
  using Vector = FloatVector;
  static constexpr bool kSplit = false;
  POSENC_HD static acc_t to_acc(Float16 value) { return float_of_half(value.bits); }
  POSENC_HD static Float16 from_acc(acc_t value) { return {half_of_float(value)}; }
  POSENC_HD static void load(const Float16* from, Vector (&values)[2]) {
    for (int64_t v = 0; v < 2; ++v) values[v] = widen(from + v * kLanes<acc_t>);
  }
  template <bool stream>
  POSENC_HD static void store(Float16* to, const Vector (&values)[2]) {
    store_bytes<stream>(to, join(narrow(values[0]), narrow(values[1])));
  }

 private:
  POSENC_HD static Vector widen(const Float16* from) {
#if POSENC_VECTOR_BYTES == 64
    return bit_cast<Vector>(_mm512_maskz_cvtph_ps(__mmask16{0xFFFF}, load_bytes<__m256i>(from)));
#elif POSENC_VECTOR_BYTES == 32
    return bit_cast<Vector>(_mm256_cvtph_ps(load_bytes<__m128i>(from)));
#else
    Vector value;
    for (int64_t i = 0; i < kLanes<float>; ++i) value[i] = float_of_half(from[i].bits);
    return value;
#endif
  }
  POSENC_HD static HalfUintVector narrow(Vector value) {
#if POSENC_VECTOR_BYTES == 64
    return bit_cast<HalfUintVector>(_mm512_maskz_cvtps_ph(__mmask16{0xFFFF}, bit_cast<__m512>(value),
                                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif POSENC_VECTOR_BYTES == 32
    return bit_cast<HalfUintVector>(
        _mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    HalfUintVector halves;
    for (int64_t i = 0; i < kLanes<float>; ++i) halves[i] = half_of_float(value[i]);
    return halves;
#endif
  }
};

// Calls body with an element of that type.
template <class Body>
void with_element(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::float32: return body(float{});
    case Dtype::float64: return body(double{});
    case Dtype::bfloat16: return body(BFloat16{});
    case Dtype::float16: return body(Float16{});
  }
}

// Streaming stores are weakly ordered: fence before another thread may read what this one wrote.
inline void end_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class T>
POSENC_HD bool stream_aligned(const T* to) {
  return reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0;
}
