// Reductions of messages to the accumulators of a row. Included once per instruction set.

// `count` messages of `columns` elements, `stride` apart, from consecutive entries of a row, and
// where to reduce them.
template <class A>
struct Messages {
  const A* data;
  int64_t stride;
  int count;
  int columns;
  A* total;
  A* slots;      // positions of maxima and minima within the row, or null
  int64_t slot;  // position of the first entry
  bool fresh;    // the accumulators are undefined; else entries before were reduced to them
};

// Calls fn(i, n, load) for each vector of n columns from column i on; load(j) returns these columns
// of message j.
template <class A, class F>
inline void each_vector(const Messages<A>& m, F fn) {
  constexpr int L = kLanes<A>;
  int i = 0;
  for (; i + L <= m.columns; i += L)
    fn(i, L, [&](int j) { return load(m.data + j * m.stride + i); });
  const int rest = m.columns - i;
  if (rest > 0)
    fn(i, rest, [&](int j) { return load_n(m.data + j * m.stride + i, rest); });
}

// Sums and products, one message after another: the size of tiles does not change the result.
template <class A, class Add>
inline void accumulate(const Messages<A>& m, A start, Add add) {
  each_vector(m, [&](int i, int n, auto message) {
    vec_t<A> s = m.fresh ? splat<A>(start) : load_part(m.total + i, n);
    for (int j = 0; j < m.count; ++j)
      s = add(s, message(j), j);
    store_n(m.total + i, s, n);
  });
}

// Maxima and minima. The first entry wins unless another one is better; NaN wins over all.
template <class A, bool Slots, class Better>
inline void choose_vectors(const Messages<A>& m, A worst, Better better_than) {
  using M = mask_t<A>;
  using Lane = typename Simd<A>::Lane;
  each_vector(m, [&](int i, int n, auto message) {
    vec_t<A> s = m.fresh ? splat<A>(worst) : load_part(m.total + i, n);
    M slot = M{} + static_cast<Lane>(m.slot);
    if (Slots && !m.fresh)
      slot = as<M>(load_part(m.slots + i, n));
    for (int j = 0; j < m.count; ++j) {
      const vec_t<A> v = message(j);
      const M better = better_than(v, s) | (v != v);
      s = better ? v : s;
      if constexpr (Slots)
        slot = better ? M{} + static_cast<Lane>(m.slot + j) : slot;
    }
    store_n(m.total + i, s, n);
    if constexpr (Slots)
      store_n(m.slots + i, as<vec_t<A>>(slot), n);
  });
}

template <class A, class Better>
inline void choose(const Messages<A>& m, A worst, Better better_than) {
  m.slots ? choose_vectors<A, true>(m, worst, better_than)
          : choose_vectors<A, false>(m, worst, better_than);
}

// each_row(fn) calls fn with the messages of each row.
template <class A, class EachRow>
inline void reduce_rows(Reduce reduce, EachRow each_row) {
  using V = vec_t<A>;
  using Row = const Messages<A>&;
  constexpr A infinity = std::numeric_limits<A>::infinity();
  switch (reduce) {
    case Reduce::kSum:
    case Reduce::kMean:
      return each_row([](Row m) { accumulate<A>(m, 0, [](V s, V v, int) { return s + v; }); });
    case Reduce::kSqSum:
      return each_row([](Row m) { accumulate<A>(m, 0, [](V s, V v, int) { return s + v * v; }); });
    case Reduce::kProd:
      return each_row([](Row m) { accumulate<A>(m, 1, [](V s, V v, int) { return s * v; }); });
    case Reduce::kMax:
      return each_row([](Row m) { choose<A>(m, -infinity, [](V v, V s) { return v > s; }); });
    case Reduce::kMin:
      return each_row([](Row m) { choose<A>(m, infinity, [](V v, V s) { return v < s; }); });
    case Reduce::kNone:
      return;
  }
}

// Merges the accumulators of two parts of a row into the first.
template <class A>
inline void merge_parts(Reduce reduce,
                        int64_t columns,
                        A* total,
                        A* slots,
                        const A* other,
                        const A* other_slots) {
  for (int64_t f = 0; f < columns; ++f) {
    const A value = other[f];
    if (reduce == Reduce::kProd) {
      total[f] *= value;
    } else if (reduce != Reduce::kMax && reduce != Reduce::kMin) {
      total[f] += value;
    } else if (value != value || (reduce == Reduce::kMax ? value > total[f] : value < total[f])) {
      total[f] = value;
      if (slots)
        __builtin_memcpy(slots + f, other_slots + f, sizeof(A));
    }
  }
}

// What a maximum or minimum returns for its winner, entry k.
template <class I>
inline I winner_of(const Csr& csr, bool as_column, int64_t k) {
  if (as_column)
    return static_cast<const I*>(csr.col)[k];
  return csr.eid ? static_cast<const I*>(csr.eid)[k] : static_cast<I>(k);
}

template <class I, class A>
inline void store_winners(const Csr& csr,
                          bool as_column,
                          int64_t k_row,
                          const A* slots,
                          int64_t columns,
                          I* out) {
  const auto* numbers = reinterpret_cast<const typename Simd<A>::Lane*>(slots);
  for (int64_t f = 0; f < columns; ++f)
    out[f] = winner_of<I>(csr, as_column, k_row + numbers[f]);
}
