// SpMM row kernels in the pull model: accumulators in registers, one pass over the entries of a row
// per chunk of columns. Included once per instruction set (see vec.h).

enum class Weight { kNone, kScalar, kPerVector, kRow };

// Entries ahead whose row of x is prefetched; measured on F = 32..256 where x exceeds the cache.
inline constexpr int64_t kPrefetchVectors = 32;

// Accumulates entries [k0, k1) of one row into NV vectors of columns starting at `x`.
// `partial`: the last two vectors may have fewer than kLanes columns (n_last[0], n_last[1]).
template <class T, class I, int NV, bool Partial, Weight W, bool Max, bool Arg>
struct SpmmChunk {
  using A = acc_t<T>;
  using V = vec_t<A>;
  using M = mask_t<A>;
  static constexpr int L = kLanes<A>;

  V acc[NV];
  M arg[Arg ? NV : 1];

  static V load_column(const T* p, int i, const int* n_last) {
    if constexpr (Partial) {
      if (i >= NV - 2)
        return load_n(p + i * L, n_last[i - (NV - 2)]);
    }
    return load(p + i * L);
  }

  // The branch is the same for all entries, so it is predicted; kernels for both would be larger.
  static V combined(const SpmmArgs& a, V x, V w) {
    V v = a.combine == Combine::kAdd   ? x + w
          : a.combine == Combine::kMul ? x * w
          : a.combine == Combine::kSub ? x - w
                                       : w - x;
    if (a.relu)
      v = v <= 0 ? V{} : v;  // written so that NaN passes through
    return v;
  }

  // `sign` is a vector of zeros for max and of sign bits for min, so one comparison serves both.
  __attribute__((always_inline)) void run(const SpmmArgs& a,
                                          const T* x,
                                          const T* weight,
                                          const int* vector_head,
                                          const int* n_last,
                                          M sign,
                                          int64_t k_row,
                                          int64_t k0,
                                          int64_t k1) {
    const I* col = static_cast<const I*>(a.csr.col);
    const I* eid = static_cast<const I*>(a.csr.eid);
    constexpr int64_t ahead = kPrefetchVectors / NV > 4 ? kPrefetchVectors / NV : 4;
    const int64_t k_last = a.csr.num_entries - 1;
    for (int64_t k = k0; k < k1; ++k) {
      const T* xr = x + static_cast<int64_t>(col[k]) * a.x_stride;
      const int64_t k_next = k + ahead < k_last ? k + ahead : k_last;
      const T* next = x + static_cast<int64_t>(col[k_next]) * a.x_stride;
#pragma GCC unroll 16
      for (int i = 0; i < (NV * L * static_cast<int>(sizeof(T)) + 63) / 64; ++i)
        __builtin_prefetch(reinterpret_cast<const char*>(next) + 64 * i);
      const T* wr = nullptr;
      if constexpr (W != Weight::kNone)
        wr = weight + (eid ? static_cast<int64_t>(eid[k]) : k) * a.weight_columns;
      if constexpr (W == Weight::kRow) {
        const T* next_row =
            weight + (eid ? static_cast<int64_t>(eid[k_next]) : k_next) * a.weight_columns;
#pragma GCC unroll 16
        for (int i = 0; i < (NV * L * static_cast<int>(sizeof(T)) + 63) / 64; ++i)
          __builtin_prefetch(reinterpret_cast<const char*>(next_row) + 64 * i);
      }
      A w{};
      if constexpr (W == Weight::kScalar)
        w = to_acc(*wr);
#pragma GCC unroll 16
      for (int i = 0; i < NV; ++i) {
        V v = load_column(xr, i, n_last);
        if constexpr (W == Weight::kScalar)
          v = v * w;
        if constexpr (W == Weight::kPerVector)
          v = v * to_acc(wr[vector_head[i]]);
        if constexpr (W == Weight::kRow)
          v = combined(a, v, load_column(wr, i, n_last));
        if constexpr (!Max) {
          acc[i] += v;
        } else {
          M flipped = as<M>(v) ^ sign;
          v = as<V>(flipped);
          const M better = (v > acc[i]) | (v != v);  // NaN wins, as in torch.amax
          acc[i] = better ? v : acc[i];
          if constexpr (Arg)
            arg[i] = better ? M{} + static_cast<typename Simd<A>::Lane>(k - k_row) : arg[i];
        }
      }
    }
  }
};

