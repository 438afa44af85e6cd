// Lanes of vectors: rotations and sums. Included once per instruction set (see vec.h).

// Lane i of the result is lane i + Step of v. The indices of the shuffle must be literals: GCC does
// not unroll a loop that fills them, and computing them takes longer than the sum.
template <class A, int Step, int... Lanes>
inline vec_t<A> rotate(vec_t<A> v, std::integer_sequence<int, Lanes...>) {
  return __builtin_shuffle(v, mask_t<A>{((Lanes + Step) % kLanes<A>)...});
}

// 0, 1, ... of each lane.
template <class A, int... Lanes>
inline mask_t<A> lane_numbers(std::integer_sequence<int, Lanes...>) {
  return mask_t<A>{Lanes...};
}

template <class A>
inline mask_t<A> lane_numbers() {
  return lane_numbers<A>(std::make_integer_sequence<int, kLanes<A>>{});
}

// Sums the lanes by halving, in registers and in a fixed order.
template <class A, int Step = kLanes<A> / 2>
inline A horizontal_sum(vec_t<A> v) {
  v += rotate<A, Step>(v, std::make_integer_sequence<int, kLanes<A>>{});
  if constexpr (Step > 1)
    return horizontal_sum<A, Step / 2>(v);
  else
    return v[0];
}

// Lane i of the result is the reduction by `f` of all lanes whose index is i modulo `period`.
template <class A, int Step = kLanes<A> / 2, class F>
inline vec_t<A> folded(vec_t<A> v, int period, F f) {
  if (Step < period)
    return v;
  v = f(v, rotate<A, Step>(v, std::make_integer_sequence<int, kLanes<A>>{}));
  if constexpr (Step > 1)
    return folded<A, Step / 2>(v, period, f);
  else
    return v;
}

// The first n elements, or as many as a vector has.
template <class T>
inline vec_t<acc_t<T>> load_part(const T* p, int64_t n) {
  return n >= kLanes<acc_t<T>> ? load(p) : load_n(p, static_cast<int>(n));
}

// The first n lanes of v; the others are `other`.
template <class A>
inline vec_t<A> first_lanes(vec_t<A> v, int n, A other) {
  return n == kLanes<A> ? v : lane_numbers<A>() < mask_t<A>{} + n ? v : splat<A>(other);
}

// Lane i of the result is the sum of lanes i to i + width - 1.
template <class A, int Step = 1>
inline vec_t<A> running_sum(vec_t<A> v, int width) {
  v += rotate<A, Step>(v, std::make_integer_sequence<int, kLanes<A>>{});
  if constexpr (2 * Step < kLanes<A>) {
    if (2 * Step < width)
      return running_sum<A, 2 * Step>(v, width);
  }
  return v;
}

// Sums of groups of `width` lanes, a divisor of kLanes, of the first n lanes.
template <class A>
inline void segment_sums(vec_t<A> v, int width, int n, A* to) {
  if (width > 1)
    v = running_sum<A>(v, width);
  const vec_t<A> sums = __builtin_shuffle(v, lane_numbers<A>() * width);
  store_n(to, sums, n / width);
}

// The heads, of `width` columns each, that columns f, f + 1, ... of a row belong to.
template <class A>
struct HeadsOfLanes {
  HeadsOfLanes(int64_t f, int64_t width)
      : first(static_cast<uint32_t>(f) / static_cast<uint32_t>(width)) {
    const A begin = static_cast<A>(f - first * width) + A(0.5);
    const vec_t<A> head = (__builtin_convertvector(lane_numbers<A>(), vec_t<A>) + begin) *
                          (1 / static_cast<A>(width));
    offsets = __builtin_convertvector(head, mask_t<A>);
  }

  // Lane i of the result is the number of the head of column f + i; numbers[0] belongs to `first`.
  vec_t<A> spread(vec_t<A> numbers) const { return __builtin_shuffle(numbers, offsets); }

  int64_t first;
  mask_t<A> offsets;  // of the head of each lane from `first`
};
