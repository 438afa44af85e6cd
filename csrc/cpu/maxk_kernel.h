// The k largest elements of each row, by bisection on the bits of floats. Included once per
// instruction set (see vec.h).
//
// The bits of floats as integers, inverted if the float is negative, have the order of the floats.

// Writes the keys of a row, padded with the smallest one; all NaN are equal and the largest, -0.0
// equals 0.0.
template <class T>
inline void maxk_keys(const T* x, int64_t width, typename Simd<acc_t<T>>::Lane* keys) {
  using A = acc_t<T>;
  using V = vec_t<A>;
  using M = mask_t<A>;
  using Key = typename Simd<A>::Lane;
  constexpr int L = kLanes<A>;
  constexpr Key most = std::numeric_limits<Key>::max();
  for (int64_t c = 0; c < width; c += L) {
    const int n = static_cast<int>(smaller(L, width - c));
    const V v = n == L ? load(x + c) : load_n(x + c, n);
    const M bits = as<M>(v);
    M key = bits ^ ((bits >> static_cast<Key>(8 * sizeof(Key) - 1)) & most);
    key = v != v ? M{} + most : key;
    key = v == 0 ? M{} : key;
    __builtin_memcpy(keys + c, &key, sizeof(key));
    for (int i = n; i < L; ++i)
      keys[c + i] = std::numeric_limits<Key>::min();
  }
}

// Bit i tells whether key i of a vector is at least `least`.
template <class A>
inline uint32_t maxk_mask(const typename Simd<A>::Lane* keys, typename Simd<A>::Lane least) {
#if PYG_ACCEL_VEC_BYTES == 64
  if constexpr (sizeof(A) == 4)
    return _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys), _mm512_set1_epi32(least));
  else
    return _mm512_cmpge_epi64_mask(_mm512_loadu_si512(keys), _mm512_set1_epi64(least));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes<A>; ++i)
    mask |= static_cast<uint32_t>(keys[i] >= least) << i;
  return mask;
#endif
}

// How many keys are at least `least`.
template <class A>
inline int64_t maxk_count(const typename Simd<A>::Lane* keys,
                          int64_t width,
                          typename Simd<A>::Lane least) {
  int64_t total = 0;
#if PYG_ACCEL_VEC_BYTES == 64
  for (int64_t c = 0; c < width; c += kLanes<A>)
    total += __builtin_popcount(maxk_mask<A>(keys + c, least));
#else
  using M = mask_t<A>;
  M count{};
  for (int64_t c = 0; c < width; c += kLanes<A>) {
    M key;
    __builtin_memcpy(&key, keys + c, sizeof(key));
    count -= key >= least;  // true is -1
  }
  for (int i = 0; i < kLanes<A>; ++i)
    total += count[i];
#endif
  return total;
}

template <class T, class C>
inline void maxk_row(const MaxkArgs& a, int64_t row, typename Simd<acc_t<T>>::Lane* keys) {
  using A = acc_t<T>;
  using M = mask_t<A>;
  using Key = typename Simd<A>::Lane;
  constexpr int L = kLanes<A>;
  constexpr Key most = std::numeric_limits<Key>::max();
  const T* x = static_cast<const T*>(a.x) + row * a.width;
  maxk_keys(x, a.width, keys);
  M lows = M{} + most, highs = M{} + std::numeric_limits<Key>::min();
  for (int64_t c = 0; c + L <= a.width; c += L) {
    M key;
    __builtin_memcpy(&key, keys + c, sizeof(key));
    lows = key < lows ? key : lows;
    highs = key > highs ? key : highs;
  }
  Key low = most, high = std::numeric_limits<Key>::min();
  for (int i = 0; i < L; ++i) {
    low = lows[i] < low ? lows[i] : low;
    high = highs[i] > high ? highs[i] : high;
  }
  for (int64_t c = a.width / L * L; c < a.width; ++c) {
    low = keys[c] < low ? keys[c] : low;
    high = keys[c] > high ? keys[c] : high;
  }
  // The largest threshold for which at least k keys are as large.
  while (low < high) {
    const Key middle = (low | high) - ((low ^ high) >> 1);  // rounded up, without overflow
    const int64_t count = maxk_count<A>(keys, a.width, middle);
    if (count < a.k)
      high = middle - 1;
    else
      low = middle;
    if (count == a.k)
      break;
  }
  // Among keys equal to the threshold, the lowest columns are taken.
  int64_t need = a.k - (low == most ? 0 : maxk_count<A>(keys, a.width, low + 1));
  T* values = static_cast<T*>(a.values) + row * a.k;
  C* indices = static_cast<C*>(a.indices) + row * a.k;
  int64_t stored = 0;
  for (int64_t block = 0; stored < a.k; block += L) {
    uint32_t mask = maxk_mask<A>(keys + block, low);
#if PYG_ACCEL_VEC_BYTES == 64
    if constexpr (std::is_same_v<T, float>) {
      const uint32_t more = low == most ? 0 : maxk_mask<A>(keys + block, low + 1);
      uint32_t equal = mask ^ more;
      while (__builtin_popcount(equal) > need)
        equal &= ~(1u << (31 - __builtin_clz(equal)));
      need -= __builtin_popcount(equal);
      mask = more | equal;
      const int n = static_cast<int>(smaller(L, a.width - block));
      const __mmask16 chosen = static_cast<__mmask16>(mask & ((1u << n) - 1));
      const int count = __builtin_popcount(chosen);
      const __mmask16 room = static_cast<__mmask16>((1u << count) - 1);
      const __m512 some = (__m512)load_n(x + block, n);
      _mm512_mask_storeu_ps(values + stored, room, _mm512_maskz_compress_ps(chosen, some));
      const __m512i columns =
          _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(static_cast<int>(block)));
      const __m512i packed = _mm512_maskz_compress_epi32(chosen, columns);
      if constexpr (sizeof(C) == 1)
        _mm512_mask_cvtepi32_storeu_epi8(indices + stored, room, packed);
      else
        _mm512_mask_cvtepi32_storeu_epi16(indices + stored, room, packed);
      stored += count;
      continue;
    }
#endif
    for (; mask; mask &= mask - 1) {
      const int64_t c = block + __builtin_ctz(mask);
      if (keys[c] == low && need-- <= 0)
        continue;
      values[stored] = x[c];
      indices[stored] = static_cast<C>(c);
      ++stored;
    }
  }
}

template <class T>
void maxk_rows(const MaxkArgs& a, int64_t begin, int64_t end, void* scratch) {
  auto* keys = static_cast<typename Simd<acc_t<T>>::Lane*>(scratch);
  for (int64_t row = begin; row < end; ++row)
    a.wide ? maxk_row<T, uint16_t>(a, row, keys) : maxk_row<T, uint8_t>(a, row, keys);
}