// Columns of one chunk: `offset` from the start of the row, `count` of them.
struct ChunkPlace {
  int64_t offset;
  int count;
};

// The accumulators and winners of a piece of a hub. One function for all kinds of chunks: inlined
// into each, it would be a third of the code.
template <class A>
__attribute__((noinline)) void spmm_save(const vec_t<A>* acc,
                                         const mask_t<A>* arg,
                                         int count,
                                         int64_t columns,
                                         A* sums) {
  constexpr int L = kLanes<A>;
  for (int i = 0; i < count; i += L)
    store_n(sums + i, acc[i / L], count - i < L ? count - i : L);
  if (arg)
    __builtin_memcpy(sums + columns, arg, count * sizeof(A));
}

// One row (or a piece of one), one chunk. With `partial` the raw accumulators and winner slots go
// there; otherwise the finished values go to out and arg.
template <class T, class I, int NV, bool Partial, Weight W, bool Max, bool Arg>
inline void spmm_place(const SpmmArgs& a,
                       int64_t head,
                       const ChunkPlace& place,
                       int64_t row,
                       int64_t k_row,
                       int64_t k0,
                       int64_t k1,
                       int64_t degree,
                       void* partial) {
  using A = acc_t<T>;
  using V = vec_t<A>;
  using M = mask_t<A>;
  constexpr int L = kLanes<A>;
  const int64_t columns = a.heads * a.width;
  int n_last[2];
  int vector_head[NV];
  for (int i = 0; i < 2; ++i) {
    const int left = place.count - (NV - 2 + i) * L;
    n_last[i] = left < 0 ? 0 : left > L ? L : left;
  }
  if constexpr (W == Weight::kPerVector) {
    for (int i = 0; i < NV; ++i) {
      const int64_t h = (place.offset + i * L) / a.width;
      vector_head[i] = static_cast<int>(h < a.heads ? h : a.heads - 1);
    }
  }
  auto lanes = [&](int i) { return Partial && i >= NV - 2 ? n_last[i - (NV - 2)] : L; };

  M sign{};
  if (a.reduce == Reduce::kMin) {
    V minus_zero = -V{};
    sign = as<M>(minus_zero);
  }
  SpmmChunk<T, I, NV, Partial, W, Max, Arg> chunk;
  T* out = static_cast<T*>(a.out) + row * columns + place.offset;
  // A later source block continues with the results of the earlier ones in `out`.
  const bool fresh = k0 == k_row || partial;
  // A maximum starts from the lowest value and the first entry, which wins if all are equal to it.
  const bool nonempty = Max && k1 > k0;
  for (int i = 0; i < NV; ++i) {
    chunk.acc[i] = nonempty ? splat<A>(-std::numeric_limits<A>::infinity()) : V{};
    if constexpr (std::is_same_v<T, A> && !Max) {
      if (!fresh)
        chunk.acc[i] = load_n(out + i * L, lanes(i));
    }
    if constexpr (Arg)
      chunk.arg[i] = M{} + static_cast<typename Simd<A>::Lane>(k0 - k_row);
  }
  const T* weight = static_cast<const T*>(a.weight);
  const T* x = static_cast<const T*>(a.x) + (place.offset - a.x_begin);
  const T* w = weight ? weight + (W == Weight::kRow ? place.offset : head) : nullptr;
  if constexpr (Max) {
    chunk.run(a, x, w, vector_head, n_last, sign, k_row, k0, k1);
  } else {
    V total[NV];
    for (int i = 0; i < NV; ++i)
      total[i] = chunk.acc[i];
    for (int64_t k = k0; k < k1; k += kRunEntries) {
      for (int i = 0; i < NV; ++i)
        chunk.acc[i] = V{};
      chunk.run(a, x, w, vector_head, n_last, sign, k_row, k,
                k + kRunEntries < k1 ? k + kRunEntries : k1);
      for (int i = 0; i < NV; ++i)
        total[i] += chunk.acc[i];
    }
    for (int i = 0; i < NV; ++i)
      chunk.acc[i] = total[i];
  }

  if constexpr (Max) {
    if (nonempty && a.reduce == Reduce::kMin) {
      for (int i = 0; i < NV; ++i) {
        M flipped = as<M>(chunk.acc[i]) ^ sign;
        chunk.acc[i] = as<V>(flipped);
      }
    }
  }
  if (partial) {
    spmm_save<A>(chunk.acc, Arg ? chunk.arg : nullptr, place.count, columns,
                 static_cast<A*>(partial) + place.offset);
    return;
  }
  if (!Max && a.reduce == Reduce::kMean && (a.cursor == nullptr || a.last_block) && degree > 1) {
    for (int i = 0; i < NV; ++i)
      chunk.acc[i] /= splat<A>(static_cast<A>(degree));
  }
  for (int i = 0; i < NV; ++i)
    store_n(out + i * L, chunk.acc[i], lanes(i));
  if constexpr (Arg) {
    I* arg = static_cast<I*>(a.arg) + row * columns + place.offset;
    for (int i = 0; i < NV; ++i)
      for (int j = 0; j < lanes(i); ++j)
        arg[i * L + j] =
            nonempty ? winner_of<I>(a.csr, a.arg_is_col, k_row + chunk.arg[i][j]) : I(-1);
  }
}

