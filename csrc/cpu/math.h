// Elementary functions on vectors. Included once per instruction set.
//
// fp32: series with an error of at most 2 units in the last place over the whole range, infinities
// and NaN included. fp64 calls the C library lane by lane: tests use it, and need no speed.

template <class A, class F>
inline vec_t<A> each_lane(vec_t<A> x, F f) {
  for (int i = 0; i < kLanes<A>; ++i)
    x[i] = f(x[i]);
  return x;
}

inline vec_t<float> power_of_two(mask_t<float> n) {
  const mask_t<float> bits = (n + 127) << 23;
  return as<vec_t<float>>(bits);
}

inline vec_t<double> vexp(vec_t<double> x) {
  return each_lane<double>(x, [](double v) { return std::exp(v); });
}

inline vec_t<float> vexp(vec_t<float> x) {
  using V = vec_t<float>;
  using M = mask_t<float>;
  const V nan = x;
  const M is_nan = x != x;
  x = x > 89.0f ? splat(89.0f) : x;
  x = x < -104.0f ? splat(-104.0f) : x;
  x = is_nan ? V{} : x;
  const V shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const V n = shifted - 12582912.0f;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  V p = splat(1.0f / 5040.0f);
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const M whole = __builtin_convertvector(n, M);
  const M half = whole >> 1;  // two factors: 2^n itself may be out of range
  p = p * power_of_two(half) * power_of_two(whole - half);
  return is_nan ? nan : p;
}

inline vec_t<double> vlog(vec_t<double> x) {
  return each_lane<double>(x, [](double v) { return std::log(v); });
}

inline vec_t<float> vlog(vec_t<float> x) {
  using V = vec_t<float>;
  using M = mask_t<float>;
  const V input = x;
  const M tiny = x < 1.17549435e-38f;
  x = tiny ? x * 8388608.0f : x;
  const M bits = as<M>(x);
  const M shift = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3 is sqrt(1/2)
  const M mantissa = bits - (shift << 23);
  const V m = as<V>(mantissa);
  const V e = __builtin_convertvector(shift, V) - (tiny ? splat(23.0f) : V{});
  const V s = (m - 1.0f) / (m + 1.0f);
  const V z = s * s;
  V p = splat(2.0f / 11.0f);
  p = p * z + 2.0f / 9.0f;
  p = p * z + 2.0f / 7.0f;
  p = p * z + 2.0f / 5.0f;
  p = p * z + 2.0f / 3.0f;
  V y = s * 2.0f + s * z * p;
  y = (y - e * 2.12194440e-4f) + e * 0.693359375f;
  const float inf = std::numeric_limits<float>::infinity();
  y = input == inf ? splat(inf) : y;
  y = input == 0.0f ? splat(-inf) : y;
  return (input < 0.0f) | (input != input) ? splat(std::numeric_limits<float>::quiet_NaN()) : y;
}

inline vec_t<double> vtanh(vec_t<double> x) {
  return each_lane<double>(x, [](double v) { return std::tanh(v); });
}

inline vec_t<float> vtanh(vec_t<float> x) {
  using V = vec_t<float>;
  const V abs = x < 0.0f ? -x : x;
  V large = 1.0f - 2.0f / (vexp(abs * 2.0f) + 1.0f);
  large = x < 0.0f ? -large : large;
  const V z = x * x;  // the Taylor series, used below |x| = 0.55
  V p = splat(-929569.0f / 638512875.0f);
  p = p * z + 21844.0f / 6081075.0f;
  p = p * z - 1382.0f / 155925.0f;
  p = p * z + 62.0f / 2835.0f;
  p = p * z - 17.0f / 315.0f;
  p = p * z + 2.0f / 15.0f;
  p = p * z - 1.0f / 3.0f;
  const V small = x + x * z * p;
  return abs < 0.55f ? small : large;
}

template <class V>
inline V vsigmoid(V x) {
  return 1 / (1 + vexp(-x));
}

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|))
inline vec_t<double> vsoftplus(vec_t<double> x) {
  return each_lane<double>(
      x, [](double v) { return (v > 0 ? v : 0) + std::log1p(std::exp(v > 0 ? -v : v)); });
}

inline vec_t<float> vsoftplus(vec_t<float> x) {
  using V = vec_t<float>;
  const V y = vexp(x > 0.0f ? -x : x);
  const V u = y + 1.0f;
  const V log1p = u == 1.0f ? y : vlog(u) * (y / (u - 1.0f));  // mends the rounding of 1 + y
  return (x > 0.0f ? x : V{}) + (x != x ? x : log1p);
}

template <class A>
inline vec_t<A> vsqrt(vec_t<A> x) {
  return each_lane<A>(x, [](A v) { return std::sqrt(v); });
}

template <class A>
inline vec_t<A> verf(vec_t<A> x) {
  return each_lane<A>(x, [](A v) { return std::erf(v); });
}

template <class A>
inline vec_t<A> vpow(vec_t<A> x, A exponent) {
  return each_lane<A>(x, [exponent](A v) { return std::pow(v, exponent); });
}
