// CBSR rows times a dense matrix [width, columns], and the products for its gradients. Included
// once per instruction set (see vec.h).
//
// A row of V reads k rows of the matrix, which stays in the second-level cache: k multiplications
// and additions for each element of the result, instead of `width` for a dense row.

// NV vectors of columns from c0 on; with `Partial` the last has n.
template <class A, class C, int NV, bool Partial>
inline void cbsr_mm_chunk(const CbsrLinearArgs& a, int64_t row, int64_t c0, int n) {
  using V = vec_t<A>;
  constexpr int L = kLanes<A>;
  const A* values = static_cast<const A*>(a.values) + row * a.k;
  const C* indices = static_cast<const C*>(a.indices) + row * a.k;
  const A* matrix = static_cast<const A*>(a.dense) + c0;
  V sum[NV] = {};
  for (int64_t s = 0; s < a.k; ++s) {
    const A* m = matrix + indices[s] * a.columns;
    const V value = splat(values[s]);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v)
      sum[v] += value * (Partial && v == NV - 1 ? load_n(m + v * L, n) : load(m + v * L));
  }
  A* out = static_cast<A*>(a.out) + row * a.columns + c0;
  for (int v = 0; v < NV; ++v)
    store_n(out + v * L, sum[v], Partial && v == NV - 1 ? n : L);
}

// out[row, s] += x[row, c0 ...] . matrix[indices[row, s], c0 ...]
template <class A, class C, int NV, bool Partial>
inline void cbsr_sddmm_chunk(const CbsrLinearArgs& a, int64_t row, int64_t c0, int n) {
  using V = vec_t<A>;
  constexpr int L = kLanes<A>;
  const C* indices = static_cast<const C*>(a.indices) + row * a.k;
  const A* x = static_cast<const A*>(a.x) + row * a.columns + c0;
  const A* matrix = static_cast<const A*>(a.dense) + c0;
  A* out = static_cast<A*>(a.out) + row * a.k;
  V own[NV];
  for (int v = 0; v < NV; ++v)
    own[v] = Partial && v == NV - 1 ? load_n(x + v * L, n) : load(x + v * L);
  for (int64_t s = 0; s < a.k; ++s) {
    const A* m = matrix + indices[s] * a.columns;
    V even{}, odd{};  // two chains of additions
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const V product = own[v] * (Partial && v == NV - 1 ? load_n(m + v * L, n) : load(m + v * L));
      (v % 2 ? odd : even) += product;
    }
    out[s] += horizontal_sum<A>(even + odd);
  }
}

// out[indices[row, s], c0 ...] += values[row, s] * x[row, c0 ...]
template <class A, class C, int NV, bool Partial>
inline void cbsr_mm_t_chunk(const CbsrLinearArgs& a, A* sums, int64_t row, int64_t c0, int n) {
  using V = vec_t<A>;
  constexpr int L = kLanes<A>;
  const A* values = static_cast<const A*>(a.values) + row * a.k;
  const C* indices = static_cast<const C*>(a.indices) + row * a.k;
  const A* x = static_cast<const A*>(a.x) + row * a.columns + c0;
  V own[NV];
  for (int v = 0; v < NV; ++v)
    own[v] = Partial && v == NV - 1 ? load_n(x + v * L, n) : load(x + v * L);
  for (int64_t s = 0; s < a.k; ++s) {
    A* to = sums + indices[s] * a.columns + c0;
    const V value = splat(values[s]);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const bool part = Partial && v == NV - 1;
      const V sum = (part ? load_n(to + v * L, n) : load(to + v * L)) + value * own[v];
      store_n(to + v * L, sum, part ? n : L);
    }
  }
}

// run.operator()<NV, Partial>(c0, n) over all columns: as many vectors as there are registers for,
// then fewer.
template <class A, class Run>
inline void each_chunk(int64_t columns, const Run& run) {
  constexpr int L = kLanes<A>, most = PYG_ACCEL_VEC_BYTES == 64 ? 16 : 8;
  int64_t c = 0;
  for (; columns - c >= most * L; c += most * L)
    run.template operator()<most, false>(c, L);
  for (; columns - c >= 4 * L; c += 4 * L)
    run.template operator()<4, false>(c, L);
  for (; columns - c >= L; c += L)
    run.template operator()<1, false>(c, L);
  if (columns > c)
    run.template operator()<1, true>(c, static_cast<int>(columns - c));
}

template <class A, class C>
void cbsr_mm_rows(const CbsrLinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    each_chunk<A>(a.columns, [&]<int NV, bool Partial>(int64_t c0, int n) {
      cbsr_mm_chunk<A, C, NV, Partial>(a, row, c0, n);
    });
}

template <class A, class C>
void cbsr_sddmm_rows(const CbsrLinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    A* out = static_cast<A*>(a.out) + row * a.k;
    for (int64_t s = 0; s < a.k; ++s)
      out[s] = 0;
    each_chunk<A>(a.columns, [&]<int NV, bool Partial>(int64_t c0, int n) {
      cbsr_sddmm_chunk<A, C, NV, Partial>(a, row, c0, n);
    });
  }
}

// Sums of rows [begin, end) in `sums`, [width, columns]; `run` has the same size.
template <class A, class C>
void cbsr_mm_t_rows(const CbsrLinearArgs& a, int64_t begin, int64_t end, void* sums, void* run) {
  const int64_t size = a.width * a.columns;
  A* total = static_cast<A*>(sums);
  A* some = static_cast<A*>(run);
  for (int64_t i = 0; i < size; ++i)
    total[i] = 0;
  for (int64_t first = begin; first < end; first += kRunRows) {
    const int64_t last = smaller(first + kRunRows, end);
    A* to = end - begin <= kRunRows ? total : some;
    if (to == some) {
      for (int64_t i = 0; i < size; ++i)
        some[i] = 0;
    }
    for (int64_t row = first; row < last; ++row)
      each_chunk<A>(a.columns, [&]<int NV, bool Partial>(int64_t c0, int n) {
        cbsr_mm_t_chunk<A, C, NV, Partial>(a, to, row, c0, n);
      });
    if (to == some) {
      for (int64_t i = 0; i < size; ++i)
        total[i] += some[i];
    }
  }
}