template <class T, class I>
using SpmmPlaceFn = void (*)(const SpmmArgs&,
                             int64_t,
                             const ChunkPlace&,
                             int64_t,
                             int64_t,
                             int64_t,
                             int64_t,
                             int64_t,
                             void*);

template <class T, class I, int NV, bool Partial, Weight W>
inline SpmmPlaceFn<T, I> spmm_pick_reduce(const SpmmArgs& a) {
  if (a.reduce == Reduce::kSum || a.reduce == Reduce::kMean)
    return spmm_place<T, I, NV, Partial, W, false, false>;
  if (a.arg)
    return spmm_place<T, I, NV, Partial, W, true, true>;
  return spmm_place<T, I, NV, Partial, W, true, false>;
}

template <class T, class I, int NV, bool Partial>
inline SpmmPlaceFn<T, I> spmm_pick(const SpmmArgs& a, Weight weight) {
  if (weight == Weight::kNone)
    return spmm_pick_reduce<T, I, NV, Partial, Weight::kNone>(a);
  if (weight == Weight::kScalar)
    return spmm_pick_reduce<T, I, NV, Partial, Weight::kScalar>(a);
  if (weight == Weight::kRow)
    return spmm_pick_reduce<T, I, NV, Partial, Weight::kRow>(a);
  return spmm_pick_reduce<T, I, NV, Partial, Weight::kPerVector>(a);
}

template <class T, class I>
struct SpmmStep {
  ChunkPlace place;
  int64_t head;
  SpmmPlaceFn<T, I> fn;
};

// Cuts columns [begin, end) into chunks that fit the register file.
template <class T, class I, class Emit>
inline void spmm_cut(const SpmmArgs& a,
                     int64_t begin,
                     int64_t end,
                     int64_t head,
                     Weight weight,
                     Emit emit) {
  constexpr int L = kLanes<acc_t<T>>;
  const bool narrow = a.reduce == Reduce::kMax || a.reduce == Reduce::kMin;
  const int most = (PYG_ACCEL_VEC_BYTES == 64 || !narrow) ? 8 : 4;
  for (int64_t f = begin; f < end;) {
    const int64_t left = end - f;
    int count;
    SpmmPlaceFn<T, I> fn;
    if (left >= 8 * L && most == 8) {
      count = 8 * L;
      fn = spmm_pick<T, I, 8, false>(a, weight);
#if PYG_ACCEL_VEC_BYTES == 64
    } else if (left > 6 * L) {
      count = static_cast<int>(left);
      fn = spmm_pick<T, I, 8, true>(a, weight);
    } else if (left > 4 * L) {
      count = static_cast<int>(left);
      fn = spmm_pick<T, I, 6, true>(a, weight);
    } else if (left == 4 * L) {
      count = 4 * L;
      fn = spmm_pick<T, I, 4, false>(a, weight);
    } else if (left > 2 * L) {
      count = static_cast<int>(left);
      fn = spmm_pick<T, I, 4, true>(a, weight);
#else
    } else if (left >= 4 * L) {
      count = 4 * L;
      fn = spmm_pick<T, I, 4, false>(a, weight);
#endif
    } else if (left >= 2 * L) {
      count = 2 * L;
      fn = spmm_pick<T, I, 2, false>(a, weight);
    } else {
      count = static_cast<int>(left);
      fn = spmm_pick<T, I, 2, true>(a, weight);
    }
    emit(SpmmStep<T, I>{{f, count}, head, fn});
    f += count;
  }
}

