// Sums over a sample of the entries of each row, in the two stages of the ES-SpMM paper (section
// IV): choose entries, and copy their columns and factors into an array in the first-level cache;
// then sum these rows of x. Included once per instruction set.
//
// pyg_accel/backends/sampling.py defines which entries are chosen.

// 8-bit features are summed and stored in float.
template <class T>
using sampled_out_t = std::conditional_t<sizeof(T) == 1, float, T>;

// The step between entries of the sample of a row that is longer than the limit.
inline int64_t step_of(const SampledArgs& a, int64_t degree) {
  if (a.strategy == Strategy::kBucket)
    return 1;
  int64_t step = 577;
  for (const int64_t prime : {587, 593})
    step = degree % step == 0 ? prime : step;
  return step % degree;
}

// Sums `count` rows of x, NV vectors of columns from `x` on. With `Partial` the last has n.
template <class T, int NV, bool Partial, bool Factors>
inline void sampled_chunk(const SampledArgs& a,
                          const T* x,
                          const int64_t* cols,
                          const acc_t<T>* factors,
                          int64_t count,
                          acc_t<T> factor,
                          const float* column_scale,
                          sampled_out_t<T>* out,
                          int n) {
  using A = acc_t<T>;
  using V = vec_t<A>;
  constexpr int L = kLanes<A>;
  constexpr int64_t ahead = 8;
  V total[NV] = {};
  for (int64_t begin = 0; begin < count; begin += kRunEntries) {
    const int64_t end = smaller(count, begin + kRunEntries);
    V sum[NV] = {};
    for (int64_t i = begin; i < end; ++i) {
      const T* row = x + cols[i] * a.x_stride;
      const T* next = x + cols[smaller(i + ahead, count - 1)] * a.x_stride;
#pragma GCC unroll 16
      for (int line = 0; line < (NV * L * static_cast<int>(sizeof(T)) + 63) / 64; ++line)
        __builtin_prefetch(reinterpret_cast<const char*>(next) + 64 * line);
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        V value = Partial && v == NV - 1 ? load_n(row + v * L, n) : load(row + v * L);
        if constexpr (Factors)
          value = value * factors[i];
        sum[v] += value;
      }
    }
    for (int v = 0; v < NV; ++v)
      total[v] += sum[v];
  }
  for (int v = 0; v < NV; ++v) {
    const int lanes = Partial && v == NV - 1 ? n : L;
    V value = total[v] * factor;
    if constexpr (sizeof(T) == 1) {
      if (column_scale)
        value = value * load_n(column_scale + v * L, lanes);
    }
    store_n(out + v * L, value, lanes);
  }
}

template <class T, bool Factors>
inline void sampled_columns(const SampledArgs& a,
                            int64_t head,
                            const int64_t* cols,
                            const acc_t<T>* factors,
                            int64_t count,
                            acc_t<T> factor,
                            sampled_out_t<T>* out) {
  constexpr int L = kLanes<acc_t<T>>;
  const T* x = static_cast<const T*>(a.x) + head * a.width;
  const float* scale = a.column_scale ? a.column_scale + head * a.width : nullptr;
  auto run = [&]<int NV, bool Partial>(int64_t f, int n) {
    sampled_chunk<T, NV, Partial, Factors>(a, x + f, cols, factors, count, factor,
                                           scale ? scale + f : nullptr, out + f, n);
  };
  int64_t f = 0;
  for (; a.width - f >= 8 * L; f += 8 * L)
    run.template operator()<8, false>(f, L);
  if (a.width - f >= 4 * L) {
    run.template operator()<4, false>(f, L);
    f += 4 * L;
  }
  if (a.width - f >= 2 * L) {
    run.template operator()<2, false>(f, L);
    f += 2 * L;
  }
  if (a.width - f > L)
    run.template operator()<2, true>(f, static_cast<int>(a.width - f - L));
  else if (a.width > f)
    run.template operator()<1, true>(f, static_cast<int>(a.width - f));
}

template <class T, class I>
void sampled_rows(const SampledArgs& a, const Range& range, int64_t* scratch) {
  using A = acc_t<T>;
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  const I* col = static_cast<const I*>(a.csr.col);
  const I* eid = static_cast<const I*>(a.csr.eid);
  const auto* weight = static_cast<const sampled_out_t<T>*>(a.weight);
  const bool factors = weight || a.row_scale;
  int64_t* cols = scratch;
  int64_t* edges = scratch + a.most;
  A* products = reinterpret_cast<A*>(scratch + 2 * a.most);
  auto* out = static_cast<sampled_out_t<T>*>(a.out) + range.row_begin * a.heads * a.width;
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    const int64_t begin = rowptr[row], degree = rowptr[row + 1] - begin;
    const int64_t count = smaller(degree, a.limit);
    const int64_t step = degree > a.limit ? step_of(a, degree) : 1;
    int64_t position = 0;
    for (int64_t i = 0; i < count; ++i) {
      cols[i] = col[begin + position];
      edges[i] = eid ? static_cast<int64_t>(eid[begin + position]) : begin + position;
      position += step;
      position -= position >= degree ? degree : 0;
    }
    A factor = 1;
    if (count > 0 && a.rescale != Rescale::kNone)
      factor = static_cast<A>(a.rescale == Rescale::kMean ? 1 : degree) / static_cast<A>(count);
    for (int64_t h = 0; h < a.heads; ++h, out += a.width) {
      if (!factors) {
        sampled_columns<T, false>(a, h, cols, products, count, factor, out);
        continue;
      }
      const int64_t own = a.weight_columns > 1 ? h : 0;
      for (int64_t i = 0; i < count; ++i) {
        A product = weight ? to_acc(weight[edges[i] * a.weight_columns + own]) : A{1};
        if (a.row_scale)
          product *= a.row_scale[cols[i]];
        products[i] = product;
      }
      sampled_columns<T, true>(a, h, cols, products, count, factor, out);
    }
  }
}
