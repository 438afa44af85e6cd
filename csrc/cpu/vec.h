// SIMD vectors for one instruction set.
//
// No include guard: this header is included once per instruction set, inside the namespace and
// target pragma of that set (see isa_*.cpp), with PYG_ACCEL_VEC_BYTES set to the register width.
// The vector extension of GCC has arithmetic, comparison and selection; only loads, stores and
// 16-bit conversions use intrinsics.

template <class A>
struct Simd;

template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(PYG_ACCEL_VEC_BYTES)));
  typedef int32_t M __attribute__((vector_size(PYG_ACCEL_VEC_BYTES)));
  typedef int32_t Lane;
};

template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(PYG_ACCEL_VEC_BYTES)));
  typedef int64_t M __attribute__((vector_size(PYG_ACCEL_VEC_BYTES)));
  typedef int64_t Lane;
};

template <class A>
constexpr int kLanes = PYG_ACCEL_VEC_BYTES / static_cast<int>(sizeof(A));

template <class A>
using vec_t = typename Simd<A>::V;
template <class A>
using mask_t = typename Simd<A>::M;

typedef uint16_t Half16 __attribute__((vector_size(PYG_ACCEL_VEC_BYTES / 2)));
typedef uint32_t Word32 __attribute__((vector_size(PYG_ACCEL_VEC_BYTES)));

// Not std::min: the linker might use its instantiation from here, with these instructions, on all
// processors.
inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// The same bits as another vector type.
template <class To, class From>
inline To as(From v) {
  return (To)v;
}

template <class A>
inline vec_t<A> splat(A value) {
  return vec_t<A>{} + value;
}

// Storage type T -> accumulation type: fp64 accumulates in fp64, everything else in fp32.
template <class T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline float to_acc(float x) {
  return x;
}
inline double to_acc(double x) {
  return x;
}
inline float to_acc(bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
inline float to_acc(fp16 x) {
  return half_to_float(x.bits);
}

template <class T>
inline T from_acc(acc_t<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return bf16{float_to_bf16(x)};
  } else if constexpr (std::is_same_v<T, fp16>) {
    return fp16{float_to_half(x)};
  } else {
    return x;
  }
}

// A vector of bytes, sign-extended to 32 bits each. With intrinsics, as GCC splits a
// conversion from bytes into lanes.
inline mask_t<float> widen_bytes(const int8_t* p) {
#if PYG_ACCEL_VEC_BYTES == 64
  return (mask_t<float>)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif PYG_ACCEL_VEC_BYTES == 32
  return (mask_t<float>)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  mask_t<float> words;
  for (int i = 0; i < kLanes<float>; ++i)
    words[i] = p[i];
  return words;
#endif
}

// float16 -> float.
inline vec_t<float> from_halves(Half16 halves) {
#if PYG_ACCEL_VEC_BYTES == 64
  return (vec_t<float>)_mm512_cvtph_ps((__m256i)halves);
#elif PYG_ACCEL_VEC_BYTES == 32
  return (vec_t<float>)_mm256_cvtph_ps((__m128i)halves);
#else
  vec_t<float> v;
  for (int i = 0; i < kLanes<float>; ++i)
    v[i] = half_to_float(halves[i]);
  return v;
#endif
}

// One vector of L = kLanes consecutive elements, converted to the accumulation type.
template <class T>
inline vec_t<acc_t<T>> load(const T* p) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    vec_t<T> v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  } else if constexpr (std::is_same_v<T, bf16>) {
    Half16 h;
    __builtin_memcpy(&h, p, sizeof(h));
    return as<vec_t<float>>(__builtin_convertvector(h, Word32) << 16);
  } else if constexpr (std::is_same_v<T, int8_t>) {
    return __builtin_convertvector(widen_bytes(p), vec_t<float>);
  } else {
    Half16 halves;
    __builtin_memcpy(&halves, p, sizeof(halves));
    return from_halves(halves);
  }
}

// The first n (0 <= n <= L) elements; the other lanes are zero and their memory is not touched.
template <class T>
inline vec_t<acc_t<T>> load_n(const T* p, int n) {
#if PYG_ACCEL_VEC_BYTES == 64
  if constexpr (std::is_same_v<T, float>)
    return (vec_t<float>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
  if constexpr (std::is_same_v<T, double>)
    return (vec_t<double>)_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p);
  if constexpr (std::is_same_v<T, fp16>)
    return (vec_t<float>)_mm512_cvtph_ps(
        _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
#elif PYG_ACCEL_VEC_BYTES == 32
  if constexpr (std::is_same_v<T, float>)
    return (vec_t<float>)_mm256_maskload_ps(
        p, (__m256i)(mask_t<float>{0, 1, 2, 3, 4, 5, 6, 7} < mask_t<float>{} + n));
  if constexpr (std::is_same_v<T, double>)
    return (vec_t<double>)_mm256_maskload_pd(
        p, (__m256i)(mask_t<double>{0, 1, 2, 3} < mask_t<double>{} + n));
#endif
  alignas(64) T buffer[kLanes<acc_t<T>>] = {};
  for (int i = 0; i < n; ++i)
    buffer[i] = p[i];
  return load(buffer);
}

// Rounds to 16 bits; NaN stays NaN.
template <class T>
inline Half16 to_halves(vec_t<float> v) {
  if constexpr (std::is_same_v<T, bf16>) {
    const Word32 bits = as<Word32>(v);
    const Word32 nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // ties to even
    return __builtin_convertvector(v != v ? (bits >> 16) | 0x40u : nearest, Half16);
  } else {
#if PYG_ACCEL_VEC_BYTES == 64
    return (Half16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif PYG_ACCEL_VEC_BYTES == 32
    return (Half16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Half16 halves;
    for (int i = 0; i < kLanes<float>; ++i)
      halves[i] = float_to_half(v[i]);
    return halves;
#endif
  }
}

template <class T>
inline void store_n(T* p, vec_t<acc_t<T>> v, int n) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, fp16>) {
    const Half16 halves = to_halves<T>(v);
    if (n == kLanes<float>)
      return (void)__builtin_memcpy(p, &halves, sizeof(halves));
#if PYG_ACCEL_VEC_BYTES == 64
    return _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), (__m256i)halves);
#endif
    for (int i = 0; i < n; ++i)
      p[i] = T{halves[i]};
    return;
  } else if (n == kLanes<T>) {
    return (void)__builtin_memcpy(p, &v, sizeof(v));
  }
#if PYG_ACCEL_VEC_BYTES == 64
  if constexpr (std::is_same_v<T, float>)
    return _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
  if constexpr (std::is_same_v<T, double>)
    return _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << n) - 1), (__m512d)v);
#elif PYG_ACCEL_VEC_BYTES == 32
  if constexpr (std::is_same_v<T, float>) {  // by halves: masked stores are slow on some processors
    __m128 rest = _mm256_castps256_ps128((__m256)v);
    if (n & 4) {
      _mm_storeu_ps(p, rest);
      rest = _mm256_extractf128_ps((__m256)v, 1);
      p += 4;
    }
    if (n & 2) {
      _mm_storel_pi(reinterpret_cast<__m64*>(p), rest);
      rest = _mm_movehl_ps(rest, rest);
      p += 2;
    }
    if (n & 1)
      _mm_store_ss(p, rest);
    return;
  }
#endif
  for (int i = 0; i < n; ++i)
    p[i] = static_cast<T>(v[i]);
}