// Calls `emit` for every chunk of the requested columns; heads that do not start on a vector
// boundary are handled one by one.
template <class T, class I, class Emit>
inline void spmm_steps(const SpmmArgs& a, int64_t f_begin, int64_t f_end, Emit emit) {
  if (!a.weight || a.weight_rows || a.weight_columns == 1) {
    const Weight weight = !a.weight       ? Weight::kNone
                          : a.weight_rows ? Weight::kRow
                                          : Weight::kScalar;
    for (int64_t h = 0; h < a.heads; ++h)
      spmm_cut<T, I>(a, h * a.width + f_begin, h * a.width + f_end, 0, weight, emit);
  } else if (a.width % kLanes<acc_t<T>> == 0 && f_begin == 0 && f_end == a.width) {
    spmm_cut<T, I>(a, 0, a.heads * a.width, 0, Weight::kPerVector, emit);
  } else {
    for (int64_t h = 0; h < a.heads; ++h)
      spmm_cut<T, I>(a, h * a.width + f_begin, h * a.width + f_end, h, Weight::kScalar, emit);
  }
}

template <class T, class I>
void spmm_rows(const SpmmArgs& a, const Range& range) {
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  const I* col = static_cast<const I*>(a.csr.col);
  SpmmStep<T, I> steps[kMaxSteps];
  int num_steps = 0;
  auto run_steps = [&] {
    for (int64_t row = range.row_begin; row < range.row_end; ++row) {
      const int64_t k_row = rowptr[row], k_end = rowptr[row + 1];
      if (k_end - k_row > kHubDegree)
        continue;
      int64_t k0 = k_row, k1 = k_end;
      if (a.cursor) {
        k0 = k1 = a.cursor[row];
        while (k1 < k_end && col[k1] < a.col_end)
          ++k1;
      }
      for (int s = 0; s < num_steps; ++s)
        steps[s].fn(a, steps[s].head, steps[s].place, row, k_row, k0, k1, k_end - k_row, nullptr);
    }
    num_steps = 0;
  };
  spmm_steps<T, I>(a, range.f_begin, range.f_end, [&](const SpmmStep<T, I>& step) {
    steps[num_steps++] = step;
    if (num_steps == kMaxSteps)
      run_steps();
  });
  run_steps();
  if (a.cursor) {
    for (int64_t row = range.row_begin; row < range.row_end; ++row) {
      int64_t k = a.cursor[row];
      while (k < rowptr[row + 1] && col[k] < a.col_end)
        ++k;
      a.cursor[row] = k;
    }
  }
}

template <class T, class I>
void spmm_piece(const SpmmArgs& a, const Piece& piece, void* partial) {
  const int64_t k_row = static_cast<const I*>(a.csr.rowptr)[piece.row];
  spmm_steps<T, I>(a, 0, a.width, [&](const SpmmStep<T, I>& step) {
    step.fn(a, step.head, step.place, piece.row, k_row, piece.k_begin, piece.k_end, 0, partial);
  });
}

// Merges the pieces of a hub row in order, so the result does not depend on the number of threads.
template <class T, class I>
void spmm_combine(const SpmmArgs& a, int64_t row, void* partials, int64_t count) {
  using A = acc_t<T>;
  const int64_t columns = a.heads * a.width;
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  const A degree = static_cast<A>(rowptr[row + 1] - rowptr[row]);
  A* sums = static_cast<A*>(partials);
  A* slots = a.arg ? sums + columns : nullptr;
  for (int64_t p = 1; p < count; ++p) {
    const A* piece = sums + 2 * p * columns;
    merge_parts<A>(a.reduce, columns, sums, slots, piece, piece + columns);
  }
  T* out = static_cast<T*>(a.out) + row * columns;
  for (int64_t f = 0; f < columns; ++f)
    out[f] = from_acc<T>(a.reduce == Reduce::kMean ? sums[f] / degree : sums[f]);
  if (a.arg)
    store_winners<I>(a.csr, a.arg_is_col, rowptr[row], slots, columns,
                     static_cast<I*>(a.arg) + row * columns);
}
